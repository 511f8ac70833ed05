"""Episodes of the examples with tools: real boxes and tools, and a fake engine that says what it is told."""

import itertools
import random
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from argument_helpers import declared

from examples import tool_model
from slime.utils.async_utils import run
from slime.utils.misc import load_function
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

EXAMPLES = Path(__file__).parents[2] / "examples"


@asynccontextmanager
async def fake_engine(tokenizer, answers):
    left = list(answers)

    async def generate(request):
        ids = [*tokenizer.encode(left.pop(0)), tokenizer.eos_token_id]
        meta = {"id": "x", "finish_reason": {"type": "stop", "matched": tokenizer.eos_token_id}}
        meta |= {"weight_version": "1", "output_token_logprobs": [[-0.5, token, None] for token in ids]}
        return web.json_response({"text": "", "output_ids": ids, "meta_info": meta})

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def episode(example, folder, answers, **sample):
    """The samples of an episode in which the policy says these things."""
    tool_model.make_tokenizer(folder)
    tokenizer = load_tokenizer(str(folder))

    async def inner():
        async with fake_engine(tokenizer, answers) as port:
            args = declared(hf_checkpoint=str(folder), sglang_router_ip="127.0.0.1", sglang_router_port=port)
            generate = load_function(f"{EXAMPLES / example / 'agent.py'}:generate")
            return await generate(args, Sample(index=0, **sample), {"max_new_tokens": 200})

    return run(inner()), tokenizer


def trained_text(sample, tokenizer):
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return tokenizer.decode([token for token, on in zip(response, sample.loss_mask, strict=True) if on])


def test_retool_runs_the_program_and_trains_what_the_model_said(tmp_path):
    call = tool_model.call("python", code="print(21*2)")
    (sample,), tokenizer = episode("retool", tmp_path, [call, "42"], prompt="21*2", label="42")
    assert sample.reward == 1.0
    assert "<result>42</result>" in sample.response
    assert trained_text(sample, tokenizer) == f"{call}<eos>42<eos>"
    (sample,), _ = episode("retool", tmp_path, ["41"], prompt="21*2", label="42")
    assert (sample.reward, sample.metadata["tool_calls"]) == (0.0, 0)


def test_search_r1_finds_a_land_by_two_searches(tmp_path):
    pytest.importorskip("bm25s", reason="the search tool: pip install 'slime-rl[search]'")
    world = load_function(f"{EXAMPLES / 'search_r1' / 'world.py'}:World")()
    person = world.people[0]
    town = world.town_of[person]
    land = world.land_of[town]
    calls = [tool_model.call("search", query=query) for query in ("land", person, town)]
    question = {"prompt": f"land of {person}", "label": land}
    (sample,), tokenizer = episode("search_r1", tmp_path, [*calls, land], **question)
    assert (sample.reward, sample.metadata["tool_calls"]) == (1.0, 3)
    assert "<result>nothing found; try other words</result>" in sample.response
    assert f"<result>[1] {town} lies in {land}</result>" in sample.response
    assert trained_text(sample, tokenizer) == "".join(f"{text}<eos>" for text in (*calls, land))
    (sample,), _ = episode("search_r1", tmp_path, [land], **question)
    assert (sample.reward, sample.metadata["tool_calls"]) == (1.0, 0)  # guessing pays when it is right


def edit(old, new):
    return tool_model.call("edit_file", path="f.py", old=old, new=new)


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        ([edit("a+b", "a-b"), "done"], 1.0),
        ([edit("a+b", "a*b"), tool_model.call("run_tests"), edit("a*b", "a-b"), "done"], 0.75),
        ([edit("a+b", "a*b"), "done"], 0.0),
        (["done"], 0.0),
        ([edit("a+b", "a*b"), edit("a*b", "a//b"), edit("a//b", "a-b"), "done"], 0.0),
        ([edit("return a+b", "return {9: 4, 8: 6}[a]"), tool_model.call("run_tests"), "done"], 0.0),
    ],
)
def test_coding_agent_is_paid_for_a_repair_that_hidden_tests_accept(answers, reward, tmp_path):
    label = {
        "source": "def f(a, b):\n    return a+b\n",
        "shown": ["assert f(9, 5) == 4", "assert f(8, 2) == 6"],
        "hidden": ["assert f(7, 3) == 4"],
    }
    (sample,), _ = episode("coding_agent", tmp_path, answers, prompt="return a+b", label=label)
    assert sample.reward == reward
    if any("run_tests" in one for one in answers):
        assert "<result>passed</result>" in sample.response or "<result>failed</result>" in sample.response


