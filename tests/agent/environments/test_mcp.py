"""MCP servers as environments: real servers of the real package, and a scripted engine as the policy."""

import json
import sys

import pytest
from fake_engine import FakeEngine
from patience import LONG_S
from rollout_helpers import assert_conserved, make_args, make_source

from examples import tool_model
from slime.agent.environments.rows import read_environment
from slime.catalog.environments import Choice, read_choices
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.errors import RunStopped
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import flatten_samples

pytest.importorskip("mcp", reason="mcp is not installed: make test-environments")

SERVER = '''
import os

from mcp.server import MCPServer

server = MCPServer("counter")
told = []


@server.tool()
def tell(word: str) -> str:
    """Say a word."""
    if word == "die":
        os._exit(3)
    if word == "oops":
        raise ValueError("no such word")
    told.append(word)
    return f"{len(told)} told"


@server.tool()
def grade(response: str, label: str) -> float:
    """Scores; the policy must not see it."""
    return float(response == label) + 0.125 * len(told)


@server.tool()
def confused() -> str:
    """Scores with words."""
    return "well done"


server.run()
'''
TELL = tool_model.call("tell", word="abc")


@pytest.fixture
def rollout(tmp_path):
    """Returns a function that plays four groups of two episodes in which the policy says `turns`."""
    (tmp_path / "server.py").write_text(SERVER)
    model = tmp_path / "model"
    size = tool_model.make_tokenizer(model)
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": size}
    (model / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(model))
    result = tokenizer.convert_tokens_to_ids("<result>")

    def play(turns, options, *flags, rewards=False):
        def answer(payload, number):
            ids = tokenizer.encode(turns[payload["input_ids"].count(result)])
            finish = {"type": "stop", "matched": tokenizer.eos_token_id}
            return {"tokens": [*ids, tokenizer.eos_token_id], "meta": {"finish_reason": finish}}

        with FakeEngine(answer) as engine:
            own = [
                "--env",
                f"mcp:{sys.executable} {tmp_path / 'server.py'}",
                "--env-args",
                json.dumps({"*": options}),
            ]
            own += ["--rollout-max-response-len", "300", "--timeouts", f"env={LONG_S}", *flags]
            args = make_args(tmp_path, engine, *own, max_context_len=384, vocab_size=size)
            if not rewards:
                args.custom_rm_path = None
            source = make_source(args)
            output = generate_rollout(args, 0, source)
        assert_conserved(source)
        return output, tokenizer

    return play


def test_each_episode_has_a_server_of_its_own_whose_tool_scores(rollout):
    output, tokenizer = rollout([TELL, TELL, "3"], {"reward_tool": "grade", "tools": ["tell"]})
    samples = flatten_samples(output.samples)
    assert len(samples) == 8
    for sample in samples:
        assert sample.reward == float(sample.label == "3") + 0.25
        assert "<result>1 told</result>" in sample.response and "<result>2 told</result>" in sample.response
        start = len(sample.tokens) - sample.response_length
        trained = [t for t, m in zip(sample.tokens[start:], sample.loss_mask, strict=True) if m]
        assert tokenizer.decode(trained) == f"{TELL}<eos>" * 2 + "3<eos>"
        first = tokenizer.decode(sample.tokens[:start])
        assert first.startswith("[tools]tell <task>q") and "grade" not in first
        assert sample.metadata["tool_calls"] == 2


def test_mistakes_in_calls_are_for_the_policy_and_the_reward_may_be_the_runs(rollout):
    turns = [tool_model.call("tell", word="oops"), TELL, "3"]
    output, tokenizer = rollout(turns, {"system": "Tell."}, rewards=True)
    samples = flatten_samples(output.samples)
    assert all(tokenizer.decode(sample.tokens).count("<task>Tell.</task>") == 1 for sample in samples)
    assert all(isinstance(sample.reward, float) for sample in samples)
    assert all(
        "<result>error: " in sample.response and "no such word" in sample.response for sample in samples
    )
    assert all(sample.metadata["tool_errors"] == 1 for sample in samples)


def test_a_server_that_dies_is_a_failure_and_never_a_score(rollout):
    turns = [tool_model.call("tell", word="die"), "3"]
    with pytest.raises(RunStopped, match=r"server\.py died in a call of tell"):
        rollout(turns, {"reward_tool": "grade"}, "--reward-failure-action", "stop")
    with pytest.raises(RunStopped, match="confused, which scores, failed: could not convert"):
        rollout(["3"], {"reward_tool": "confused"}, "--reward-failure-action", "stop")


def test_budgets_end_an_episode_that_is_scored_as_it_is(rollout):
    output, _ = rollout([TELL] * 9, {"reward_tool": "grade"}, "--max-turns", "2")
    for sample in flatten_samples(output.samples):
        assert sample.reward == 0.25 and sample.metadata["session"]["outcome"] == "turn_budget"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "has no reward: add --rm-type or --custom-rm-path, or name its tool"),
        ({"reward_tol": "grade"}, "has no option reward_tol; it has system, tools, reward_tool"),
        ({"reward_tool": "grad"}, r"the server has \['tell', 'grade', 'confused'\], not grad"),
    ],
)
def test_what_is_missing_stops_the_run_with_its_name(rollout, options, said):
    with pytest.raises(RunStopped, match=said):
        rollout(["3"], options)


def test_a_command_is_one_task_and_prompts_must_be_given():
    command = "python server.py --level=2,3 --name a+b"
    assert read_choices(f"mcp:{command}") == [Choice("mcp", command)]
    with pytest.raises(ValueError, match="an MCP server has no prompts: give --prompt-data"):
        next(read_environment("env:mcp:python server.py#train:2"))
