"""What is sent again with every turn is read, and written, only once; and means the same."""

import json
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.agent.adapters.bodies import Known, read_body
from slime.agent.adapters.client_errors import ApiError
from slime.agent.spelling import SpelledPrompts
from slime.utils import http_utils

TEXTS = st.text(max_size=6) | st.sampled_from(['"}]', "]", "{", "\\", "ü", "\U0001f600", '"messages":['])
STYLES = [(",", ":"), (", ", ": "), (" ,\n", " :\t")]


def read_all(known, raw, path="/v1/chat/completions"):
    """(all messages, how many of them were known)."""
    body = read_body(raw, path, known)
    name = "messages" if "messages" in body.fields else "input"
    messages = body.messages(lambda start: list(body.fields[name]))
    return messages, body.start


def written(messages, style=0, ascii_only=False, before=True, **more):
    head = {"model": "m", "tools": [{"a": 1}]} if before else {}
    fields = {**head, "messages": messages, **more}
    return json.dumps(fields, separators=STYLES[style], ensure_ascii=ascii_only).encode()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_conversation_that_is_sent_again_and_again_is_read_as_if_it_were_new(data):
    known, messages = Known(), [{"role": "user", "content": data.draw(TEXTS)}]
    options = data.draw(
        st.fixed_dictionaries(
            {"style": st.integers(0, 2), "ascii_only": st.booleans(), "before": st.booleans()}
        )
    )
    for _ in range(data.draw(st.integers(1, 6))):
        read, start = read_all(known, written(messages, **options, temperature=data.draw(TEXTS)))
        assert read == messages
        assert start < len(messages)
        answer = {"role": "assistant", "content": data.draw(TEXTS)}
        messages = [*messages, answer, {"role": "user", "content": data.draw(TEXTS)}]
        kind = data.draw(st.sampled_from(["goes on"] * 4 + ["edited", "shortened", "respelled"]))
        if kind == "edited":
            messages[data.draw(st.integers(0, len(messages) - 2))] = {"role": "user", "content": "else"}
        elif kind == "shortened":
            messages = messages[-1:]
        elif kind == "respelled":
            options["style"] = data.draw(st.integers(0, 2))


def test_what_is_known_is_not_read_again():
    known = Known()
    messages = [{"role": "user", "content": "ü"}]
    starts = []
    for turn in range(4):
        starts.append(read_all(known, written(messages))[1])
        messages += [{"role": "assistant", "content": "so"}, {"role": "user", "content": f"{turn}"}]
    assert starts == [0, 1, 3, 5]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("other words before", {"system": "b"}),
        ("other words behind", {"instructions": "b"}),
        ("two conversations", {"input": "x"}),
    ],
)
def test_a_conversation_under_other_instructions_is_read_whole(first, second):
    known, messages = Known(), [{"role": "user", "content": "a"}]
    read_all(known, written(messages, system="a"))
    messages += [{"role": "assistant", "content": "so"}, {"role": "user", "content": "b"}]
    assert read_all(known, written(messages, **{"system": "a", **second})) == (messages, 0)


def test_another_protocol_of_the_same_session_reads_for_itself():
    known, messages = Known(), [{"role": "user", "content": "a"}]
    read_all(known, written(messages))
    messages += [{"role": "assistant", "content": "so"}, {"role": "user", "content": "b"}]
    assert read_all(known, written(messages), path="/v1/messages") == (messages, 0)


@pytest.mark.parametrize(
    "tail",
    [b",]}", b",{}]", b"]}x", b",{},]}", b',{"role":"assistant"}]', b"", b",", b']},"a":1}', b",\xff]}"],
)
def test_a_body_that_breaks_behind_what_is_known_is_refused_as_any_other(tail):
    known = Known()
    whole = b'{"messages":[{"role":"user","content":"a"}]}'
    read_all(known, whole)
    with pytest.raises(ApiError, match="could not parse the JSON"):
        read_body(whole[:-2] + tail, "/v1/chat/completions", known)


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=6), st.integers(0, 200))
def test_ids_are_written_as_json_writes_them(parts, max_bytes):
    prompts, ids = SpelledPrompts(max_bytes), []
    for part in parts:
        ids = [*ids, *part]
        sent = {"input_ids": prompts.spelled("s", array("i", ids)), "rid": "x"}
        assert json.loads(http_utils._as_json(sent)) == {"input_ids": ids, "rid": "x"}
        assert prompts.num_bytes <= max_bytes
    edited = [7, *ids]
    assert json.loads(http_utils._as_json({"input_ids": prompts.spelled("s", edited)}))["input_ids"] == edited


def test_prompts_of_sessions_that_asked_long_ago_are_forgotten():
    prompts = SpelledPrompts(max_bytes=300)
    for number in range(50):
        prompts.spelled(f"s{number}", list(range(10)))
    assert 0 < len(prompts._known) < 10