def shell(command):
    return tool_model.call("shell", command=command)


@pytest.mark.parametrize(
    ("commands", "reward"),
    [
        (["sort a>b", "tail -n1 b>c"], 1.0),
        (["sort a>b", "wc -l <b>c"], 0.5),
        (["tac a>b", "tail -n1 b>c"], 0.0),
        ([], 0.0),
    ],
)
def test_terminal_is_paid_for_the_files_that_tests_find(commands, reward, tmp_path):
    label = {"files": {"a": "1\n5\n4\n2\n"}, "tests": {"b": "1\n2\n4\n5\n", "c": "5\n"}}
    answers = [*map(shell, commands), "done"]
    (sample,), _ = episode("terminal", tmp_path, answers, prompt="order a b last b c", label=label)
    assert sample.reward == reward and sample.metadata["solved"] == float(reward == 1.0)


def test_every_task_of_the_terminal_is_solved_by_its_commands(tmp_path):
    data = load_function(f"{EXAMPLES / 'terminal' / 'data.py'}:main").__globals__
    rng = random.Random(3)
    for steps in itertools.islice(itertools.product(data["STEPS"], repeat=2), 0, None, 3):
        one = data["task"](steps, ("a", "b", "c"), rng)
        commands = [f"{data['STEPS'][step][0]}{x}>{y}" for step, x, y in zip(steps, "ab", "bc", strict=True)]
        answers = [*map(shell, commands), "done"]
        (sample,), _ = episode("terminal", tmp_path, answers, prompt=one["prompt"], label=one["label"])
        assert sample.reward == 1.0, one["prompt"]


def conversation(folder, clerk, customer):
    """The sample of a conversation in which both say these things, each by an engine of its own."""
    tool_model.make_tokenizer(folder)
    tokenizer = load_tokenizer(str(folder))

    async def inner():
        async with fake_engine(tokenizer, clerk) as port, fake_engine(tokenizer, customer) as other:
            args = declared(hf_checkpoint=str(folder), sglang_router_ip="127.0.0.1", sglang_router_port=port)
            args.sglang_model_routers = {"customer": ("127.0.0.1", other)}
            generate = load_function(f"{EXAMPLES / 'conversation' / 'agent.py'}:generate")
            sample = Sample(index=0, prompt="wish nut 7 item", label=["nut", "7"])
            return await generate(args, sample, {"max_new_tokens": 200})

    return run(inner()), tokenizer


def test_the_clerk_is_paid_for_the_booking_that_the_customer_wanted(tmp_path):
    booking = tool_model.call("book", item="nut", count="7")
    (sample,), tokenizer = conversation(tmp_path, ["how many?", booking, "bye"], ["i want nut", "7"])
    assert sample.reward == 1.0 and sample.metadata["questions"] == 1
    assert trained_text(sample, tokenizer) == f"how many?<eos>{booking}<eos>bye<eos>"
    text = tokenizer.decode(sample.tokens)
    assert "<task>i want nut</task>" in text and "wish" not in text, "the clerk does not read the wish"
    twice = [booking, "how many?", booking, "bye"]
    (sample,), _ = conversation(tmp_path, twice, ["i want nut", "7"])
    assert sample.reward == 0.0, "a booking too many"


def fix(path, old, new):
    return tool_model.call("edit_file", path=path, old=old, new=new)


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        ([tool_model.call("run_tests"), fix("b.py", "a-b", "a*b"), "done"], 1.0),
        ([fix("b.py", "a-b", "a+b"), fix("b.py", "a+b", "a*b"), "done"], 0.75),
        ([fix("a.py", "a+b", "a*b"), "done"], 0.0),
        ([fix("b.py", "return a-b", "return {8: 16, 9: 9}[a]"), "done"], 0.0),
        ([tool_model.call("edit_file", path="tests.py", old="break", new="pass"), "done"], 0.0),
    ],
)
def test_repair_is_paid_for_a_project_whose_tests_pass(answers, reward, tmp_path):
    files = {"a.py": "def f(a, b):\n    return a+b\n", "b.py": "def f(a, b):\n    return a-b\n"}
    cases = {"shown": [["a.py", 9, 5, 14], ["b.py", 8, 2, 16]], "hidden": [["b.py", 7, 3, 21]]}
    label = {"files": files, **cases}
    (sample,), _ = episode("repair", tmp_path, answers, prompt="a.py a+b b.py a-b", label=label)
    assert sample.reward == reward
    if "run_tests" in answers[0]:
        assert "<result>b.py f(8,2)=16</result>" in sample.response
