"""An adapter before a scripted engine, over real HTTP, and the check that an episode is token-exact."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from chat_templates import FAMILIES, byte_tokenizer
from fake_engine import FakeEngine

from slime.agent.adapters import AgentAdapter
from slime.utils.types import Sample


def log_prob(prompt_length: int, place: int) -> float:
    return -(1 + (prompt_length * 31 + place * 7) % 97) / 100


class ScriptedEngine(FakeEngine):
    """A fake: it says given texts, one after another, in tokens that end as the model would end them.

    An answer is text, or an action of `FakeEngine`'s. `answers` may be a function of the prompt's text.
    """

    def __init__(self, tokenizer: Any, answers: Sequence[Any] | Callable[[str], Any], end: str):
        super().__init__(self._next)
        self.tokenizer, self.answers = tokenizer, answers
        self.end_id = tokenizer.convert_tokens_to_ids(end)
        self.said: list[tuple[list[int], list[int]]] = []  # (prompt, answer) of each request

    def _next(self, payload: dict, number: int) -> Any:
        if callable(self.answers):
            answer = self.answers(self.tokenizer.decode(payload["input_ids"]))
        else:
            answer = self.answers[min(number, len(self.answers) - 1)]
        if not isinstance(answer, str):
            return answer
        return {"tokens": self.tokens_of(answer, payload)}

    def tokens_of(self, text: str, payload: dict) -> list[int]:
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.end_id]
        return ids[: payload["sampling_params"]["max_new_tokens"]]

    def _body(self, payload: dict, tokens: list[int] | None, finish: str | None) -> dict:
        if tokens is None:
            tokens = self.tokens_of("held", payload)
        body = super()._body(payload, tokens, finish)
        ended = tokens[-1:] == [self.end_id] and finish is None
        meta = body["meta_info"]
        if ended:
            meta["finish_reason"] = {"type": "stop", "matched": self.end_id}
        size = len(payload["input_ids"])
        meta["output_token_logprobs"] = [[log_prob(size, i), token, None] for i, token in enumerate(tokens)]
        body["text"] = self.tokenizer.decode(tokens)
        self.said.append((payload["input_ids"], tokens))
        return body


@dataclass
class World:
    engine: ScriptedEngine
    adapter: AgentAdapter
    tokenizer: Any

    @property
    def url(self) -> str:
        return self.adapter.url


@contextlib.contextmanager
def agent_world(
    answers: Any, family: str = "chatml", sid: str | None = "key-1", **options: Any
) -> Iterator[World]:
    tokenizer = byte_tokenizer(family)
    _, kwargs, ends = FAMILIES[family]
    with ScriptedEngine(tokenizer, answers, ends[0]) as engine:
        adapter = AgentAdapter(tokenizer, engine.url, template_kwargs=kwargs, **options).start()
        try:
            if sid is not None:
                adapter.open_session(sid)
            yield World(engine, adapter, tokenizer)
        finally:
            adapter.stop()


def check_exact(world: World, samples: Sequence[Sample], num_turns: int | None = None) -> None:
    """Every trained token, with its log-prob, is what the engine answered to what stands before it."""
    trained = set()
    for sample in samples:
        start_of_response = len(sample.tokens) - sample.response_length
        masked: set[int] = set()
        for turn in sample.metadata["turns"]:
            start, end = turn["start"], turn["end"]
            prompt = sample.tokens[: start_of_response + start]
            answer = sample.tokens[start_of_response + start : start_of_response + end]
            assert (prompt, answer) in world.engine.said
            if turn["trained"]:
                assert turn["turn"] not in trained, "a turn trains once"
                trained.add(turn["turn"])
                expected = [log_prob(len(prompt), i) for i in range(len(answer))]
                assert sample.rollout_log_probs[start:end] == expected
                masked |= set(range(start, end))
        assert [i for i, bit in enumerate(sample.loss_mask) if bit] == sorted(masked)
    if num_turns is not None:
        assert len(trained) == num_turns
