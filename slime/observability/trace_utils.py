"""What happened to a sample and when: spans and events, carried on the sample itself as plain data.

    sample.trace = {"version": 1, "trace_id": ..., "sample_id": ..., "group_id": ..., "attempt": 0,
                    "events": [...]}
    event = {"type": "span_start" | "span_end" | "event", "name", "ts", "trace_id", "sample_id", "group_id",
             "attempt", "span_id"?, "parent_span_id"?, "attrs"?}

Tracing never raises and never changes what it observes; a target that cannot be traced is ignored.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import inspect
import logging
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from slime.utils.types import Sample

logger = logging.getLogger(__name__)

TRACE_VERSION = _VERSION = 1
_CHILDREN = "_trace_children"
_COMPLETE = {"version", "trace_id", "events", "attempt", "sample_id", "group_id"}
_ids = random.Random()  # of its own: nobody seeds it
os.register_at_fork(after_in_child=_ids.seed)
T = TypeVar("T")

# trace id -> span that is open in this task; tasks inherit it, so spans nest across a gather.
_open_spans: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar(
    "slime_open_spans", default=None
)


@dataclass
class TraceHandle:
    """A trace bound for writing: `carrier` is the dict that events go into (None: nowhere)."""

    trace_id: str
    carrier: dict[str, Any] | None
    sample_id: int | str | None = None
    group_id: int | str | None = None
    attempt: int = 0
    parent_span_id: str | None = None  # the span of another process under which this trace continues


def _never_raises(fallback: Callable[..., Any]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorator: an error inside tracing is a debug line and `fallback()`."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> T:
            try:
                return function(*args, **kwargs)
            except Exception:
                logger.debug("tracing failed in %s", function.__name__, exc_info=True)
                value: T = fallback()
                return value

        return guarded

    return decorate


def _nowhere() -> TraceHandle:
    return TraceHandle(trace_id="", carrier=None)


@_never_raises(_nowhere)
def bind_trace(sample: Sample) -> TraceHandle:
    """The sample's trace, begun if it has none."""
    return _handle(_trace_of(sample))


@_never_raises(_nowhere)
def bind_trace_carrier(
    carrier: dict[str, Any] | None,
    *,
    trace_id: str | None = None,
    sample_id: int | str | None = None,
    group_id: int | str | None = None,
    attempt: int = 0,
    parent_span_id: str | None = None,
) -> TraceHandle:
    """A trace that lives in a plain dict instead of a sample; the given ids fill what the dict lacks."""
    trace = _completed(carrier, trace_id=trace_id, sample_id=sample_id, group_id=group_id, attempt=attempt)
    return _handle(trace, parent_span_id)


@_never_raises(lambda: None)
def export_trace(target: Any) -> dict[str, Any] | None:
    """The trace as plain data for another process, with the open span as the parent to continue under."""
    handle = _handles(target)[0]
    exported = copy.deepcopy(handle.carrier)
    parent = _current_parent(handle)
    return {**exported, "parent_span_id": parent} if parent and exported else exported


@_never_raises(_nowhere)
def import_trace(exported: Mapping[str, Any] | None, sample: Sample | None = None) -> TraceHandle:
    """Continue an exported trace; with a sample, merge its events into the sample's own trace."""
    data = copy.deepcopy(dict(exported or {}))
    parent = data.pop("parent_span_id", None)
    if sample is None:
        return _handle(_completed(data), parent)
    held = sample.__dict__.get("trace")
    if held and held.get("trace_id") == data.get("trace_id"):
        known = {_identity(event) for event in held["events"]}
        held["events"] += [event for event in data.get("events", ()) if _identity(event) not in known]
        held["events"].sort(key=lambda event: event["ts"])
    else:
        held = _completed(data, sample_id=sample.index, group_id=sample.group_index)
        vars(sample)["trace"] = held
    return _handle(held, parent)


@_never_raises(lambda: 0)
def trace_next_attempt(target: Any, *, attrs: Mapping[str, Any] | None = None) -> int:
    """The target is tried again (after an abort, a retry): later events carry the next attempt number."""
    attempts = []
    for handle in _handles(target):
        if handle.carrier is not None:
            handle.attempt = handle.carrier["attempt"] = handle.carrier["attempt"] + 1
            attempts.append(handle.attempt)
            if attrs:
                _write(handle, "event", "attempt_start", parent=_current_parent(handle), attrs=attrs)
    return max(attempts, default=0)


