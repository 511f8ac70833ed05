"""The embedded engine reports the experts of every token: those that transformers' own model chooses."""

import numpy as np
import pytest
import torch

from slime.algorithms.model_parts import decoder_layers, routers
from slime.engines.embedded.engine import Engine
from slime.engines.embedded.generate_json import BadRequest, RequestLimits, RequestReader, answer_json
from slime.engines.embedded.runner import ModelRunner
from slime.engines.embedded.text import Detokenizer
from slime.utils.misc import decode_int32_meta_array

LAYERS, TOP_K = 3, 2
OWN = {
    "qwen3_moe": dict(num_key_value_heads=2, head_dim=16, num_experts=8, mlp_only_layers=[1]),
    "deepseek_v3": dict(
        **dict(num_key_value_heads=4, first_k_dense_replace=1, n_routed_experts=8, n_group=4, topk_group=2),
        **dict(q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8),
    ),
}


@pytest.fixture(scope="module", params=sorted(OWN))
def folder(request, tmp_path_factory):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=LAYERS)
    more = dict(vocab_size=128, num_attention_heads=4, num_experts_per_tok=TOP_K, initializer_range=0.2)
    path = tmp_path_factory.mktemp(request.param)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = AutoConfig.for_model(request.param, **sizes, **more, **OWN[request.param])
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def make_engine(folder, *, records_experts=True, max_running=4, max_total_tokens=2048):
    runner = ModelRunner(
        str(folder),
        device="cpu",
        dtype="float32",
        max_running=max_running,
        max_total_tokens=max_total_tokens,
        records_experts=records_experts,
    )
    return Engine(runner, Detokenizer.load(str(folder)), max_running=max_running)


def read(engine, prompt, new_tokens, **fields):
    runner = engine.runner
    limits = RequestLimits(
        runner.vocab_size, 256, engine.max_tokens, frozenset({2}), runner.experts is not None
    )
    params = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 1.0}
    body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True} | fields
    return RequestReader(limits, engine.detokenizer, seed=0).read(body)[0]


def ask(engine, *prompts, new_tokens=12):
    made = [read(engine, prompt, new_tokens, return_routed_experts=True)[0] for prompt in prompts]
    for sequence in made:
        engine.add(sequence)
    while engine.can_step:
        engine.step()
    return made


def reported(engine, sequence):
    meta = answer_json(sequence, engine.detokenizer)["meta_info"]
    flat = decode_int32_meta_array(meta["routed_experts"])
    return flat.reshape(len(sequence.tokens) - 1, LAYERS, TOP_K)


def chosen_by_transformers(folder, tokens):
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = np.zeros((len(tokens) - 1, LAYERS, TOP_K), np.int32)
    for number, layer in enumerate(decoder_layers(lm)):
        for router in routers(layer):

            def note(_router, _inputs, output, number=number):
                found[:, number] = output[-1].numpy()

            router.register_forward_hook(note)
    with torch.no_grad():
        lm(torch.tensor([tokens[:-1]]))
    return found


def assert_equal_choices(engine, folder, sequence):
    expected = chosen_by_transformers(folder, sequence.tokens)
    # The order of the top k is of no account.
    assert np.array_equal(np.sort(reported(engine, sequence)), np.sort(expected))


PROMPT = [(7 * i + i * i) % 96 + 4 for i in range(70)]


def test_choices_are_those_of_the_whole_sequence_also_on_shared_pages(folder):
    engine = make_engine(folder)
    first, second = ask(engine, PROMPT, [*PROMPT[:50], 9, 8, 7])
    again = ask(engine, [*first.tokens[:60], 11])[0]
    assert again.cached_tokens > 0
    for sequence in (first, second, again):
        assert_equal_choices(engine, folder, sequence)


def test_a_sequence_that_lost_its_pages_has_the_choices_of_its_second_computation(folder):
    engine = make_engine(folder, max_total_tokens=128)
    made = ask(engine, *([i, *PROMPT[:40]] for i in range(5, 9)), new_tokens=40)
    assert sum(sequence.num_retractions for sequence in made) > 0
    for sequence in made:
        assert_equal_choices(engine, folder, sequence)


def test_what_is_not_computed_when_a_request_is_aborted_is_left_to_the_router(folder):
    engine = make_engine(folder)
    running, waiting = (read(engine, PROMPT, 30, return_routed_experts=True)[0] for _ in range(2))
    engine.add(running)
    for _ in range(5):
        engine.step()
    engine.add(waiting)
    engine.abort(None)
    assert_equal_choices(engine, folder, running)
    assert (reported(engine, waiting) == -1).all()


def test_requests_and_models_without_choices_are_refused(folder, tmp_path):
    from tiny_model import make_tiny_model

    with pytest.raises(BadRequest, match="--enable-return-routed-experts"):
        read(make_engine(folder, records_experts=False), PROMPT, 4, return_routed_experts=True)
    with pytest.raises(ValueError, match=r"--use-rollout-routing-replay: .*has no routers"):
        make_engine(make_tiny_model(tmp_path / "dense"))
