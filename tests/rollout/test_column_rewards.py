"""Rewards in TRL's signature: known by their parameters, called with lists, named when they are wrong."""

import asyncio

import pytest
from argument_helpers import declared

from slime.data.prompt_rows import PromptFormat, row_to_sample
from slime.plugins import PLUGIN_POINTS, check_plugin
from slime.rollout.rm_hub import score_samples
from slime.rollout.rm_hub.hub import waits_for_group
from slime.rollout.rm_hub.scoring import reset_breaker
from slime.utils.column_rewards import columns_asked, takes_columns
from slime.utils.plugin_errors import PluginError
from slime.utils.types import Sample

POINT = next(point for point in PLUGIN_POINTS if point.flag == "custom_rm_path")


def here(name):
    return f"{__file__}:{name}"


def exact(completions, answer, **columns):
    assert len(columns["prompts"]) == len(columns["completion_ids"]) == len(answer)
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


async def later(prompts, completions):
    return [len(prompt) + len(text) for prompt, text in zip(prompts, completions, strict=True)]


def chat(completions, weight=1.0):
    return [weight * len(completion[0]["content"]) for completion in completions]


def one_number(completions):
    return 1.0


def too_few(completions, **columns):
    return [1.0]


def none_for_some(completions, **columns):
    return [1.0, None]


def raising(completions, **columns):
    return [{}["gone"] for _ in completions]


def of_the_trainer(completions, trainer_state):
    return [0.0 for _ in completions]


def of_a_group(args, completions):
    return [0.0 for _ in completions]


def score(name, *samples):
    reset_breaker()
    args = declared(timeouts={"generate": 30.0}, custom_rm_path=here(name))
    asyncio.run(score_samples(args, list(samples)))
    return [sample.reward for sample in samples]


def sample(response, index=0, **metadata):
    return Sample(index=index, prompt="2+2=", response=response, label="4", metadata=metadata)


def test_it_is_known_by_its_parameters():
    assert takes_columns(exact) and takes_columns(later)
    assert not takes_columns(of_a_group)
    assert columns_asked(exact).required == ("answer",) and columns_asked(exact).everything
    assert columns_asked(chat).optional == ("weight",)
    for name in ("exact", "later", "chat"):
        check_plugin(POINT, here(name), "--custom-rm-path")
    with pytest.raises(
        ValueError, match=r"of_the_trainer, a reward in TRL's signature: it asks for 'trainer_st"
    ):
        check_plugin(POINT, here("of_the_trainer"), "--custom-rm-path")


def test_a_group_is_scored_by_one_call_with_its_columns():
    assert waits_for_group(declared(custom_rm_path=here("exact")))
    assert score("exact", sample("4", answer="4"), sample("5<|im_end|>", 1, answer="5")) == [1.0, 1.0]
    assert score("later", sample("4"), sample("")) == [5, 4]
    assert score("exact", sample("4", answer="5")) == [0.0]


def test_messages_get_an_answer_that_is_a_message():
    asked = PromptFormat(
        input_key="prompt", label_key="a", label_pattern="#+ (.*)", reward_columns=columns_asked(exact)
    )
    row = {"prompt": [{"role": "user", "content": "hi"}], "a": "#### 7", "answer": "x", "other": 3}
    made = row_to_sample(row, asked)
    assert made.metadata == {"prompt": row["prompt"], "answer": "x", "label": "7", "a": "7", "other": 3}
    made.response, made.index = "four", 0
    assert score("chat", made) == [4.0]
    with pytest.raises(
        ValueError, match=r"no column 'answer' .a parameter of the reward function.; did you mean"
    ):
        row_to_sample({"prompt": "x", "a": "# 1", "answr": 1}, asked)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("one_number", "one_number returned float for a group: return a list"),
        ("too_few", "too_few returned 1 rewards for 2 samples"),
        ("raising", "raising raised KeyError: 'gone'"),
    ],
)
def test_what_is_wrong_is_told_with_the_name_of_the_function(name, complaint):
    with pytest.raises(PluginError, match=complaint) as told:
        score(name, sample("a"), sample("b", 1))
    assert f"{__file__}:" in str(told.value)


def test_none_says_that_there_is_no_score():
    samples = [sample("a"), sample("b", 1)]
    assert score("none_for_some", *samples)[0] == 1.0
    assert "returned None" in samples[1].reward_failure.reason
