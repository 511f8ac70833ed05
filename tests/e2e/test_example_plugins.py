"""The functions that recipes for tools and code name: an agent with a calculator, a reward by tests."""

from pathlib import Path

import pytest
from fake_engine import FakeEngine
from rollout_helpers import make_args

from slime.utils.async_utils import run
from slime.utils.misc import load_function
from slime.utils.types import Sample

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def agent():
    return load_function(f"{EXAMPLES}/tools/agent.py:generate").__globals__


def ids(args, text):
    from slime.utils.processing_utils import load_tokenizer

    return load_tokenizer(args.hf_checkpoint).encode(text, add_special_tokens=False)


def test_the_agent_reads_the_result_of_its_tool_and_does_not_train_on_it(tmp_path, agent):
    answers = ["<calc>2*21</calc>", "so 42"]
    with FakeEngine(
        lambda payload, number: {"tokens": ids(args, answers[number]), "finish": "stop"}
    ) as engine:
        args = make_args(tmp_path, engine, "--rollout-max-response-len", "60")
        sample = Sample(index=0, prompt="2*21?", label="42")
        params = {"max_new_tokens": 60, "temperature": 1.0}
        made = run(agent["generate"](args, sample, params))
    said = [len(ids(args, text)) for text in answers]
    assert made.metadata["turns"] == 2
    assert made.loss_mask[: said[0]] == [1] * said[0]
    assert made.loss_mask[-said[1] :] == [1] * said[1]
    assert sum(made.loss_mask) == sum(said) < made.response_length
    assert "<result>42</result>" in made.response


@pytest.mark.parametrize(
    "text, value",
    [
        ("2 * (20 + 1)", "42"),
        ("-1/4", "-0.25"),
        ("1/0", "error"),
        ("__import__('os')", "error"),
        ("9**9**9", "error"),
        ("1+" * 100_000 + "1", "error"),
        ("", "error"),
    ],
)
def test_the_calculator_computes_and_nothing_else(agent, text, value):
    assert agent["calculate"](text).startswith(value)


def test_the_reward_of_the_agent_looks_at_the_end(agent):
    def score(response):
        return agent["reward"](None, Sample(prompt="", response=response, label="42"))

    assert score("so it is 42.<|im_end|>") == 1.0
    assert score("42 or 17, I do not know") == 0.0
    assert score("") == 0.0
