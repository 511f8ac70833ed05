"""Traces: the event format, nesting, attempts, crossing a process, and that tracing never gets in the way."""

import asyncio
import json

import pytest

from slime.observability.trace_utils import (
    bind_trace,
    bind_trace_carrier,
    build_sglang_meta_trace_attrs,
    export_trace,
    import_trace,
    trace_event,
    trace_function,
    trace_next_attempt,
    trace_span,
)
from slime.utils.types import Sample


def events_of(sample, *keys):
    return [tuple(event.get(key) for key in keys) for event in sample.trace["events"]]


def test_span_writes_a_start_and_an_end_in_the_documented_format():
    sample = Sample(index=3, group_index=1)
    with trace_span(sample, "sglang_generate", attrs={"max_new_tokens": 8}) as span:
        span.update({"finish_reason": "stop"})
        span.set("prompt_tokens", 5)
    assert set(sample.trace) == {"version", "trace_id", "events", "sample_id", "group_id", "attempt"}
    assert (sample.trace["version"], sample.trace["sample_id"], sample.trace["group_id"]) == (1, 3, 1)
    start, end = sample.trace["events"]
    assert (start["type"], end["type"]) == ("span_start", "span_end")
    assert start["attrs"] == {"max_new_tokens": 8}
    assert end["attrs"] == {"finish_reason": "stop", "prompt_tokens": 5}
    assert start["span_id"] == end["span_id"] and "parent_span_id" not in start
    for event in (start, end):
        assert (event["name"], event["sample_id"], event["group_id"], event["attempt"]) == (
            "sglang_generate",
            3,
            1,
            0,
        )
        assert event["trace_id"] == sample.trace["trace_id"]
    assert start["ts"] <= end["ts"]
    json.dumps(sample.trace)


def test_inner_spans_and_events_name_their_parent():
    sample = Sample(index=0)
    with trace_span(sample, "outer"):
        trace_event(sample, "mark", {"k": 1})
        with trace_span(sample, "inner"):
            pass
    outer, mark, inner, *_ = sample.trace["events"]
    assert mark["type"] == "event" and mark["attrs"] == {"k": 1} and "span_id" not in mark
    assert mark["parent_span_id"] == inner["parent_span_id"] == outer["span_id"]
    trace_event(sample, "after")
    assert "parent_span_id" not in sample.trace["events"][-1]


def test_concurrent_tasks_keep_their_own_parents():
    samples = [Sample(index=i) for i in range(3)]

    async def one(sample):
        with trace_span(sample, "generate"):
            await asyncio.sleep(0.01 * (3 - sample.index))
            with trace_span(sample, "reward_model"):
                await asyncio.sleep(0.01)

    async def main():
        with trace_span(samples, "group"):
            await asyncio.gather(*map(one, samples))

    asyncio.run(main())
    for sample in samples:
        group, generate, reward, *_ = sample.trace["events"]
        assert generate["parent_span_id"] == group["span_id"]
        assert reward["parent_span_id"] == generate["span_id"]


def test_failing_body_raises_and_the_span_says_why():
    sample = Sample(index=0)
    with pytest.raises(KeyError), trace_span(sample, "reward_model"):
        raise KeyError("x")
    assert sample.trace["events"][-1]["attrs"] == {"error": "KeyError: 'x'"}


def test_decorated_functions_are_spans_on_their_target():
    @trace_function("reward_model", target="sample", attrs_getter=lambda args, sample: {"n": sample.index})
    async def reward(args, sample):
        """doc"""
        return 1.0

    @trace_function("plain", target_getter=lambda pair: pair[0])
    def plain(pair):
        return pair[1]

    sample = Sample(index=4)
    assert asyncio.run(reward(None, sample=sample)) == 1.0
    assert plain((sample, "v")) == "v"
    assert reward.__name__ == "reward" and reward.__doc__ == "doc"
    assert asyncio.iscoroutinefunction(reward)
    assert [name for (name,) in events_of(sample, "name")] == ["reward_model"] * 2 + ["plain"] * 2
    assert sample.trace["events"][0]["attrs"] == {"n": 4}


