"""Scheduling never changes what is generated: small pools, chunked prompts, split decode groups."""

import random

import pytest
import torch
from engine_under_test import largest_difference, load_model, plain_log_probs
from tiny_model import make_tiny_model

from slime.cli.verify_model import shrink
from slime.engines.embedded import pass_layout, row_spans
from slime.engines.embedded.engine import Engine
from slime.engines.embedded.generate_json import RequestLimits, RequestReader
from slime.engines.embedded.runner import ModelRunner
from slime.engines.embedded.text import Detokenizer
from slime.engines.embedded.weight_update import BadWeights, DiskSource

CONTEXT = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), context=CONTEXT, init_std=0.2)


@pytest.fixture(params=[False, True], ids=["padded", "spans"])
def spans(request, monkeypatch):
    """How rows read their keys: each its own, padded, or those of a span together."""
    if not request.param:
        monkeypatch.setattr(row_spans, "lay_out", lambda *rows: None)
    return request.param


def make_engine(folder, *, max_running=8, max_total_tokens=4096) -> Engine:
    runner = ModelRunner(
        str(folder), device="cpu", dtype="float32", max_running=max_running, max_total_tokens=max_total_tokens
    )
    return Engine(runner, Detokenizer.load(str(folder)), max_running=max_running)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("diffllama", "attends several times in a layer"),  # two halves of the heads, in turn
        ("hrm_text", "attends several times in a layer"),  # all layers, again and again
        ("gptj", "the model of"),
    ],
)
def test_a_family_that_would_be_served_wrongly_is_refused(kind, told, tmp_path):
    from transformers import CONFIG_MAPPING

    shrink.build(shrink.shrink(CONFIG_MAPPING[kind](), layers=2), tmp_path, "")
    with pytest.raises(ValueError, match=f"{told}.*use --rollout-engine sglang"):
        make_engine(tmp_path)


def make_requests(engine: Engine, count: int, *, longest_prompt=60, new_tokens=60):
    limits = RequestLimits(engine.runner.vocab_size, CONTEXT, engine.max_tokens, frozenset({2}))
    reader, rng = RequestReader(limits, engine.detokenizer, seed=0), random.Random(0)
    sequences = []
    for index in range(count):
        prompt = [rng.randrange(4, 100) for _ in range(rng.randint(1, longest_prompt))]
        sampling = {"max_new_tokens": rng.randint(1, new_tokens), "ignore_eos": True, "sampling_seed": index}
        sequences += reader.read({"input_ids": prompt, "sampling_params": sampling})[0]
    return sequences


def run_all(engine: Engine, sequences) -> list[list[int]]:
    for sequence in sequences:
        engine.add(sequence)
    while engine.scheduler.has_work:
        engine.step()
    assert all(len(s.output) == s.max_new_tokens for s in sequences)
    assert engine.allocator.num_free == engine.allocator.num_blocks
    return [s.output for s in sequences]


def test_a_pool_too_small_for_all_retracts_and_makes_the_same_tokens(folder, spans):
    roomy, tight = make_engine(folder), make_engine(folder, max_total_tokens=192)
    expected = run_all(roomy, make_requests(roomy, 20))
    sequences = make_requests(tight, 20)
    assert run_all(tight, sequences) == expected
    assert tight.scheduler.num_retractions > 0 == roomy.scheduler.num_retractions
    assert sum(s.num_retractions for s in sequences) == tight.scheduler.num_retractions


def test_prompts_in_chunks_and_split_decode_groups_give_right_log_probs(folder, spans, monkeypatch):
    monkeypatch.setattr(pass_layout, "_SPLIT_DECODE_BYTES", {"cpu": 0})
    monkeypatch.setattr(pass_layout, "_PROMPTS_AS_ROWS_BYTES", {"cpu": 0})
    engine = make_engine(folder)
    engine.scheduler.prefill_budget = 23
    sequences = make_requests(engine, 12, longest_prompt=100)
    run_all(engine, sequences)
    model = load_model(folder)
    for sequence in sequences:
        expected = plain_log_probs(model, sequence.prompt, sequence.output)
        assert largest_difference(sequence.log_probs, expected) < 1e-4


