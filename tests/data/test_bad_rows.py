"""Rows that no rollout could use: each is told at load, with its
file, line, key and what to write instead.
"""

import json
import os
import re

import pytest
from rollout_helpers import make_args
from tiny_model import make_tiny_tokenizer

from slime.data.dataset import Dataset, check_prompt_file
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.prompt_formats import EARLY_ROWS, prompt_files

GOOD = '{"input": "a", "label": "1"}'
USER = {"role": "user", "content": "hi"}


def check_prompt_files(args):
    for _, path, fmt in prompt_files(args):
        check_prompt_file(path, fmt, max_rows=EARLY_ROWS)


def load(path, **options):
    return Dataset(str(path), label_key="label", **options)


def third_line(tmp_path, line, ending="\n"):
    """A file whose third line is the bad one, after a good and a blank one."""
    path = tmp_path / "data.jsonl"
    parts = [part if isinstance(part, bytes) else part.encode() for part in (GOOD, "", line, GOOD)]
    path.write_bytes(b"".join(part + ending.encode() for part in parts))
    return path


BAD_LINES = {
    "null prompt": ('{"input": null, "label": 1}', "'input' .*is null; write text"),
    "empty prompt": ('{"input": "", "label": 1}', "'input' .*is empty"),
    "blank prompt": ('{"input": " \\n\\t", "label": 1}', "only white space"),
    "number": ('{"input": 7, "label": 1}', "'input' .*is int 7; write text.*in quotes"),
    "float": ('{"input": 7.5, "label": 1}', "is float 7.5"),
    "truth": ('{"input": true, "label": 1}', "is true"),
    "NaN prompt": ('{"input": NaN, "label": 1}', "is float nan"),
    "object": (
        '{"input": {"role": "user", "content": "x"}, "label": 1}',
        "is an object; write text, or messages",
    ),
    "empty list": ('{"input": [], "label": 1}', "an empty list"),
    "token ids": ('{"input": [1, 2], "label": 1}', "message 0 is int 1; messages look like"),
    "list of texts": ('{"input": ["a"], "label": 1}', "message 0 is str 'a'"),
    "list of nulls": ('{"input": [null], "label": 1}', "message 0 is null"),
    "no role": ('{"input": [{"content": "x"}], "label": 1}', "message 0 has no role, only .'content'."),
    "other words": (
        '{"input": [{"from": "human", "value": "x"}], "label": 1}',
        "has no role, only .'from', 'value'.",
    ),
    "role null": ('{"input": [{"role": null, "content": "x"}], "label": 1}', "has role None"),
    "role number": ('{"input": [{"role": 3, "content": "x"}], "label": 1}', "has role 3"),
    "content null": (
        '{"input": [{"role": "user", "content": null}], "label": 1}',
        r"message 0 \(user\) has content null",
    ),
    "no content": ('{"input": [{"role": "user"}], "label": 1}', r"\(user\) has no content"),
    "content number": ('{"input": [{"role": "user", "content": 3}], "label": 1}', "has content int 3"),
    "part number": ('{"input": [{"role": "user", "content": [3]}], "label": 1}', "has a part int 3"),
    "contents empty": ('{"input": [{"role": "user", "content": ""}], "label": 1}', "no message with content"),
    "half a pair": ('{"input": "a \\ud83d b", "label": 1}', r"has \\ud83d at character 3"),
    "NaN label": ('{"input": "a", "label": NaN}', r"'label' \(--label-key\) is nan"),
    "infinite label": ('{"input": "a", "label": 1e999}', "is inf"),
    "no input key": (
        '{"inputs": "a", "label": 1}',
        r"no column 'input' \(--input-key\); did you mean 'inputs'\? the row has .'inputs', 'label'.",
    ),
    "no label key": ('{"input": "a"}', r"no column 'label' \(--label-key\)"),
    "huge number": (f'{{"input": "a", "label": {"9" * 5000}}}', "4300 digits"),
    "a nest too deep": ("[" * 100_000, "nested too deeply"),
    "comma inside": ('{"input": "a", "label": 1,}', "not valid JSON"),
    "comma behind": ('{"input": "a", "label": 1},', "not valid JSON .Extra data at column 27"),
    "quotes of Python": ("{'input': 'a'}", "not valid JSON"),
    "list": ("[1]", "expected a JSON object, found list"),
    "latin-1": (
        '{"input": "caf\u00e9", "label": 1}'.encode("latin-1"),
        "not UTF-8 text .byte 0xe9 at column 15",
    ),
    "cut in a character": ('{"input": "\u00e9'.encode()[:-1], "not UTF-8 text .byte 0xc3"),
}


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_with_its_number_and_cause(tmp_path, name, ending):
    line, cause = BAD_LINES[name]
    path = third_line(tmp_path, line, ending)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}, line 3: ") as told:
        load(path)
    assert re.search(cause, str(told.value)), told.value
    assert len(str(told.value)) < 400


