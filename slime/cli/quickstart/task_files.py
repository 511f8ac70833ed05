"""Writes the files a quick-start run reads: SFT conversations,
RL prompts, held-out questions and the eval config.
"""

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.cli.quickstart.tasks import Problem, Task, draw_habits

GREEDY, SAMPLED = "heldout_greedy", "heldout_sampled"


@dataclass(frozen=True, slots=True)
class DataFiles:
    """Where the data of one run lies, and how much of it there is."""

    sft: Path | None  # None: the model needs no warm-up
    rl: Path
    held_out: Path
    eval_config: Path
    num_sft: int
    num_rl: int
    num_held_out: int


def write_data(task: Task, folder: Path, *, seed: int, num_sft: int, num_rl: int) -> DataFiles:
    """Write everything `task` needs into `folder`; the same seed gives the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    training = itertools.islice(task.draw_training(seed), num_rl)
    held_out = task.draw_held_out()
    files = DataFiles(
        sft=folder / "sft.jsonl" if num_sft else None,
        rl=folder / "rl.jsonl",
        held_out=folder / "heldout.jsonl",
        eval_config=folder / "eval.yaml",
        num_sft=num_sft,
        num_rl=num_rl,
        num_held_out=len(held_out),
    )
    if files.sft:
        _write_lines(files.sft, map(_conversation, itertools.islice(draw_habits(seed), num_sft)))
    _write_lines(files.rl, map(_prompt, training))
    _write_lines(files.held_out, map(_prompt, held_out))
    # JSON is YAML, so that no YAML writer is needed.
    files.eval_config.write_text(
        json.dumps(eval_config(task, files.held_out), indent=2) + "\n", encoding="utf-8"
    )
    return files


def eval_config(task: Task, held_out: Path) -> dict[str, Any]:
    """The same questions twice: answered greedily and sampled as in training. The true reward scores both."""
    defaults = {
        "path": str(held_out),
        "input_key": "prompt",
        "label_key": "label",
        "custom_rm_path": task.reward_path,
        "apply_chat_template": task.chat,
        "max_response_len": task.max_response_len,
        "n_samples_per_eval_prompt": 1,
        "skip_special_tokens": True,
    }
    datasets = [
        defaults | {"name": GREEDY, "temperature": 0.0},
        defaults | {"name": SAMPLED, "temperature": 1.0},
    ]
    return {"eval": {"datasets": datasets}}


def _conversation(problem: Problem) -> dict[str, Any]:
    user = {"role": "user", "content": problem.prompt}
    return {"messages": [user, {"role": "assistant", "content": problem.label}]}


def _prompt(problem: Problem) -> dict[str, Any]:
    return {"prompt": problem.prompt, "label": problem.label}


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
