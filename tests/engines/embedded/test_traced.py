"""Traced passes of a tiny model give the very numbers of the model, whatever changes under them."""

import random

import pytest
import torch
from tiny_model import make_tiny_model

from slime.engines.embedded import pass_layout
from slime.engines.embedded.engine import Engine
from slime.engines.embedded.generate_json import RequestLimits, RequestReader
from slime.engines.embedded.runner import ModelRunner
from slime.engines.embedded.text import Detokenizer

CONTEXT = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), context=CONTEXT, init_std=0.2)


def make_engine(folder, *, traced=True, max_running=32) -> Engine:
    runner = ModelRunner(
        str(folder), device="cpu", dtype="float32", max_running=max_running, max_total_tokens=4096
    )
    assert runner._can_trace
    runner._can_trace = traced
    return Engine(runner, Detokenizer.load(str(folder)), max_running=max_running)


def generate(engine: Engine, *, prompts=12, siblings=3, **sampling) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probs of groups that come while others run."""
    limits = RequestLimits(engine.runner.vocab_size, CONTEXT, engine.max_tokens, frozenset({2}))
    reader, rng, made = RequestReader(limits, engine.detokenizer, seed=0), random.Random(0), []
    for number in range(prompts):
        prompt = [rng.randrange(4, 100) for _ in range(rng.randint(1, 40))]
        for sibling in range(siblings):
            params = {"max_new_tokens": rng.randint(1, 20), "sampling_seed": 10 * number + sibling}
            made += reader.read({"input_ids": prompt, "sampling_params": {**params, **sampling}})[0]
            engine.add(made[-1])
        engine.step()
    while engine.scheduler.has_work:
        engine.step()
    return [(sequence.output, sequence.log_probs) for sequence in made]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0}])
def test_a_traced_engine_gives_what_the_model_gives(folder, sampling):
    traced, plain = make_engine(folder), make_engine(folder, traced=False)
    assert generate(traced, **sampling) == generate(plain, **sampling)
    assert traced.runner._traced is not None and plain.runner._traced is None


def test_weights_that_change_and_memory_that_moves_are_followed(folder):
    engines = [make_engine(folder, traced=traced) for traced in (True, False)]
    first = [generate(engine) for engine in engines]
    for engine in engines:
        with torch.no_grad():
            for parameter in engine.runner.model.parameters():
                parameter.mul_(1.1)
        engine.allocator.flush()
    second = [generate(engine) for engine in engines]
    for engine in engines:
        engine.release(["kv_cache", "weights"])
        engine.restore(["weights", "kv_cache"])
    third = [generate(engine) for engine in engines]
    assert first[0] == first[1] and second[0] == second[1] == third[0] == third[1]
    assert first[0] != second[0] and engines[0].runner._traced is not None


@pytest.mark.parametrize("wrong", ["numbers", "raises"])
def test_a_model_that_cannot_be_traced_runs_as_it_is(folder, wrong, monkeypatch):
    trace = torch.jit.trace

    def bad_trace(function, given, **options):
        if wrong == "raises":
            raise RuntimeError("it looks at its numbers")
        graph = trace(function, given, **options)
        return lambda *inputs: graph(*inputs) + 1e-6

    expected = generate(make_engine(folder, traced=False))
    monkeypatch.setattr(torch.jit, "trace", bad_trace)
    engine = make_engine(folder)
    assert generate(engine) == expected
    assert not engine.runner._can_trace


def test_prompts_as_rows_are_as_prompts_with_attention_of_their_own(folder, monkeypatch):
    rows = generate(make_engine(folder))
    monkeypatch.setattr(pass_layout, "_PROMPTS_AS_ROWS_BYTES", {"cpu": 0})
    own = generate(make_engine(folder))
    assert [tokens for tokens, _ in rows] == [tokens for tokens, _ in own]
    for (_, ours), (_, theirs) in zip(rows, own, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