def test_a_slice_counts_lines_of_the_whole_file(tmp_path):
    path = third_line(tmp_path, '{"input": null, "label": 1}')
    for rows in ("@[1:]", "@[-2:]"):
        with pytest.raises(ValueError, match=r"data\.jsonl, line 3: "):
            load(f"{path}{rows}")
    assert len(load(f"{path}@[2:]")) == 1


@pytest.mark.parametrize(
    "prompt",
    [
        "a",
        [USER],
        [{"role": "system", "content": ""}, USER],
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
            {"role": "tool", "content": "3"},
        ],
        [USER, {"role": "assistant", "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": {"x": 1}}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}],
        [{"role": "narrator", "content": "x"}],
        "\u00e9\U0001f600",
    ],
)
@pytest.mark.parametrize("label", ["1", 1, 1.5, None, ["1", "2"], {"a": 1}, "", True])
def test_what_slime_takes_stays_accepted(tmp_path, prompt, label):
    path = tmp_path / "data.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + json.dumps({"input": prompt, "label": label}).encode()
        + b"\r\n\r\n\xef\xbb\xbf"
        + GOOD.encode()
    )
    first, last = load(path).origin_samples
    assert (first.prompt, first.label, last.prompt) == (prompt, label, "a")


def test_files_that_are_no_text_say_what_they_are(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\x1f\x8b\x08\x00rest")
    with pytest.raises(ValueError, match=r"line 1: not UTF-8 text"):
        load(path)
    path.write_bytes(GOOD.encode("utf-16"))
    with pytest.raises(ValueError, match=r"line 1: not UTF-8 text .*save the file as UTF-8"):
        load(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"--prompt-data .*: no rows"):
        load(path)


def test_what_is_no_file_is_never_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match=r"pipe\.jsonl: it is not a regular file"):
        load(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(
        ValueError, match=r"folder\.jsonl: it is a folder; name a \.jsonl, .* or \.parquet file in it"
    ):
        load(tmp_path / "folder.jsonl")
    for name, hint in (
        ("a.jsonl.gz", "it ends in '.gz'"),
        ("a.txt", "prompts come from"),
        ("a", "prompts come from"),
    ):
        (tmp_path / name).write_text(GOOD)
        with pytest.raises(ValueError, match=hint):
            load(tmp_path / name)


def test_a_role_that_the_template_drops_is_told(tmp_path):
    tokenizer = make_tiny_tokenizer()
    path = third_line(tmp_path, json.dumps({"input": [USER, {"role": "usr", "content": "more"}], "label": 1}))
    load(path, tokenizer=tokenizer, apply_chat_template=True)  # this template writes any role
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(
        ValueError, match=r"line 3: the chat template drops message 1, whose role 'usr' it does not know"
    ):
        load(path, tokenizer=tokenizer, apply_chat_template=True)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        ValueError, match=r"line 1: the chat template of the tokenizer refuses .*roles must alternate"
    ):
        load(path, tokenizer=tokenizer, apply_chat_template=True)


# ---- parquet -----------------------------------------------------------------------------------------------


def parquet_of(tmp_path, columns):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    path = tmp_path / "data.parquet"
    table = columns if isinstance(columns, pyarrow.Table) else pyarrow.table(columns)
    parquet.write_table(table, path)
    return path


@pytest.mark.parametrize(
    ("prompts", "cause"),
    [
        (["a", "b", None], "is null"),
        (["a", "b", ""], "is empty"),
        ([1.5, 2.0, float("nan")], "row 1: .*is float 1.5"),
        ([b"a", b"b", b"c"], "row 1: .*is bytes b'a'"),
        ([[USER], [USER], [{"role": None, "content": "x"}]], "message 0 has role None"),
        ([[USER], [USER], [{"role": "user", "content": None}]], "content null"),
        ([[USER], [USER], []], "an empty list"),
    ],
)
def test_a_bad_parquet_row_is_named_alike(tmp_path, prompts, cause):
    path = parquet_of(tmp_path, {"input": prompts, "label": ["1"] * 3})
    with pytest.raises(
        ValueError,
        match=rf"data\.parquet, row [13]: .*'input' \(--input-key\).*{cause.partition(': .*')[2] or cause}",
    ):
        load(path)


