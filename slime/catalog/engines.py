"""Inference engines: the rows of `--rollout-engine`, and what servers of each kind can do over HTTP."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Dialect:
    """Capabilities of servers of one kind and version, so that no caller checks the name of a server."""

    name: str
    transports: tuple[str, ...]  # the ways to load weights; compare `engine_needs` in catalog.transports
    # The transport of low-rank adapters, if the server was started for them; None: not supported.
    adapters_by: str | None = None
    has_spans: bool = False  # responses report which weight version drew which tokens
    has_begin_end: bool = False  # a weight update lies between begin_weight_update and end_weight_update
    # Released memory is freed (SGLang: only with its own flag, see EngineInfo).
    memory_saver: bool = False
    applies_deltas: bool = False  # changes its own tensors by a published delta
    parallel_updates: bool = False  # receives weights in several process groups at once
    compares_manifests: bool = False  # compares its tensors with the bytes of a manifest
    overwrites_weights: bool = False  # can fill its weights with noise, to prove that a sync is complete
    has_seeds: bool = False  # `sampling_seed` alone decides the tokens (SGLang: only with its own flag)
    flush_while_running: bool = False  # can empty its prefix cache while requests are paused in it
    # /abort_request with `prefix` ends all requests whose ids begin with the `rid`. SGLang 0.5.23 ignores
    # the field, and ignores an id that is not exactly that of a request it holds.
    aborts_by_prefix: bool = False
    reports_nucleus: bool = False  # can report the ids each token was drawn from, with log-probs over these
    # The `top_k` of a request for these ids that has none (SGLang: it must be at most 4096 by default).
    nucleus_top_k: int | None = None
    oldest_version: tuple[int, ...] = ()  # older servers are refused


_SGLANG = Dialect(
    name="sglang",
    transports=("disk", "tensor", "distributed"),
    adapters_by="adapter_tensors",
    has_spans=True,
    has_begin_end=True,
    overwrites_weights=True,
    reports_nucleus=True,
    nucleus_top_k=2048,
    oldest_version=(0, 5),
)


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One inference engine. Its specific code is in the modules `command` and `rules` of `folder`."""

    folder: str
    help: str
    label: str = field(repr=False)  # its name in messages
    dialect: Dialect
    # (V, dialect): servers older than version V use that dialect.
    older_dialects: tuple[tuple[tuple[int, ...], Dialect], ...] = field(default=(), repr=False)
    own_python: bool = False  # runs in an interpreter of its own, without slime
    packs_int4: bool = False  # holds INT4 weights packed, which it reads from files; False: their values
    spans_machines: bool = False  # one engine may have a process on each of several machines
    takes_sglang_flags: bool = False  # --sglang-..., topology groups, and fields that SGLang's router adds

    @property
    def command(self) -> Any:
        """Return the module with `run_command`, `run_environment` and `num_threads`."""
        return importlib.import_module(f"{self.folder}.command")

    @property
    def rules(self) -> Any:
        """Return the module with checks and derived values of the arguments; it imports no torch."""
        return importlib.import_module(f"{self.folder}.rules")


ENGINES: dict[str, EngineKind] = {
    "embedded": EngineKind(
        "slime.engines.embedded",
        "slime's own server process, on a CPU or one GPU",
        "the embedded engine",
        Dialect(
            name="embedded",
            transports=("shared_memory", "disk", "distributed"),
            adapters_by="adapter_shared_memory",
            has_spans=True,
            memory_saver=True,
            applies_deltas=True,
            parallel_updates=True,
            compares_manifests=True,
            has_seeds=True,
            flush_while_running=True,
            aborts_by_prefix=True,
            reports_nucleus=True,
        ),
    ),
    "sglang": EngineKind(
        "slime.engines.sglang",
        "SGLang servers, in a Python environment of their own",
        "SGLang",
        _SGLANG,
        # 0.5.16 answers 404 to begin_weight_update and reports one weight_version per response; 0.5.23
        # requires that call and reports spans. Releases in between were not examined: they count as old.
        older_dialects=(
            (
                (0, 5, 23),
                replace(
                    _SGLANG,
                    name="sglang<0.5.23",
                    has_spans=False,
                    has_begin_end=False,
                    adapters_by=None,
                    reports_nucleus=False,
                ),
            ),
        ),
        own_python=True,
        packs_int4=True,
        spans_machines=True,
        takes_sglang_flags=True,
    ),
}
DEFAULT_ENGINE = "embedded"  # it needs no other package
UNNAMED_ENGINE = "sglang"  # the assumed kind of a server that does not name its kind
