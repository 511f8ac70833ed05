"""The part of SGLang's HTTP API that slime speaks, as typed values.

`SamplingParams` and `GenerateRequest` go out, `Generation` and `EngineInfo` come back. Both directions are
strict: a field that is unknown, of the wrong type or out of range raises ValueError with its name, so a
misspelt parameter is never ignored silently.
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from slime.catalog.engines import Dialect
from slime.utils import top_p
from slime.wire.dialects import dialect_of

Finish = Literal["stop", "length", "abort"]
FINISH_TYPES: tuple[Finish, ...] = ("stop", "length", "abort")
# How requests name the policy's adapters, in engines that get them alone.
ADAPTER_NAME = "policy"


# Below this engines draw greedily, SGLang too: a division by less would overflow the logits.
GREEDY_BELOW = 1e-6
_INT = frozenset({int})
MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1


def shown(value: Any) -> str:
    """Return a value as error messages show it: a few characters, however large it is."""
    return reprlib.repr(value)


def _number(name: str, value: Any, low: float, high: float) -> float:
    # An integer is finite, and may be too large to become a float.
    if type(value) is not int and not (isinstance(value, float) and math.isfinite(value)):
        raise ValueError(f"{name} must be a finite number, got {shown(value)}")
    if not low <= value <= high:
        raise ValueError(f"{name} is {shown(value)}: it must lie in [{low}, {high}]")
    return float(value)


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {shown(value)}")
    if value < low:
        raise ValueError(f"{name} is {shown(value)}: it must be at least {low}")
    if high is not None and value > high:
        raise ValueError(f"{name} is {shown(value)}: it must be at most {high}")
    return value


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {shown(value)}")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    values = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) and v for v in values):
        raise ValueError(f"{name} must be a string or a list of non-empty strings, got {shown(value)}")
    return tuple(values)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    values = () if value is None else (value,) if isinstance(value, int) else value
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"{name} must be a list of token ids, got {shown(value)}")
    return tuple(_integer(f"{name}[{i}]", v, 0, MAX_INT32) for i, v in enumerate(values))


def wrong_token_id(ids: Sequence[Any], vocab_size: int | None) -> str | None:
    """Names the first entry that is no token of the vocabulary, over which SGLang would end; None: all are.

    `vocab_size` None: not known, so that only what can be no id at all is found.
    """
    if set(map(type, ids)) <= _INT and (
        not ids or (min(ids) >= 0 and (vocab_size is None or max(ids) < vocab_size))
    ):
        return None  # the usual case, at the speed of C
    high = math.inf if vocab_size is None else vocab_size
    return shown(next(i for i in ids if type(i) is not int or not 0 <= i < high))


# How each field of `SamplingParams` is checked: a function, and for numbers the range (None: no upper limit).
_CHECKS: dict[str, tuple[Any, ...]] = {
    "temperature": (_number, 0.0, 1e6),
    "top_p": (_number, 0.0, 1.0),
    "min_p": (_number, 0.0, 1.0),
    "repetition_penalty": (_number, 0.0, 2.0),
    "frequency_penalty": (_number, -2.0, 2.0),
    "presence_penalty": (_number, -2.0, 2.0),
    "top_k": (_integer, -1, MAX_INT32),
    "max_new_tokens": (_integer, 0),
    "min_new_tokens": (_integer, 0),
    "sampling_seed": (_integer, -MAX_INT64 - 1, MAX_INT64),
    "n": (_integer, 1),
    "stream_interval": (_integer, 1, MAX_INT32),
    "stop": (_strings,),
    "stop_token_ids": (_token_ids,),
    "ignore_eos": (_boolean,),
    "skip_special_tokens": (_boolean,),
    "spaces_between_special_tokens": (_boolean,),
    "no_stop_trim": (_boolean,),
    "json_schema": (lambda name, value: "".join(_strings(name, value)),),
    top_p.REQUEST_FIELD: (_boolean,),
}
_NEVER_ZERO = ("top_p", "repetition_penalty", "top_k")
_OPTIONAL = ("max_new_tokens", "sampling_seed", "stream_interval", "json_schema")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request; the defaults sample the model's own distribution.

    `SamplingParams(temperature=0.8, max_new_tokens=64, stop=("\\n",)).to_json()` is what a request carries as
    `sampling_params`. Log-probs that come back are of the distribution after `temperature` and before top_p,
    top_k and min_p; at temperature 0 (greedy) they are of the unscaled distribution. With
    `return_top_p_token_ids`, an engine that supports it reports the ids that each token was drawn from, and
    log-probs are over these ids.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: the whole vocabulary
    min_p: float = 0.0
    max_new_tokens: int | None = 128  # None: up to the context length
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None  # None: the engine draws one
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    n: int = 1
    json_schema: str | None = None  # that the text must follow, in engines with grammars (SGLang)
    return_top_p_token_ids: bool = False  # travels inside custom_params, see slime.utils.top_p
    stream_interval: int | None = None  # tokens from one event of a stream to the next; None: the engine's

    def __post_init__(self) -> None:
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value is default or (value is None and name in _OPTIONAL):
                continue
            check, *bounds = _CHECKS[name]
            object.__setattr__(self, name, check(name, value, *bounds))
        for name in _NEVER_ZERO:
            if getattr(self, name) == 0:
                raise ValueError(f"{name} is 0: no token could be drawn")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}: it must not exceed max_new_tokens "
                f"{self.max_new_tokens}"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @classmethod
    def from_json(cls, data: Any) -> "SamplingParams":
        if data is None:
            return cls()
        if not isinstance(data, Mapping):
            raise ValueError(f"sampling_params must be an object, got {shown(data)}")
        custom = data.get("custom_params") or {}
        # The one field of what SGLang hands to its plug-ins that is part of the protocol.
        if not isinstance(custom, Mapping) or not custom.keys() <= {top_p.REQUEST_FIELD}:
            raise ValueError(
                f"custom_params is {shown(custom)}: expected an object with {top_p.REQUEST_FIELD}"
            )
        data = {**data, **custom}
        data.pop("custom_params", None)
        unknown = sorted(data.keys() - _DEFAULTS.keys())
        if unknown:
            expected = f"expected one of {sorted(_DEFAULTS)}"
            raise ValueError(f"sampling_params has unknown field `{unknown[0][:64]}`, {expected}")
        return cls(**{k: v for k, v in data.items() if v is not None or k in _OPTIONAL})

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults, and always `temperature` and `max_new_tokens`."""
        out: dict[str, Any] = (
            {"custom_params": {top_p.REQUEST_FIELD: True}} if self.return_top_p_token_ids else {}
        )
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if name in ("temperature", "max_new_tokens") or (
                value != default and name != top_p.REQUEST_FIELD
            ):
                out[name] = list(value) if isinstance(value, tuple) else value
        return out


