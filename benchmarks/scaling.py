"""How a step scales by the cost model of `slime simulate`, and that model against measured and published
steps.

    python benchmarks/scaling.py [--out scaling.json]

The H200 rows are measured (docs/performance.md); the others are the numbers that NVIDIA publishes for NeMo RL
0.4 on H100 (its performance summary), with the batch, lengths and layout given there. That is another
program: the error also says how far its steps are from what these costs allow.
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

from slime.catalog.gpus import GPUS, MODELS, GpuRow
from slime.liveness.stacks import watch_exit
from slime.preflight.step_costs import (
    ADMIT_S,
    SWAP_S,
    EnginePlan,
    Model,
    TrainPlan,
    Work,
    best_training,
    engine_plans,
    push_seconds,
    train_plan,
    uneven_stages,
)
from slime.preflight.trainer_plan import Sizes


@dataclass(frozen=True)
class Published:
    """A step of NeMo RL on H100, on policy; and one step off policy, on `overlapped_gpus`."""

    model: str
    gpus: int
    samples: int
    length: float  # prompt and response, on average
    longest: float
    engine_gpus: int
    layout: tuple[int, int, int, int]  # tp, cp, ep, pp
    step_s: float
    overlapped_gpus: int
    overlapped_s: float


PROMPT = 150.0
PUBLISHED = (
    Published("llama-3.1-8b", 16, 2048, 1060, 4096, 1, (1, 1, 1, 2), 97.7, 16, 74.6),
    Published("qwen3-30b-a3b", 32, 2048, 3154, 4096, 4, (2, 1, 8, 1), 225.0, 32, 244.0),
    Published("qwen3-32b", 32, 2048, 3206, 4096, 4, (4, 1, 1, 4), 393.0, 64, 215.0),
    Published("qwen3-235b-a22b", 128, 512, 5671, 8192, 16, (2, 2, 16, 8), 506.0, 256, 241.0),
    Published("deepseek-v3", 256, 512, 745, 1536, 32, (1, 1, 16, 16), 154.0, 512, 77.9),
)
FITTED = ("llama-3.1-8b", "qwen3-30b-a3b")  # how much slower GPUs are together; the others test it
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
PARTS = 8  # splits that are tried: 1/8 of the GPUs generate, 2/8, ...
SHOWN = ("qwen3-4b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")


@dataclass(frozen=True, slots=True)
class RunCost:
    """A whole step. `rollout_gpus` 0: engines and trainer take turns on all GPUs."""

    gpus: int
    rollout_gpus: int
    engine: EnginePlan
    trainer: TrainPlan
    generate_s: float
    push_s: float
    swap_s: float
    overlapped: bool

    @property
    def step_s(self) -> float:
        if not self.overlapped:
            return self.generate_s + self.trainer.seconds + self.push_s + self.swap_s
        return max(self.generate_s, self.trainer.seconds + self.push_s)

    @property
    def way(self) -> str:
        return "asynchronous" if self.overlapped else "apart, in turns" if self.rollout_gpus else "in turns"


def tokens_per_s(engine: EnginePlan, work: Work) -> float:
    """Tokens per second with as many requests as fit, of all ages."""
    running = engine.max_running
    lengths = work.lengths()
    age = sum(n * n for n in lengths) / sum(lengths) / 2
    decode = engine.decode_s(running, running * (work.prompt + age))
    admit = engine.prefill_s(work.prompt / work.siblings) + ADMIT_S
    return running / (decode + running * admit / work.answer)


def best_runs(model: Model, gpu: GpuRow, gpus: int, work: Work) -> list[RunCost]:
    """The best of each way to share the GPUs, fastest first: in turns, and apart for every split."""
    gpu = gpu.among(gpus)
    found: list[RunCost] = []
    whole = best_training(model, gpu, gpus, work)
    engines = list(engine_plans(model, gpu, work, most=gpus))
    if whole is not None and engines:
        times = [(e.generate_s(work, work.samples / (gpus // e.gpus)), e) for e in engines]
        seconds, engine = min(times, key=lambda pair: pair[0])
        push = push_seconds(model, gpu, gpus, apart=False)
        found.append(RunCost(gpus, 0, engine, whole, seconds, push, SWAP_S, False))
    push = push_seconds(model, gpu, gpus, apart=True)
    for part in range(1, PARTS):
        rollout = gpus * part // PARTS
        trainer = best_training(model, gpu, gpus - rollout, work) if 0 < rollout < gpus else None
        fitting = [e for e in engines if rollout and rollout % e.gpus == 0]
        if trainer is None or not fitting:
            continue
        # Asynchronous: answers of all ages are in flight, so that no engine waits for the longest.
        engine = max(fitting, key=lambda e: tokens_per_s(e, work) / e.gpus)
        in_flight = min(engine.max_running, max(1, round(2 * work.samples / (rollout // engine.gpus))))
        engine = replace(engine, max_running=in_flight)
        busy = min(rollout // engine.gpus, 2 * work.samples)  # no more engines than answers in flight
        seconds = work.samples * work.answer / (tokens_per_s(engine, work) * busy)
        found.append(RunCost(gpus, rollout, engine, trainer, seconds, push, 0.0, True))
    return sorted(found, key=lambda run: run.step_s)


def against_h200() -> list[dict[str, float | str]]:
    """Whole steps on one H200; generation alone is compared by generation_costs.py."""
    gpu = GPUS["h200"]
    model = Model(MODELS["qwen3-4b"] | {"vocab_size": 512})
    step = Work(512, 32, 950, 0.0, passes=0, siblings=8)
    rows = [
        ("4B generating 512 x 950, s", 22.2, EnginePlan(model, gpu, 1, 256).generate_s(step, 512)),
        ("4B training on them, s", 22.4, train_plan(model, gpu, Sizes(1), step).seconds),
    ]
    return [{"what": what, "measured": m, "model": c, "error": c / m - 1} for what, m, c in rows]


def published_step(p: Published) -> float:
    """Return the predicted seconds of a published step with the layout that it was published with."""
    model, gpu = Model(MODELS[p.model]), GPUS["h100"].among(p.gpus)
    tp, cp, ep, pp = p.layout
    sizes = Sizes(p.gpus, tp, pp, 1, cp, ep, 1, tp > 1, layers=uneven_stages(model.layers, pp))
    work = work_of(p)

    def train(recompute: bool) -> TrainPlan:
        at_once = round(p.longest)
        return train_plan(model, gpu, sizes, work, tokens_at_once=at_once, recompute=recompute)

    fits = [plan for recompute in (False, True) if (plan := train(recompute)).memory < gpu.capacity]
    trainer = fits[0] if fits else train(True)
    engine = EnginePlan(model, gpu, p.engine_gpus, 256)
    generate_s = engine.generate_s(work, p.samples / (p.gpus // p.engine_gpus))
    return generate_s + trainer.seconds + push_seconds(model, gpu, p.gpus, apart=False) + SWAP_S


def work_of(p: Published) -> Work:
    return Work(p.samples, PROMPT, p.length - PROMPT, 0.6, p.longest - PROMPT, 1, max(1, p.samples // 512))


def against_published() -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    for p in PUBLISHED:
        model, work, predicted = Model(MODELS[p.model]), work_of(p), published_step(p)
        apart = [r for r in best_runs(model, GPUS["h100"], p.overlapped_gpus, work) if r.rollout_gpus]
        async_s = min((r.step_s for r in apart), default=float("nan"))
        rows.append(
            {
                "model": p.model,
                "gpus": p.gpus,
                "published_s": p.step_s,
                "model_s": predicted,
                "error": predicted / p.step_s - 1,
                "overlapped_published_s": p.overlapped_s,
                "overlapped_model_s": async_s,
                "overlapped_error": async_s / p.overlapped_s - 1,
                "fitted": str(p.model in FITTED),
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