def test_parquet_bytes_that_are_no_text_and_equal_columns_are_told(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    bad = pyarrow.Array.from_buffers(pyarrow.string(), 3, pyarrow.array([b"a", b"b", b"\xff"]).buffers())
    path = parquet_of(tmp_path, {"input": bad, "label": ["1"] * 3})
    with pytest.raises(ValueError, match=r"data\.parquet: not a readable parquet file .*utf-8"):
        load(path)
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["input", "input"])
    with pytest.raises(ValueError, match=r"several columns have the name 'input'"):
        load(parquet_of(tmp_path, twice))


# ---- who reads them ----------------------------------------------------------------------------------------


def run_args(tmp_path, rows, *flags):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = make_args(tmp_path, None, "--prompt-data", str(path), *flags)
    if "--rm-type" in flags:
        args.custom_rm_path = None
    return args


def told_before_start(args):
    with pytest.raises(ValueError) as early:
        check_prompt_files(args)
    with pytest.raises(ValueError) as late:
        RolloutDataSource(args)
    assert str(early.value) == str(late.value)
    return str(early.value)


def test_messages_for_an_engine_need_the_template(tmp_path):
    told = told_before_start(run_args(tmp_path, [{"input": [USER], "label": "1"}]))
    assert "rows.jsonl, line 1" in told and "set --apply-chat-template" in told
    check_prompt_files(run_args(tmp_path, [{"input": [USER], "label": "1"}], "--apply-chat-template"))


def test_a_generate_function_of_the_users_may_have_prompts_of_its_own(tmp_path):
    rows = [{"input": value, "label": None} for value in (7, "", None, [1])]
    args = run_args(tmp_path, rows, "--custom-generate-function-path", "rollout_plugins.fan_out")
    check_prompt_files(args)
    assert [s.prompt for s in RolloutDataSource(args).dataset.origin_samples] == [7, "", None, [1]]


@pytest.mark.parametrize(
    ("rm_type", "label"), [("math", None), ("boxed_math", ""), ("dapo", ["1"]), ("f1", {"a": 1})]
)
def test_a_label_that_a_built_in_reward_cannot_compare_with_is_told(tmp_path, rm_type, label):
    rows = [{"input": "a", "label": "1"}, {"input": "a", "label": label}]
    told = told_before_start(run_args(tmp_path, rows, "--rm-type", rm_type))
    assert "rows.jsonl, line 2: the label in 'label' (--label-key)" in told and f"--rm-type {rm_type}" in told


def test_a_row_names_its_own_reward(tmp_path):
    rows = [{"input": "a", "label": None, "metadata": {"rm_type": "random"}}]
    check_prompt_files(run_args(tmp_path, rows, "--rm-type", "math"))
    rows = [{"input": "a", "label": None, "metadata": {"rm_type": "math"}}]
    assert "--rm-type math" in told_before_start(run_args(tmp_path, rows, "--rm-type", "random"))


def test_evaluation_data_are_looked_at_before_the_start(tmp_path):
    file = tmp_path / "eval.jsonl"
    file.write_text('{"input": null, "label": "1"}\n')
    args = run_args(tmp_path, [{"input": "a", "label": "1"}], "--eval-prompt-data", "aime", str(file))
    with pytest.raises(ValueError, match=r"eval\.jsonl, line 1: .*is null"):
        check_prompt_files(args)


def test_supervised_data_are_conversations(tmp_path):
    sft = (
        "--rollout-function-path",
        "slime.rollout.sft_rollout.generate_rollout",
        "--n-samples-per-prompt",
        "1",
    )
    args = run_args(tmp_path, [{"input": "a", "label": "1"}], *sft)
    check_prompt_files(args)  # a prompt and its completion
    args.label_key = None
    assert "is text; supervised" in told_before_start(args)
    rows = [{"input": [USER], "label": "1"}]
    assert "drop --apply-chat-template" in told_before_start(
        run_args(tmp_path, rows, *sft, "--apply-chat-template")
    )
    check_prompt_files(run_args(tmp_path, rows, *sft))
