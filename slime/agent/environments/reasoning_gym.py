"""reasoning-gym: a question, one answer, and the score of the task's own checker.

A hash of its question decides whether an item is held out, so that no question of evaluation is trained on,
whatever the seeds: an item of the other split is replaced by the next one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from typing import Any

from slime.agent.environments.protocol import EnvironmentFailure, Item, Observation, StepResult

MAX_DRAWS = 400  # items that are tried to find one of the right split
_HELD_OUT_SHARE = 8  # one of this many questions is for evaluation
_NO_SUCH_TASK = ("composite",)  # joins others, which --env does itself
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_lock = threading.Lock()  # building a dataset may read its word lists


def task_names() -> list[str]:
    from reasoning_gym.factory import DATASETS  # an extra: takes seconds to import

    return sorted(name for name in DATASETS if name not in _NO_SUCH_TASK)


@functools.lru_cache(maxsize=256)
def _dataset(task: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=0, size=2**31 - 1, **json.loads(options))


class ReasoningGym:
    """One question. The option `system` is a system message before it; other options are the task's.

    The answer is the text between the last <answer> tags, or the whole response.
    """

    deterministic = True

    def __init__(self, task: str, options: Mapping[str, Any]):
        own = dict(options)
        self._system: str | None = own.pop("system", None)
        with _lock:
            self._tasks = _dataset(task, json.dumps(own, sort_keys=True))
        self.entry: dict[str, Any] = {}

    def reset(self, item: Item) -> Observation:
        self.entry = self._draw(item)
        return Observation(self.entry["question"], system=self._system)

    def step(self, action: str) -> StepResult:
        tagged = _ANSWER.findall(action)
        answer = (tagged[-1] if tagged else action).strip()
        score = self._tasks.score_answer(answer=answer, entry=self.entry)
        return StepResult(reward=float(score), done=True, info={"answer": str(self.entry["answer"])[:200]})

    def _draw(self, item: Item) -> dict[str, Any]:
        for draw in range(MAX_DRAWS):
            entry: dict[str, Any] = self._tasks[(item.seed + draw * 2_654_435) % (2**31 - 1)]
            if is_held_out(entry["question"]) == item.held_out:
                return entry
        raise EnvironmentFailure(
            f"none of {MAX_DRAWS} items is for {'evaluation' if item.held_out else 'training'}: the task has "
            "too few different questions; make it larger with --env-args"
        )


make = ReasoningGym  # as `episode` creates the environment of any family


def is_held_out(question: str) -> bool:
    """Return whether a question is for evaluation, on every machine and in every run alike."""
    return hashlib.sha256(question.encode()).digest()[0] % _HELD_OUT_SHARE == 0