@_never_raises(lambda: None)
def trace_event(target: Any, name: str, attrs: Mapping[str, Any] | None = None) -> None:
    """A moment, under the span that is open. The target is a sample, a handle, or a (nested) list of them."""
    for handle in _handles(target):
        _write(handle, "event", name, parent=_current_parent(handle), attrs=attrs)


@_never_raises(lambda: None)
def trace_stretch(sample: Sample, name: str, start_ts: float, attrs: Mapping[str, Any]) -> None:
    """A span of a sample that ends now, told whole: where many overlap in one task."""
    trace = _trace_of(sample)
    handle = _handle(trace)
    begin = _event(handle, "span_start", name, _new_id(), _current_parent(handle), start_ts)
    trace["events"] += (begin, _end_of(begin, attrs))


class trace_span:  # used like a function: with trace_span(sample, "reward_model") as span
    """A stretch of time; `span.update({...})` and `span.set(key, value)` add attributes to its end."""

    def __init__(
        self, target: Any, name: str, attrs: Mapping[str, Any] | None = None, *, record_error: bool = True
    ):
        self._record_error = record_error
        self._target, self._name, self._start_attrs = target, name, attrs
        self._attrs: dict[str, Any] = {}
        self._opened: list[tuple[TraceHandle, dict[str, Any]]] = []  # with the event that began it
        self._token: contextvars.Token[dict[str, str] | None] | None = None
        self._start_ts = 0.0

    def update(self, attrs: Mapping[str, Any] | None = None, **more: Any) -> trace_span:
        self._attrs.update(attrs or {}, **more)
        return self

    def set(self, key: str, value: Any) -> trace_span:
        self._attrs[key] = value
        return self

    update_attrs, set_attr = update, set  # what plug-ins of slime call them, too

    def __enter__(self) -> trace_span:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._close(error)

    @_never_raises(lambda: None)
    def _open(self) -> None:
        self._start_ts = time.time()
        spans = dict(_open_spans.get() or {})
        for handle in _handles(self._target):
            span_id, parent = _new_id(), _current_parent(handle)
            begin = _event(handle, "span_start", self._name, span_id, parent, self._start_ts)
            if self._start_attrs:
                begin["attrs"] = _plain(self._start_attrs)
            if handle.carrier is not None:
                handle.carrier["events"].append(begin)
            self._opened.append((handle, begin))
            spans[handle.trace_id] = span_id
        self._token = _open_spans.set(spans)

    @_never_raises(lambda: None)
    def _close(self, error: BaseException | None) -> None:
        if error is not None and self._record_error:
            self._attrs["error"] = f"{type(error).__name__}: {error}"
        children = self._attrs.pop(_CHILDREN, None) or []
        for handle, begin in self._opened:
            for child in children:
                _write_child(handle, child, begin["span_id"], self._start_ts)
            if handle.carrier is not None:
                handle.carrier["events"].append(_end_of(begin, self._attrs))
        if self._token is not None:
            _open_spans.reset(self._token)


TraceSpanContext = trace_span  # what `with trace_span(...) as span` gives is the span itself