_DEFAULTS = {f.name: f.default for f in fields(SamplingParams)}


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt, already tokenised. `session` pins follow-ups to the worker that holds their prefix."""

    input_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    rid: str | None = None  # None: the engine names it, and it cannot be cancelled
    return_logprob: bool = True
    stream: bool = False
    session: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)  # engine-specific top-level fields
    # One for each image token of `input_ids`: data URLs, or videos of them.
    image_data: Sequence[str | dict[str, Any]] = ()
    num_prompt_tokens: int | None = None  # what the engine must count, images expanded; None: not checked
    forbidden_ids: frozenset[int] = frozenset()  # that no answer may hold: image tokens
    group: str | None = None  # requests of one group may travel as one; None: it goes alone

    def to_json(self) -> dict[str, Any]:
        out = {
            "input_ids": self.input_ids if isinstance(self.input_ids, list) else list(self.input_ids),
            "sampling_params": self.sampling.to_json(),
            "return_logprob": self.return_logprob,
            "stream": self.stream,
            **self.extra,
        }
        if self.sampling.return_top_p_token_ids:
            out["return_sampling_mask"] = True  # SGLang's spelling; the embedded engine reads the parameter
        if self.image_data:
            out["image_data"] = list(self.image_data)
        if self.rid is not None:
            out["rid"] = self.rid
        return out


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens `start <= i < end` were drawn from weights `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Generation:
    """Response of an engine to one request. `ids`, and `log_probs` if requested, have one entry per token.

    Example: `Generation(ids=(7, 2), log_probs=(-0.3, -1.2), finish="stop", finish_detail={"type": "stop",
    "matched": 2}, text="c", spans=(VersionSpan("run:4", 0, 2),), weight_version="run:4", prompt_tokens=5,
    cached_tokens=0, meta={...})`. A stop token is the last of `ids` and not part of `text`.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float, ...] | None  # None: not asked for
    finish: Finish
    finish_detail: Mapping[str, Any]
    text: str
    spans: tuple[VersionSpan, ...]
    weight_version: str
    prompt_tokens: int
    cached_tokens: int
    meta: Mapping[str, Any]  # the engine's meta_info as it came

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Generation":
        """Read one final answer of `/generate`; a list answer (batch, n > 1) is read item by item."""
        meta = data.get("meta_info") if isinstance(data, (dict, Mapping)) else None
        if not isinstance(meta, (dict, Mapping)):
            raise ValueError(
                f"the engine answered /generate with something that is no generation: {shown(data)}"
            )
        try:
            return cls._read(data, meta)
        except (KeyError, TypeError, IndexError, OverflowError) as error:
            what = f"{type(error).__name__} {error}"[:200]
            raise ValueError(
                f"the answer to request {shown(meta.get('id'))} is no generation: {what}"
            ) from error

    @classmethod
    def _read(cls, data: Mapping[str, Any], meta: Mapping[str, Any]) -> "Generation":
        meta, detail = top_p.in_our_fields(meta), meta.get("finish_reason")
        if not isinstance(detail, (dict, Mapping)) or detail.get("type") not in FINISH_TYPES:
            raise ValueError(
                f"finish_reason {shown(detail)} of request {shown(meta.get('id'))} is none of {FINISH_TYPES}"
            )
        triples = meta.get("output_token_logprobs")
        if triples is None:
            ids, log_probs = tuple(data["output_ids"]), None
        else:
            # Column by column: an answer has thousands of these, and all of them come at once.
            ids, log_probs = tuple([t[1] for t in triples]), tuple(map(float, [t[0] for t in triples]))
            if "output_ids" in data and tuple(data["output_ids"]) != ids:
                counts = f"{len(ids)} log-probs for {len(data['output_ids'])} output tokens"
                other = "the log-probs are of other tokens than output_ids"
                why = counts if len(ids) != len(data["output_ids"]) else other
                raise ValueError(f"request {shown(meta.get('id'))}: {why}")
            if not math.isfinite(sum(log_probs)):
                raise ValueError(
                    f"request {shown(meta.get('id'))}: log-probs that are no numbers, or of a token that "
                    "cannot be"
                )
        wrong = wrong_token_id(ids, None)
        if wrong is not None:
            raise ValueError(f"request {shown(meta.get('id'))}: {wrong} is no token id")
        version = str(meta.get("weight_version", "default"))
        return cls(
            ids=ids,
            log_probs=log_probs,
            finish=detail["type"],
            finish_detail=detail,
            text=str(data.get("text", "")),
            spans=_read_spans(meta, version, len(ids)),
            weight_version=version,
            prompt_tokens=int(meta.get("prompt_tokens", 0)),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            meta=meta,
        )


