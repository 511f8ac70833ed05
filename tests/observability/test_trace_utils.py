"""Traces: the format, attempts, crossing a process, and that tracing never gets in the way."""

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


def names_of(sample):
    return [span["name"] for span in sample.trace["spans"]]


def test_span_is_one_row_in_the_documented_format():
    sample = Sample(index=3, group_index=1)
    with trace_span(sample, "sglang_generate", attrs={"max_new_tokens": 8}) as span:
        span.update({"finish_reason": "stop"})
        span.set("prompt_tokens", 5)
    bind_trace(sample)
    assert set(sample.trace) == {"version", "trace_id", "spans", "sample_id", "group_id", "attempt"}
    assert (sample.trace["version"], sample.trace["sample_id"], sample.trace["group_id"]) == (2, 3, 1)
    [row] = sample.trace["spans"]
    assert row["name"] == "sglang_generate" and row["start"] <= row["end"]
    assert row["about"] == {"max_new_tokens": 8, "finish_reason": "stop", "prompt_tokens": 5}
    json.dumps(sample.trace)


def test_an_event_is_a_span_without_length_and_a_list_of_samples_gets_it_each():
    samples = [Sample(index=0), Sample(index=1)]
    with trace_span([samples], "outer"):
        trace_event(samples[0], "mark", {"k": 1})
    assert names_of(samples[0]) == ["mark", "outer"] and names_of(samples[1]) == ["outer"]
    mark, outer = samples[0].trace["spans"]
    assert mark["end"] - mark["start"] < 1 and outer["start"] <= mark["start"] <= outer["end"]


def test_failing_body_raises_and_the_span_says_why():
    sample = Sample(index=0)
    with pytest.raises(KeyError), trace_span(sample, "reward_model"):
        raise KeyError("x")
    assert sample.trace["spans"][-1]["about"] == {"error": "KeyError: 'x'"}


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
    assert names_of(sample) == ["reward_model", "plain"]
    assert sample.trace["spans"][0]["about"] == {"n": 4}


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


def test_next_attempt_numbers_later_spans():
    sample = Sample(index=0)
    trace_event(sample, "first")
    assert trace_next_attempt(sample) == 1
    trace_event(sample, "second")
    assert [span["about"] for span in sample.trace["spans"]] == [{}, {"attempt": 1}]


def test_trace_continues_in_another_process_and_comes_back():
    sample = Sample(index=7)
    with trace_span(sample, "outer"):
        pass
    sent = json.loads(json.dumps(export_trace(sample)))
    remote = import_trace(sent)
    with trace_span(remote, "remote_work"):
        pass
    import_trace(json.loads(json.dumps(export_trace(remote))), sample)
    assert sorted(names_of(sample)) == ["outer", "remote_work"] and remote.sample_id == 7


def test_carrier_of_one_s_own_is_filled_and_written_to():
    carrier = {}
    handle = bind_trace_carrier(carrier, trace_id="t", sample_id="a", group_id="g", attempt=2)
    trace_event(handle, "e")
    [span] = carrier["spans"]
    assert (carrier["trace_id"], carrier["sample_id"], carrier["group_id"]) == ("t", "a", "g")
    assert span["about"] == {"attempt": 2}


def test_binding_twice_keeps_the_trace():
    sample = Sample(index=0)
    assert bind_trace(sample).trace_id == bind_trace(sample).trace_id
    assert Sample.from_dict(sample.to_dict()).trace == sample.trace


def test_engine_meta_becomes_attributes_with_the_durations_of_stages():
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
    assert attrs["prefill_forward_duration"] == 0.25 and attrs["decode_throughput"] == 14.0