def trace_function(
    name: str,
    *,
    target: str | None = None,
    target_getter: Callable[..., Any] | None = None,
    attrs_getter: Callable[..., Mapping[str, Any] | None] | None = None,
    record_error: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: each call is a span on the argument named `target`, or on what `target_getter` finds."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @_never_raises(lambda: trace_span(None, name))
        def span_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> trace_span:
            if target_getter is not None:
                subject = target_getter(*args, **kwargs)
            else:
                subject = signature.bind_partial(*args, **kwargs).arguments.get(target or "")
            attrs = attrs_getter(*args, **kwargs) if attrs_getter else None
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


SGLANG_TRACE_META_KEYS = _META_KEYS = {
    "prompt_tokens": "prompt_tokens",
    "completion_tokens": "completion_tokens",
    "cached_tokens": "cached_tokens",
    "queue_time": "queue_time",
    "e2e_latency": "e2e_latency",
    "decode_throughput": "decode_throughput",
    "weight_version": "weight_version",
    "id": "request_id",
}


@_never_raises(dict)
def build_sglang_meta_trace_attrs(meta: Mapping[str, Any] | None) -> dict[str, Any]:
    """Span attributes out of an engine answer's `meta_info`; prefill and decode stages become child spans."""
    meta = meta or {}
    attrs = {name: meta[key] for key, name in _META_KEYS.items() if meta.get(key) is not None}
    finish = meta.get("finish_reason")
    if finish:
        attrs["finish_reason"] = finish.get("type") if isinstance(finish, Mapping) else finish
    children = []
    for stage in ("prefill", "decode"):
        parts = {
            key.removeprefix(f"{stage}_"): value
            for key, value in meta.items()
            if key.startswith(f"{stage}_") and key != "decode_throughput" and isinstance(value, (int, float))
        }
        if parts:
            children.append({"name": f"sglang_{stage}", "attrs": parts})
    if children:
        attrs[_CHILDREN] = children
    return attrs


def _handle(trace: dict[str, Any], parent_span_id: str | None = None) -> TraceHandle:
    return TraceHandle(
        trace["trace_id"], trace, trace["sample_id"], trace["group_id"], trace["attempt"], parent_span_id
    )


def _completed(
    trace: dict[str, Any] | None,
    *,
    trace_id: str | None = None,
    sample_id: int | str | None = None,
    group_id: int | str | None = None,
    attempt: int = 0,
) -> dict[str, Any]:
    """The same dict with whatever it lacks filled in (a new one for None)."""
    if trace is None:
        trace = {}
    elif trace.keys() >= _COMPLETE and None not in (trace["sample_id"], trace["group_id"]):
        return trace
    trace.setdefault("version", _VERSION)
    trace.setdefault("trace_id", trace_id or _new_id())
    trace.setdefault("events", [])
    trace.setdefault("attempt", attempt)
    for key, value in (("sample_id", sample_id), ("group_id", group_id)):
        if trace.get(key) is None:
            trace[key] = value
    return trace


def _trace_of(sample: Sample) -> dict[str, Any]:
    """The sample's trace, begun if it has none."""
    fields = vars(sample)
    trace: dict[str, Any] | None = fields.get("trace")
    if trace is None:
        trace = {"version": _VERSION, "trace_id": _new_id(), "events": [], "attempt": 0}
        trace["sample_id"], trace["group_id"] = sample.index, sample.group_index
        fields["trace"] = trace  # attached: only a traced sample has it
        return trace
    return _completed(trace, sample_id=sample.index, group_id=sample.group_index)


def _handles(target: Any) -> list[TraceHandle]:
    """Handles of everything traceable in the target, each trace once."""
    if isinstance(target, Sample):
        handle = bind_trace(target)
        return [] if handle.carrier is None else [handle]
    if isinstance(target, TraceHandle):
        found = [target]
    elif isinstance(target, (list, tuple)):
        found = [handle for item in target for handle in _handles(item)]
    else:
        found = []
    return list({h.trace_id: h for h in found if h.carrier is not None}.values())


def _current_parent(handle: TraceHandle) -> str | None:
    return (_open_spans.get() or {}).get(handle.trace_id) or handle.parent_span_id


def _write(
    handle: TraceHandle,
    kind: str,
    name: str,
    span_id: str | None = None,
    parent: str | None = None,
    attrs: Mapping[str, Any] | None = None,
    *,
    ts: float | None = None,
) -> None:
    event = _event(handle, kind, name, span_id, parent, time.time() if ts is None else ts)
    if attrs:
        event["attrs"] = _plain(attrs)
    if handle.carrier is not None:
        handle.carrier["events"].append(event)


def _event(
    handle: TraceHandle, kind: str, name: str, span_id: str | None, parent: str | None, ts: float
) -> dict[str, Any]:
    event = {
        "type": kind,
        "name": name,
        "ts": ts,
        "trace_id": handle.trace_id,
        "sample_id": handle.sample_id,
        "group_id": handle.group_id,
        "attempt": handle.attempt,
    }
    if span_id is not None:
        event["span_id"] = span_id
    if parent is not None:
        event["parent_span_id"] = parent
    return event


def _end_of(begin: Mapping[str, Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The event that ends a span now."""
    end = {**begin, "type": "span_end", "ts": time.time()}
    end.pop("attrs", None)
    if attrs:
        end["attrs"] = _plain(attrs)
    return end


def _write_child(handle: TraceHandle, child: Mapping[str, Any], parent: str, start_ts: float) -> None:
    span_id, attrs = _new_id(), child.get("attrs") or {}
    seconds = sum(value for key, value in attrs.items() if key.endswith("duration"))
    _write(handle, "span_start", child["name"], span_id, parent, ts=start_ts)
    _write(handle, "span_end", child["name"], span_id, parent, attrs, ts=start_ts + seconds)


def _plain(value: Any) -> Any:
    """Traces travel in dumps that accept plain types only."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (dict, Mapping)):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)


def _identity(event: Mapping[str, Any]) -> tuple[Any, ...]:
    return event.get("span_id"), event.get("type"), event.get("name"), event.get("ts")


def _new_id() -> str:
    return f"{_ids.getrandbits(64):016x}"
