"""The experts that an engine chose are asked for, and recorded with the tokens they belong to."""

import base64

import numpy as np
from fake_engine import FakeEngine
from rollout_helpers import make_args, make_source

from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import flatten_samples

LAYERS, TOPK = 3, 2


def routed(num_tokens: int) -> np.ndarray:
    """[T - 1, layers, topk]: an engine never runs the last token."""
    return np.arange((num_tokens - 1) * LAYERS * TOPK, dtype=np.int32).reshape(-1, LAYERS, TOPK)


def tell_experts(payload, number):
    if not payload.get("return_routed_experts"):
        return None
    tokens = [11, 12, 13][: 3 if number % 2 else 2]
    choices = routed(len(payload["input_ids"]) + len(tokens))
    return {"tokens": tokens, "meta": {"routed_experts": base64.b64encode(choices.tobytes()).decode()}}


def test_the_experts_of_every_token_but_the_last_are_recorded(tmp_path):
    with FakeEngine(tell_experts) as engine:
        args = make_args(tmp_path, engine, num_layers=LAYERS, moe_router_topk=TOPK)
        args.use_rollout_routing_replay = True  # a flag of a trainer that need not be installed here
        output = generate_rollout(args, 0, make_source(args))
    samples = flatten_samples(output.samples)
    assert {sample.response_length for sample in samples} == {2, 3}
    for sample in samples:
        np.testing.assert_array_equal(sample.rollout_routed_experts, routed(len(sample.tokens)))


def test_without_replay_nobody_asks_for_experts(tmp_path):
    with FakeEngine(tell_experts) as engine:
        args = make_args(tmp_path, engine)
        output = generate_rollout(args, 0, make_source(args))
        assert not any("return_routed_experts" in request for request in engine.requests)
    assert all(sample.rollout_routed_experts is None for sample in flatten_samples(output.samples))
