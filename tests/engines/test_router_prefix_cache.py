"""The prefix cache: a conversation that returns as text goes to the engine as the very ids it was made of."""

import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import FakeEngine

from slime.engines import prefix_cache
from slime.engines.balancer import Balancer
from slime.engines.prefix_cache import KnownTexts, PrefixCacheMiddleware, PrefixPiece
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.top_p import to_meta


def piece(*ids: int, before: PrefixPiece | None = None) -> PrefixPiece:
    return PrefixPiece(before, ids, None, None)


def test_the_longest_known_beginning_is_found():
    tree = KnownTexts()
    short, long = piece(1), piece(2)
    tree.insert("ab", short)
    tree.insert("abcd", long)
    assert tree.longest_prefix("abcdef") == (4, long)
    assert tree.longest_prefix("abce") == (2, short)
    assert tree.longest_prefix("abc") == (2, short)
    assert tree.longest_prefix("xab") == (0, None)


def test_a_text_keeps_the_ids_it_was_first_known_by():
    tree, first = KnownTexts(), piece(1)
    tree.insert("ab", first)
    tree.insert("ab", piece(2))
    assert tree.longest_prefix("ab") == (2, first)


def test_the_tree_agrees_with_a_plain_search():
    rng, tree, known = random.Random(0), KnownTexts(), {}
    for number in range(300):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(1, 9)))
        if text not in known:
            known[text] = piece(number)
        tree.insert(text, known[text])
        asked = "".join(rng.choice("ab") for _ in range(12))
        best = max((t for t in known if asked.startswith(t)), key=len, default="")
        assert tree.longest_prefix(asked) == (len(best), known.get(best))


def test_the_least_recently_used_are_forgotten_and_a_beginning_outlives_its_continuation():
    tree = KnownTexts(max_tokens=6)
    start = piece(1, 2)
    tree.insert("a", start)
    tree.insert("abc", piece(3, 4, before=start))
    tree.insert("x", piece(5, 6))
    tree.longest_prefix("abc")
    tree.insert("y", piece(7, 8))
    assert tree.longest_prefix("x") == (0, None) and tree.num_tokens == 6
    tree.insert("z", piece(9, 10))
    tree.insert("zz", piece(11, 12))
    assert tree.longest_prefix("abc")[1] in (None, start)


class Pairs:
    """A tokenizer with one merge: "ab" is the id 300, other characters are their code points."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [300 if part == "ab" else ord(part) for part in re.findall("ab|.", text)]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join("ab" if i == 300 else "</s>" if i == 2 else chr(i) for i in ids)


SAID = [97, 98, 99]  # "abc", sampled as single letters


@pytest.fixture
def served(monkeypatch):
    """(address of a balancer with the middleware, the engine behind it, the tokenizer)."""
    monkeypatch.setattr(prefix_cache, "load_tokenizer", lambda path: Pairs())
    middleware = PrefixCacheMiddleware(SimpleNamespace(hf_checkpoint="model"))
    with FakeEngine(lambda *_: {"tokens": [*SAID, 2], "finish": "stop"}) as engine:
        balancer = Balancer([engine.url], middlewares=[middleware])
        port = run(balancer.start())
        yield f"http://127.0.0.1:{port}", engine, Pairs()
        run(balancer.stop())


def ask(url: str, path: str = "/generate", **payload):
    return run(http_utils.post(f"{url}{path}", payload, max_retries=0))


@pytest.mark.parametrize(("stop", "stop_ids"), [("</s>", [2]), ("", [])])
def test_a_second_turn_sends_the_ids_of_the_first_one(served, stop, stop_ids):
    url, engine, tokenizer = served
    first = ask(url, text="hi ", sampling_params={"max_new_tokens": 8})
    assert (
        engine.requests[0]["input_ids"] == first["prompt_ids"] == [104, 105, 32]
        and "text" not in engine.requests[0]
    )
    assert tokenizer("hi abc", add_special_tokens=False)["input_ids"] == [
        104,
        105,
        32,
        300,
        99,
    ]  # other ids than were sampled
    second = ask(url, text=f"hi abc{stop} ab", sampling_params={"max_new_tokens": 8})
    known = [104, 105, 32, *SAID, *stop_ids]
    assert engine.requests[1]["input_ids"] == [*known, 32, 300] == second["prompt_ids"]
    assert second["prefix_cache"] == {"known_tokens": len(known), "prompt_tokens": len(known) + 2}


def test_a_whole_conversation_is_returned_with_its_log_probs_and_mask(served):
    url, _, _ = served
    first = ask(url, text="hi ", sampling_params={"max_new_tokens": 8})
    kept = ask(url, "/retrieve_from_text", text="hi abc</s>!")
    assert kept["tokens"] == [104, 105, 32, *SAID, 2, 33]
    assert kept["loss_mask"] == [0, 0, 0, 1, 1, 1, 1, 0]
    log_probs = [entry[0] for entry in first["meta_info"]["output_token_logprobs"]]
    assert kept["rollout_log_probs"] == [0.0, 0.0, 0.0, *log_probs, 0.0] and len(log_probs) == 4
    assert kept["weight_versions"] == [None, None, None, *["run:1"] * 4, None]
    assert (kept["response_length"], kept["known_tokens"]) == (5, 7)


def test_what_tokens_were_drawn_from_is_returned_where_it_was_told(served):
    url, engine, _ = served
    assert "rollout_top_p_token_ids" not in ask(url, "/retrieve_from_text", text="hi abc")
    told = to_meta([np.array([token, 200 + place]) for place, token in enumerate([*SAID, 2])])
    engine.script = lambda *_: {"tokens": [*SAID, 2], "finish": "stop", "meta": told}
    ask(url, text="ho ", sampling_params={"max_new_tokens": 8})
    for text, ids, offsets in (
        ("ho abc</s>!", [97, 200, 98, 201, 99, 202, 2, 203], [0, 2, 4, 6, 8, 8]),
        ("ho abc", [97, 200, 98, 201, 99, 202], [0, 2, 4, 6]),
    ):
        kept = ask(url, "/retrieve_from_text", text=text)
        assert kept["response_length"] == len(offsets) - 1
        assert (kept["rollout_top_p_token_ids"], kept["rollout_top_p_token_offsets"]) == (ids, offsets)


def test_ids_of_the_client_pass_unchanged(served):
    url, engine, _ = served
    answer = ask(url, input_ids=[5, 6], sampling_params={"max_new_tokens": 5})
    assert engine.requests[0]["input_ids"] == [5, 6] and "prompt_ids" not in answer


def test_a_question_without_text_is_an_error(served):
    with pytest.raises(http_utils.HttpError, match="needs `text` or `messages`"):
        ask(served[0], "/retrieve_from_text", messages="hello")
