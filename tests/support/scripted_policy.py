"""A double of the engines: it answers with token ids that the test chose, and remembers what it was asked."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime.agent.engine_access import Made


class ScriptedPolicy:
    """`answer(prompt_ids)` gives (ids, finish, stop id); log-probs follow from prompt and place."""

    def __init__(self, answer: Callable[[list[int]], tuple[list[int], str, int | None]]):
        self.answer = answer
        self.prompts: list[list[int]] = []
        self.made: list[Made] = []
        self.version = 1

    def _answer(self, prompt: list[int]) -> Made:
        ids, finish, stop_id = self.answer(prompt)
        log_probs = [-(1 + (len(prompt) * 31 + i * 7) % 97) / 100 for i in range(len(ids))]
        cut = len(ids) // 2
        spans = [{"version": f"run:{self.version}", "start": 0, "end": cut}] if cut else []
        spans.append({"version": f"run:{self.version + 1}", "start": cut, "end": len(ids)})
        self.version += 1
        meta = {
            "finish_reason": {"type": finish},
            "weight_version": f"run:{self.version}",
            "prompt_tokens": len(prompt),
        }
        made = Made(list(ids), log_probs, spans, finish, stop_id, None, meta)
        self.prompts.append(prompt)
        self.made.append(made)
        return made

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        session: str | None = None,
        images: Any = None,
    ) -> Made:
        return self._answer(list(prompt_ids))
