"""How a step scales by the cost model of `slime plan --gpus`, and that model against measured and published
steps.

    python benchmarks/scaling.py [--out scaling.json]

The H200 rows are measured (docs/performance.md); the others are the numbers that NVIDIA publishes for NeMo RL
0.4 on H100 (its performance summary), with the batch and lengths given there. That is another program: the
error says how far its steps are from what these costs allow, not only how wrong the costs are.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from slime.catalog.gpus import GPUS, MODELS
from slime.preflight.step_costs import EnginePlan, Model, Work, best_runs, train_plan
from slime.preflight.trainer_plan import Sizes
from slime.utils.machine.stacks import watch_exit


@dataclass(frozen=True)
class Published:
    """A step of NeMo RL on H100; `overlapped_s`: one step off policy, on `overlapped_gpus`."""

    model: str
    gpus: int
    samples: int
    length: float  # prompt and answer, on average
    longest: float
    step_s: float
    overlapped_gpus: int
    overlapped_s: float


PROMPT = 150.0
PUBLISHED = (
    Published("llama-3.1-8b", 16, 2048, 1060, 4096, 97.7, 16, 74.6),
    Published("qwen3-30b-a3b", 32, 2048, 3154, 4096, 225.0, 32, 244.0),
    Published("qwen3-32b", 32, 2048, 3206, 4096, 393.0, 64, 215.0),
    Published("qwen3-235b-a22b", 128, 512, 5671, 8192, 506.0, 256, 241.0),
    Published("deepseek-v3", 256, 512, 745, 1536, 154.0, 512, 77.9),
)
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
SHOWN = ("qwen3-4b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")


def against_h200() -> list[dict[str, float | str]]:
    gpu = GPUS["h200"]
    small, large = Model(MODELS["qwen3-0.6b"]), Model(MODELS["qwen3-4b"] | {"vocab_size": 512})
    rollout, step = Work(128, 256, 512, 0.0), Work(512, 32, 950, 0.0, passes=0)
    tokens = 128 * 512 / EnginePlan(small, gpu, 1, 64).generate_s(rollout, 128)
    rows = [
        ("0.6B rollout, tokens/s", 17_000.0, tokens),
        ("4B generating 512 x 950, s", 23.2, EnginePlan(large, gpu, 1, 256).generate_s(step, 512)),
        ("4B training on them, s", 21.6, train_plan(large, gpu, Sizes(1), step).seconds),
    ]
    return [{"what": what, "measured": m, "model": c, "error": c / m - 1} for what, m, c in rows]


def against_published() -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    for p in PUBLISHED:
        model = Model(MODELS[p.model])
        answer = p.length - PROMPT
        steps = max(1, p.samples // 512)
        work = Work(p.samples, PROMPT, answer, 0.6, p.longest - PROMPT, 1, steps)
        turns = next(r for r in best_runs(model, GPUS["h100"], p.gpus, work) if not r.rollout_gpus)
        apart = [r for r in best_runs(model, GPUS["h100"], p.overlapped_gpus, work) if r.rollout_gpus]
        async_s = min((r.step_s for r in apart), default=float("nan"))
        rows.append(
            {
                "model": p.model,
                "gpus": p.gpus,
                "published_s": p.step_s,
                "model_s": turns.step_s,
                "error": turns.step_s / p.step_s - 1,
                "published_gain": p.step_s / p.overlapped_s,
                "model_gain": turns.step_s / async_s,
            }
        )
    return rows


def scaling() -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    for name in SHOWN:
        model = Model(MODELS[name])
        for gpus in SIZES:
            runs = best_runs(model, GPUS["h200"], gpus, Work(2048, 256, 4096, 0.8, 32_768, 0))
            if not runs:
                continue
            best = runs[0]
            rows.append(
                {
                    "model": name,
                    "gpus": gpus,
                    "step_s": best.step_s,
                    "way": best.way,
                    "split": f"{gpus - best.rollout_gpus}:{best.rollout_gpus}" if best.rollout_gpus else "-",
                    "layout": best.trainer.words,
                    "engine_gpus": best.engine.gpus,
                }
            )
    return rows


def show(title: str, rows: list[dict[str, float | str]]) -> None:
    print(title)
    for row in rows:
        print(
            "  " + "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    found = {}
    for title, rows_of in {"h200": against_h200, "published": against_published, "scaling": scaling}.items():
        found[title] = rows_of()
        show(title, found[title])
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
    watch_exit()
