"""The names of THUDM/slime's `trace_utils`, for plug-ins: a thin layer over `slime.observability.tracer`.

A trace is a plain dict on the sample:

    sample.trace = {"version": 2, "trace_id": ..., "sample_id": ..., "group_id": ..., "attempt": 0,
                    "spans": [...]}
    span = {"name", "start", "end", "about"}; an event is a span without length.

Tracing never raises; a target that cannot be traced is ignored.
"""

import copy
import functools
import inspect
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime.observability.tracer import add_sample_span, carrier_of, carriers, trace_span
from slime.utils.types import Sample

__all__ = ["TraceSpanContext", "trace_span"]

TRACE_VERSION = 2
TraceSpanContext = trace_span  # `with trace_span(...) as span` yields the span itself
SGLANG_TRACE_META_KEYS = {
    "prompt_tokens": "prompt_tokens",
    "completion_tokens": "completion_tokens",
    "cached_tokens": "cached_tokens",
    "queue_time": "queue_time",
    "e2e_latency": "e2e_latency",
    "decode_throughput": "decode_throughput",
    "weight_version": "weight_version",
    "id": "request_id",
}


@dataclass
class TraceHandle:
    """A trace that spans are written to; `carrier` is its dict (None: spans are dropped)."""

    trace_id: str
    carrier: dict[str, Any] | None
    sample_id: int | str | None = None
    group_id: int | str | None = None
    attempt: int = 0


def bind_trace(sample: Sample) -> TraceHandle:
    """Return the sample's trace, and start one if it has none."""
    if not isinstance(sample, Sample):
        return TraceHandle("", None)
    return bind_trace_carrier(carrier_of(sample), sample_id=sample.index, group_id=sample.group_index)


def bind_trace_carrier(
    carrier: dict[str, Any] | None,
    *,
    trace_id: str | None = None,
    sample_id: int | str | None = None,
    group_id: int | str | None = None,
    attempt: int = 0,
) -> TraceHandle:
    """Return a trace that lives in a plain dict; the given ids fill what the dict lacks."""
    carrier = {} if carrier is None else carrier
    defaults: dict[str, Any] = {
        "version": TRACE_VERSION,
        "trace_id": trace_id or uuid.uuid4().hex[:16],
        "sample_id": sample_id,
        "group_id": group_id,
        "attempt": attempt,
        "spans": [],
    }
    for key, value in defaults.items():
        if carrier.get(key) is None:
            carrier[key] = value
    return TraceHandle(
        carrier["trace_id"], carrier, carrier["sample_id"], carrier["group_id"], carrier["attempt"]
    )


def export_trace(target: Any) -> dict[str, Any] | None:
    """Return the target's trace as plain data that another process can continue."""
    if isinstance(target, Sample):
        bind_trace(target)
    found = carriers(target)
    return copy.deepcopy(found[0]) if found else None


def import_trace(exported: Mapping[str, Any] | None, sample: Sample | None = None) -> TraceHandle:
    """Continue an exported trace; with a sample, merge its spans into the sample's own trace."""
    data = copy.deepcopy(dict(exported or {}))
    if sample is None:
        return bind_trace_carrier(data)
    held = vars(sample).get("trace")
    if not held or held.get("trace_id") != data.get("trace_id"):
        vars(sample)["trace"] = data
        return bind_trace(sample)
    held["spans"] += [span for span in data.get("spans", ()) if span not in held["spans"]]
    held["spans"].sort(key=lambda span: span["start"])
    return bind_trace(sample)


def trace_next_attempt(target: Any, *, attrs: Mapping[str, Any] | None = None) -> int:
    """Mark the target's later spans as the next attempt, after an abort or a retry."""
    found = carriers(target)
    for carrier in found:
        carrier["attempt"] = carrier.get("attempt", 0) + 1
    if attrs:
        trace_event(target, "attempt_start", attrs)
    return max((carrier["attempt"] for carrier in found), default=0)


def trace_event(target: Any, name: str, attrs: Mapping[str, Any] | None = None) -> None:
    """Record a moment. The target is a sample, a handle, or a (nested) list of them."""
    add_sample_span(target, name, time.time(), attrs or {})


def trace_function(
    name: str,
    *,
    target: str | None = None,
    target_getter: Callable[..., Any] | None = None,
    attrs_getter: Callable[..., Mapping[str, Any] | None] | None = None,
    record_error: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: each call is a span on the argument named `target`, or on what `target_getter` returns."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def span_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> trace_span:
            try:
                if target_getter is not None:
                    subject = target_getter(*args, **kwargs)
                else:
                    subject = signature.bind_partial(*args, **kwargs).arguments.get(target or "")
                attrs = attrs_getter(*args, **kwargs) if attrs_getter else None
            except Exception:  # tracing must not fail what it observes
                return trace_span(None, name)
            return trace_span(subject, name, attrs, record_error=record_error)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapped(*args: Any, **kwargs: Any) -> Any:
                with span_of(args, kwargs):
                    return await function(*args, **kwargs)
        else:

            @functools.wraps(function)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                with span_of(args, kwargs):
                    return function(*args, **kwargs)

        return wrapped

    return decorate


def build_sglang_meta_trace_attrs(meta: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the span attributes in an engine response's `meta_info`, with the durations of its stages."""
    if not isinstance(meta, Mapping):
        return {}
    attrs = {name: meta[key] for key, name in SGLANG_TRACE_META_KEYS.items() if meta.get(key) is not None}
    attrs |= {
        key: value
        for key, value in meta.items()
        if key.startswith(("prefill_", "decode_")) and isinstance(value, (int, float))
    }
    finish = meta.get("finish_reason")
    if finish:
        attrs["finish_reason"] = finish.get("type") if isinstance(finish, Mapping) else finish
    return attrs