def test_siblings_share_the_pages_of_their_prompt(folder):
    engine = make_engine(folder)
    sequences = make_requests(engine, 4)
    prompt = [5 + i % 90 for i in range(100)]
    for sequence in sequences:
        sequence.prompt = prompt
    engine.add(sequences[0])
    engine.step()
    for sequence in sequences[1:]:
        engine.add(sequence)
    engine.step()
    assert [s.cached_tokens for s in sequences] == [0, 96, 96, 96]
    assert engine.allocator.num_free >= engine.allocator.num_blocks - 24 - 4 * 2


def test_siblings_that_come_together_compute_their_prompt_once(folder, spans, monkeypatch):
    engine = make_engine(folder, max_running=16)
    sequences = make_requests(engine, 12, new_tokens=20)
    for number, sequence in enumerate(sequences):
        sequence.prompt = [5 + (number // 6 + 1) * i % 90 for i in range(50 + number // 6)]
    computed, forward = [], engine.runner.forward
    monkeypatch.setattr(
        engine.runner, "forward", lambda plan: computed.append(plan.token_ids.numel()) or forward(plan)
    )
    run_all(engine, sequences)
    num_decoded = sum(len(s.output) - 1 for s in sequences)
    assert sum(computed) - num_decoded == 50 + 5 * 2 + 51 + 5 * 3
    assert [s.cached_tokens for s in sequences] == [0] + 5 * [48] + [0] + 5 * [48]
    model = load_model(folder)
    for sequence in sequences:
        expected = plain_log_probs(model, sequence.prompt, sequence.output)
        assert largest_difference(sequence.log_probs, expected) < 1e-4


@pytest.mark.parametrize("budget", [2048, 60])
def test_prompts_that_begin_alike_share_pages_in_the_pass_that_computes_them(
    folder, spans, budget, monkeypatch
):
    engine = make_engine(folder, max_running=16)
    engine.scheduler.prefill_budget = budget
    sequences = make_requests(engine, 6, new_tokens=9)
    beginning = [5 + i % 90 for i in range(42)]
    for number, sequence in enumerate(sequences):
        sequence.prompt = beginning + [60 + number // 2 + i for i in range(5)]
    computed, forward = [], engine.runner.forward
    monkeypatch.setattr(
        engine.runner, "forward", lambda plan: computed.append(plan.token_ids.numel()) or forward(plan)
    )
    run_all(engine, sequences)
    page = engine.runner.block_size
    num_decoded = sum(len(s.output) - 1 for s in sequences)
    own = 47 - 42 // page * page  # tokens after the pages that all share; each prompt comes twice
    assert sum(computed) - num_decoded == 47 + 2 * own + 3 * (47 - 46 // page * page)
    if budget > 100:
        assert len(computed) == max(s.max_new_tokens for s in sequences), "all of them begin in one pass"
    model = load_model(folder)
    for sequence in sequences:
        expected = plain_log_probs(model, sequence.prompt, sequence.output)
        assert largest_difference(sequence.log_probs, expected) < 1e-4


@pytest.mark.parametrize(
    "length", [17, 64, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 7, 16, 40))]
)
def test_siblings_draw_what_each_would_draw_alone(folder, length, spans):
    """Shorter than a page, whole pages, and between; the pool is so small that some are retracted."""

    def siblings(engine: Engine):
        made = make_requests(engine, 14, new_tokens=30)
        for number, sequence in enumerate(made):
            sequence.prompt = [4 + (number // 5 + 3) * i % 90 for i in range(length)]
        return made

    alone, together = make_engine(folder, max_running=1), make_engine(folder, max_total_tokens=320)
    expected, sequences = siblings(alone), siblings(together)
    assert run_all(together, sequences) == run_all(alone, expected)
    for sequence, one in zip(sequences, expected, strict=True):
        assert largest_difference(sequence.log_probs, one.log_probs) < 1e-4


def test_siblings_of_a_prompt_that_new_weights_came_amid_begin_anew(folder):
    engine = make_engine(folder)
    engine.scheduler.prefill_budget = 32
    sequences = make_requests(engine, 3, new_tokens=4)
    for sequence in sequences:
        sequence.prompt = [5 + i % 90 for i in range(50)]
        engine.add(sequence)
    engine.step()
    engine.allocator.flush()  # as new weights do
    while engine.scheduler.has_work:
        engine.step()
    assert [len(s.output) for s in sequences] == [s.max_new_tokens for s in sequences]
    assert sequences[1].cached_tokens == 0


def test_a_half_applied_update_is_never_served(folder):
    engine = make_engine(folder)

    class Breaks:
        shapes = {name: tuple(p.shape) for name, p in engine.runner.model.named_parameters()}  # noqa: RUF012

        def tensors(self):
            yield "model.norm.weight", torch.ones(64)
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk is gone"):
        engine.update_weights(Breaks(), "run:1")
    assert engine.awaiting_weights


def test_weights_are_refused_while_they_are_released(folder):
    engine = make_engine(folder)
    engine.release(["weights"])
    with pytest.raises(BadWeights, match="released"):
        engine.update_weights(None, "run:1")


@pytest.mark.parametrize("family", ["llama", "qwen2", "tied qwen3", "qwen3_moe"])
def test_other_families_have_right_log_probs(family, tmp_path):
    import transformers

    shared = {
        "vocab_size": 128,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    configs = {
        "llama": lambda: transformers.LlamaConfig(**shared),
        "qwen2": lambda: transformers.Qwen2Config(**shared),
        "tied qwen3": lambda: transformers.Qwen3Config(**shared, head_dim=8, tie_word_embeddings=True),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **shared, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        ),
    }
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(configs[family]()).save_pretrained(tmp_path)
    engine = make_engine(tmp_path)
    sequences = make_requests(engine, 6)
    run_all(engine, sequences)
    model = load_model(tmp_path)
    for sequence in sequences:
        expected = plain_log_probs(model, sequence.prompt, sequence.output)
        assert largest_difference(sequence.log_probs, expected) < 1e-4


@pytest.mark.parametrize(
    "family", ["gpt_oss", "gemma2", "gemma4_text", "deepseek_v3", "llama4_text", "minimax_m2"]
)
def test_windows_sinks_caps_and_narrow_values_are_served_and_updated(tmp_path, family):
    from transformers import CONFIG_MAPPING

    config = shrink.shrink(CONFIG_MAPPING[family](), layers=2)
    shrink.build(config, tmp_path / "own", "")
    shrink.build(config, tmp_path / "other", "", seed=1)
    engine = make_engine(tmp_path / "own")
    engine.weights.check(DiskSource(tmp_path / "other"))
    engine.weights.apply(DiskSource(tmp_path / "other"))
    sequences = make_requests(engine, 3, longest_prompt=20, new_tokens=8)
    run_all(engine, sequences)
    model = load_model(tmp_path / "other")
    for sequence in sequences:
        expected = plain_log_probs(model, sequence.prompt, sequence.output)
        assert largest_difference(sequence.log_probs, expected) < 1e-4


def test_layers_with_a_state_are_refused_with_the_engine_to_use(tmp_path):
    from transformers import CONFIG_MAPPING

    shrink.build(shrink.shrink(CONFIG_MAPPING["qwen3_next"](), layers=2), tmp_path, "")
    with pytest.raises(ValueError, match=r"has linear_attention layers and .* use --rollout-engine sglang"):
        make_engine(tmp_path)