@pytest.mark.parametrize("target", [None, 3, "text", [None, object()]])
def test_untraceable_targets_are_ignored(target):
    with trace_span(target, "x") as span:
        span.update({"a": 1})
    trace_event(target, "y")
    assert trace_next_attempt(target) == 0
    assert export_trace(target) is None


def test_broken_trace_data_and_getters_do_not_disturb_the_caller():
    sample = Sample(index=0)
    sample.trace = {"events": 5}
    with trace_span(sample, "x"):
        ran = True
    assert ran

    @trace_function("f", target_getter=lambda *a: 1 / 0)
    def f(x):
        return x + 1

    assert f(1) == 2
    assert build_sglang_meta_trace_attrs(object()) == {}


def test_attributes_become_plain_data():
    sample = Sample(index=0)
    trace_event(sample, "e", {"path": object, "pair": (1, {2})})
    json.dumps(sample.trace)


def test_next_attempt_numbers_later_events():
    sample = Sample(index=0)
    trace_event(sample, "first")
    assert trace_next_attempt(sample) == 1
    trace_event(sample, "second")
    assert events_of(sample, "name", "attempt") == [("first", 0), ("second", 1)]


def test_trace_continues_in_another_process_and_comes_back():
    sample = Sample(index=7)
    with trace_span(sample, "outer"):
        sent = json.loads(json.dumps(export_trace(sample)))
    outer_id = sample.trace["events"][0]["span_id"]
    assert sent["parent_span_id"] == outer_id
    remote = import_trace(sent)
    with trace_span(remote, "remote_work"):
        pass
    import_trace(json.loads(json.dumps(export_trace(remote))), sample)
    names = [name for (name,) in events_of(sample, "name")]
    assert sorted(names) == ["outer"] * 2 + ["remote_work"] * 2
    remote_start = next(e for e in sample.trace["events"] if e["name"] == "remote_work")
    assert remote_start["parent_span_id"] == outer_id and remote_start["sample_id"] == 7


def test_carrier_of_one_s_own_is_filled_and_written_to():
    carrier = {}
    handle = bind_trace_carrier(carrier, trace_id="t", sample_id="a", group_id="g", attempt=2)
    trace_event(handle, "e")
    [event] = carrier["events"]
    assert (event["trace_id"], event["sample_id"], event["group_id"], event["attempt"]) == ("t", "a", "g", 2)


def test_binding_twice_keeps_the_trace():
    sample = Sample(index=0)
    assert bind_trace(sample).trace_id == bind_trace(sample).trace_id
    assert Sample.from_dict(sample.to_dict()).trace == sample.trace


def test_engine_meta_becomes_attributes_with_stages_as_child_spans():
    meta = {
        "id": "rid-1",
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "cached_tokens": 2,
        "e2e_latency": 0.5,
        "queue_time": 0.1,
        "decode_throughput": 14.0,
        "finish_reason": {"type": "length", "length": 7},
        "prefill_forward_duration": 0.25,
    }
    attrs = build_sglang_meta_trace_attrs(meta)
    assert (
        attrs["request_id"] == "rid-1" and attrs["finish_reason"] == "length" and attrs["cached_tokens"] == 2
    )
    sample = Sample(index=0)
    with trace_span(sample, "sglang_generate") as span:
        span.update(attrs)
    start, child_start, child_end, end = sample.trace["events"]
    assert child_start["name"] == "sglang_prefill" and child_start["parent_span_id"] == start["span_id"]
    assert child_end["ts"] - child_start["ts"] == pytest.approx(0.25)
    assert "_trace_children" not in end["attrs"] and end["attrs"]["e2e_latency"] == 0.5
