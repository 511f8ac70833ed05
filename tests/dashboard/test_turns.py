"""How the dashboard reads messages and tool calls from the text of templates, and how it compares words."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import slime.dashboard

MODULES = Path(slime.dashboard.__file__).parent / "static" / "js"
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


def evaluate(module, expression):
    program = (
        'const m = await import("data:text/javascript," + encodeURIComponent(process.argv[1]));'
        f"console.log(JSON.stringify({expression}))"
    )
    command = ["node", "--input-type=module", "-e", program, (MODULES / module).read_text()]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU\n<|im_end|>\n<|im_start|>assistant\n<think>\n",
        "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU"
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|system|>\nS<|user|>\nU<|assistant|>\n",
    ],
)
def test_messages_are_read_from_templates(text):
    found = evaluate("turns.js", f"m.messagesIn({json.dumps(text)}, 'user')")
    assert [(one["role"], one["text"].strip()) for one in found] == [("system", "S"), ("user", "U")]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": "1"}}\n</tool_call>',
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value></tool_call>",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": "1"}}]</s>',
        '{"name": "add", "parameters": {"a": "1"}}<|eot_id|>',
    ],
)
def test_tool_calls_are_read_in_the_ways_models_write_them(text):
    assert evaluate("turns.js", f"m.toolCalls({json.dumps(text)}, ['add'])") == [
        {"name": "add", "arguments": {"a": "1"}}
    ]


def test_a_call_that_cannot_be_read_keeps_its_text():
    assert evaluate("turns.js", "m.toolCalls('<tool_call>{\"name\": </tool_call>')") == [
        {"name": "call that cannot be read", "arguments": '{"name":'}
    ]


def test_words_that_differ_are_found():
    found = evaluate("diff.js", "m.wordDiff('the sum is 36.', 'the answer is 36!')")
    assert found == [
        *[["same", "the "], ["left", "sum"], ["right", "answer"], ["same", " is 36"]],
        *[["left", "."], ["right", "!"]],
    ]
    assert evaluate("diff.js", "m.wordDiff('same', 'same')") == [["same", "same"]]
    long = evaluate("diff.js", "m.wordDiff('a '.repeat(9000), 'b '.repeat(9000)).map(([kind]) => kind)")
    assert long == ["left", "right", "same"]


def test_the_curves_of_seeds_become_their_mean_and_deviation_at_every_step_of_any():
    members = "[{x: [0, 2, 4], y: [0, 2, 4]}, {x: [0, 1], y: [2, 3]}, {x: [], y: []}]"
    found = evaluate("seeds.js", f"m.meanAndBand({members})")
    assert found["x"] == [0, 1, 2, 4] and found["y"] == [1, 2, 2, 4]
    assert found["high"] == [1 + 2**0.5, 2 + 2**0.5, 2, 4]
    assert evaluate("seeds.js", "m.groupName(['rl-seed1', 'rl-seed2'])") == "rl (2 seeds)"
    runs = "['a', 'b', 'c'].map((key, index) => ({key, group: 'g', seed: index % 2}))"
    found = evaluate("seeds.js", f"m.seedGroups(['a', 'b', 'c'], {runs}).map((group) => group.keys)")
    assert found == [["a", "b"], ["c"]], "a repetition of a run is no further seed"