def _read_spans(meta: Mapping[str, Any], version: str, num_tokens: int) -> tuple[VersionSpan, ...]:
    spans = meta.get("weight_versions")
    if spans is None:
        return (VersionSpan(version, 0, num_tokens),) if num_tokens else ()
    out = tuple(
        VersionSpan(str(s["version"]), int(s["start"]), int(s["end"])) for s in spans if s["end"] > s["start"]
    )
    edges = [0, *(s.end for s in out)]
    if [s.start for s in out] != edges[:-1] or edges[-1] != num_tokens:
        raise ValueError(
            f"weight_versions {shown(spans)} do not cover the {num_tokens} output tokens of "
            f"{shown(meta.get('id'))}"
        )
    return out


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Identity and capabilities of one worker, read from its server info and its dialect."""

    dialect: Dialect
    model_path: str
    weight_version: str
    vocab_size: int | None  # None: the engine does not say; check ids against the tokenizer or model config
    context_len: int | None  # None: the engine does not say
    raw: Mapping[str, Any]

    @property
    def transports(self) -> tuple[str, ...]:
        """Return the weight transports; adapters alone only if the engine was started for them.

        SGLang addresses a rank by its number within its stage and copy, so of several it reaches one alone.
        Attention groups share one copy: SGLang 0.5.23 counts them as `attn_dp_size`, older ones as `dp_size`.
        """
        one_copy = self.raw.get("enable_dp_attention") and "attn_dp_size" not in self.raw
        copies = 1 if one_copy else self.raw.get("dp_size")
        if (copies or 1) > 1 or (self.raw.get("pp_size") or 1) > 1:
            return ("disk",)
        adapters = self.dialect.adapters_by if self.raw.get("enable_lora") else None
        return (*self.dialect.transports, *([adapters] if adapters else []))

    @property
    def can_be_overwritten(self) -> bool:
        """Return whether a whole push restores all that `EngineControl.overwrite_weights` destroys.

        Not so where the engine derives more from weights (scales, drafts, adapters), or does not report the
        checksums of all its ranks.
        """
        derives = any(self.raw.get(name) for name in ("quantization", "speculative_algorithm", "enable_lora"))
        plain_cache = (self.raw.get("kv_cache_dtype") or "auto") in ("auto", "bf16", "bfloat16", "float16")
        tells_all = all((self.raw.get(name) or 1) == 1 for name in ("pp_size", "dp_size", "attn_dp_size"))
        return self.dialect.overwrites_weights and not derives and plain_cache and tells_all

    @property
    def has_seeds(self) -> bool:
        return self.dialect.has_seeds or bool(self.raw.get("enable_deterministic_inference"))

    @property
    def num_ranks(self) -> int:
        """Return the number of processes that hold a share of the weights."""
        return int(self.raw.get("tp_size") or 1) * int(self.raw.get("pp_size") or 1)

    @property
    def memory_saver(self) -> bool:
        return self.dialect.memory_saver or bool(self.raw.get("enable_memory_saver"))

    @classmethod
    def from_json(
        cls, server_info: Mapping[str, Any], model_info: Mapping[str, Any] | None = None
    ) -> "EngineInfo":
        if not isinstance(server_info, Mapping) or not isinstance(model_info or {}, Mapping):
            raise ValueError(f"the engine describes itself as {shown(server_info)} and {shown(model_info)}")
        merged = {**server_info, **(model_info or {})}
        context = merged.get("context_length") or merged.get("max_model_len")
        for name in ("tp_size", "pp_size"):
            _positive_or_none(name, server_info.get(name) or None)
        return cls(
            dialect=dialect_of(server_info),
            model_path=str(merged.get("model_path", "")),
            weight_version=str(merged.get("weight_version", "default")),
            vocab_size=_positive_or_none("vocab_size", merged.get("vocab_size")),
            context_len=_positive_or_none("context_length", context or None),
            raw=server_info,
        )


def _positive_or_none(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value, 1)
