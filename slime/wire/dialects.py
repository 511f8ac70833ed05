"""What differs between the engines that speak the protocol, as data: nobody branches on an engine's name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# How SGLang refuses a request whose id is that of one in flight.
ID_IS_TAKEN = "Duplicate request ID"


@dataclass(frozen=True, slots=True)
class Dialect:
    """Capabilities of one kind of engine.

    `transports`: ways to bring weights in, of "shared_memory" (our manifest), "disk", "tensor" (SGLang's
    pickled tensors) and "distributed" (a process group). `has_spans`: answers carry per-token weight
    versions. `has_begin_end`: tensor and distributed updates stand between begin_weight_update and
    end_weight_update. `memory_saver`: release and resume really free memory (SGLang: only with its own flag,
    see EngineInfo). `flush_while_running`: the prefix cache can be flushed while requests are held in place.
    `compares_manifests`: it compares its tensors with the bytes of a manifest; others only give their own
    checksums. `has_seeds`: a request's sampling_seed alone decides its tokens (SGLang: only with its own
    flag, see EngineInfo). `strict`: whatever is wrong with a request, it answers 400 and lives; others may
    ignore it, or even end. `probes_while_paused`: a health probe makes its token also while generation is
    paused. `clamps_length`: more new tokens than the context holds are cut to fit; others answer 400.
    `frees_at_hang_up`: a client that hangs up ends its request at once; others notice after seconds.
    `adapters_by`: how low-rank adapters come in (SGLang: only with its own flag, see EngineInfo); None: not
    at all. `tells_nucleus`: on request it says which ids each token was drawn from, with log-probs over
    these.
    """

    name: str
    transports: tuple[str, ...]
    has_spans: bool
    has_begin_end: bool
    memory_saver: bool
    flush_while_running: bool
    compares_manifests: bool = False
    has_seeds: bool = False
    strict: bool = False
    probes_while_paused: bool = False
    clamps_length: bool = False
    frees_at_hang_up: bool = False
    adapters_by: str | None = None
    tells_nucleus: bool = False


EMBEDDED = Dialect(
    name="embedded",
    transports=("shared_memory", "disk", "distributed"),
    has_spans=True,
    has_begin_end=False,
    memory_saver=True,
    flush_while_running=True,
    compares_manifests=True,
    has_seeds=True,
    strict=True,
    probes_while_paused=True,
    clamps_length=True,
    frees_at_hang_up=True,
    adapters_by="adapter_shared_memory",
    tells_nucleus=True,
)
SGLANG = Dialect(
    name="sglang",
    transports=("disk", "tensor", "distributed"),
    has_spans=True,
    has_begin_end=True,
    memory_saver=False,
    flush_while_running=False,
    adapters_by="adapter_tensors",
)
# 0.5.16 answers 404 to begin_weight_update and reports one weight_version per answer; 0.5.23 demands the
# first and reports spans. Releases in between were not examined, so the older form holds up to 0.5.22.
SGLANG_BEFORE_0_5_23 = Dialect(
    name="sglang<0.5.23",
    transports=("disk", "tensor", "distributed"),
    has_spans=False,
    has_begin_end=False,
    memory_saver=False,
    flush_while_running=False,
)


def version_tuple(version: str) -> tuple[int, ...]:
    """`"0.5.23.post1"` -> `(0, 5, 23)`; stops at the first part that is not a number."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def dialect_of(server_info: Mapping[str, Any]) -> Dialect:
    """Our own engine names itself; everything else that answers the protocol is taken for SGLang."""
    if server_info.get("engine") == EMBEDDED.name:
        return EMBEDDED
    version = version_tuple(str(server_info.get("version", "")))
    return SGLANG_BEFORE_0_5_23 if version and version < (0, 5, 23) else SGLANG
