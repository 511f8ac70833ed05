"""The result of a quick start: accuracy before and after, rewards, example responses and a summary."""

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.catalog.loss_types import REWARD
from slime.cli.quickstart.tasks import GREEDY, SAMPLED, DataFiles, Problem
from slime.cli.quickstart.two_runs import Recipe
from slime.observability.terminal.metrics_tail import MetricsReader
from slime.record import RecordError, Select, open_record

NUM_SAMPLES, WEIGHT_VERSION = "rollout/num_samples", "rollout/weight_version"
ACCURACY = {"greedy": f"eval/{GREEDY}", "sampled": f"eval/{SAMPLED}"}
NUM_EXAMPLES = 6


@dataclass(frozen=True, slots=True)
class Example:
    """A held-out question with the greedy responses of the first and the last model."""

    prompt: str
    label: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class QuickstartOutcome:
    """Curves of one run. `accuracy["greedy"][0]` is before RL, `[-1]` after; at least two points each."""

    eval_steps: list[int]  # number of RL steps done at each evaluation
    accuracy: dict[str, list[float]]  # "greedy" and "sampled", one value per evaluation
    rewards: list[float]  # mean training reward of each RL step
    num_samples: int  # trained samples
    weight_pushes: int
    examples: list[Example]


def read_outcome(run_dir: Path, questions: list[Problem]) -> QuickstartOutcome:
    """Read the outcome from the folder of the RL run; `questions` are the held-out ones."""
    records = MetricsReader(run_dir / "metrics.jsonl").new_records()
    evaluations = [record for record in records if all(key in record for key in ACCURACY.values())]
    if len(evaluations) < 2:
        raise ValueError(
            f"{run_dir}/metrics.jsonl holds fewer than two evaluations: a quick start compares before with "
            "after, so leave --eval-interval, --eval-config and --skip-eval-before-train alone."
        )
    return QuickstartOutcome(
        # An evaluation is logged under the rollout it follows; only the first one comes before its rollout.
        eval_steps=[0, *(int(record["step"]) + 1 for record in evaluations[1:])],
        accuracy={name: [record[key] for record in evaluations] for name, key in ACCURACY.items()},
        rewards=list(values_by_step(records, REWARD.metric).values()),
        num_samples=int(sum(values_by_step(records, NUM_SAMPLES).values())),
        weight_pushes=int(max(values_by_step(records, WEIGHT_VERSION).values(), default=0)),
        examples=read_examples(run_dir, questions),
    )


def read_examples(run_dir: Path, questions: list[Problem]) -> list[Example]:
    """Pair the greedy responses of the first and the last evaluation; changed responses come first."""
    try:
        with open_record(run_dir) as record:
            steps = [row.rollout_id for row in record.rollouts() if row.kind == "eval" and not row.pruned]
            if len(steps) < 2:
                return []
            selects = [Select("eval", s, GREEDY, limit=1_000_000) for s in (min(steps), max(steps))]
            first, last = ({a.prompt: a.response for a in record.samples(select)} for select in selects)
    except RecordError:  # switched off
        return []
    pairs = [
        Example(question.prompt, question.label, first[prompt], last[prompt])
        for question in questions
        # A prompt is the question inside the model's chat template.
        for prompt in first.keys() & last.keys()
        if question.prompt in prompt
    ]
    return sorted(pairs, key=lambda example: example.before == example.after)[:NUM_EXAMPLES]


def summarise(
    outcome: QuickstartOutcome,
    recipe: Recipe,
    files: DataFiles,
    *,
    seed: int,
    control: str | None,
    estimator: str,
    wall_s: float,
) -> dict[str, Any]:
    """Return the content of summary.json; `reward_*` is the sampled score of the held-out questions."""
    # Imported here, because they are slow to import and `slime --help` does not need them.
    import torch
    import transformers

    greedy, sampled = outcome.accuracy["greedy"], outcome.accuracy["sampled"]
    return {
        "accuracy_before": greedy[0],
        "accuracy_after": greedy[-1],
        "reward_before": sampled[0],
        "reward_after": sampled[-1],
        "wall_s": round(wall_s, 1),
        "num_samples": outcome.num_samples,
        "weight_pushes": outcome.weight_pushes,
        "seed": seed,
        "model": recipe.model,
        "task": recipe.task.name,
        "control": control,
        "advantage_estimator": estimator,
        "num_steps": len(outcome.rewards),
        "num_held_out": files.num_held_out,
        "num_rl_prompts": files.num_rl,
        "num_sft_samples": files.num_sft,
        "split": recipe.task.split,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def write_summary(summary: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def values_by_step(records: list[dict[str, Any]], key: str) -> dict[int, float]:
    """Return one metric by step; where a step was logged twice, the later value counts."""
    return {int(record["step"]): record[key] for record in records if key in record}
