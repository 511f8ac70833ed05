"""Flags and rules of the engines: which kind, how long to wait for them, how they get new weights."""

import importlib.util
from dataclasses import dataclass

from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import either, flag, needs
from slime.catalog.engines import DEFAULT_ENGINE, ENGINES
from slime.catalog.quantizations import QUANTIZATIONS
from slime.catalog.transports import MODES, OLDER_NAMES, TRANSPORT_CHOICES

PAUSE_MODES = ("auto", "retract", "in_place", "abort")
FP8_ROUNDINGS = ("auto", "nearest", "stochastic")
ENCODINGS = ("xor", "overwrite")
# Module and pip package of each checksum; None: it is in the standard library.
_CHECKSUM_PACKAGES: dict[str, tuple[str | None, str]] = {
    "xxh3-128": ("xxhash", "'slime-rl[delta]'"),
    "blake3": ("blake3", "blake3"),
    "adler32": (None, ""),
}
CHECKSUMS = tuple(_CHECKSUM_PACKAGES)


# -- when flags have an effect
DISK = either(needs("update_weight_transport", "disk"), needs("update_weight_mode", "delta"), harmless=True)
DELTA = needs("update_weight_mode", "delta", harmless=True)
SGLANG = needs("rollout_engine", "sglang", harmless=True)
PROBES = needs("use_fault_tolerance", harmless=True)


@dataclass
class EngineFlags:
    """Engine."""

    rollout_engine: str = flag(
        "auto",
        "inference engine; "
        + "".join(f"{name}: {kind.help}; " for name, kind in ENGINES.items())
        + "auto: sglang if flags of its own (--sglang-...) are given, else embedded",
        choices=("auto", *ENGINES),
    )
    sglang_python: str | None = flag(
        None,
        "interpreter that has SGLang; default: .venv-sglang, else this one",
        metavar="PATH",
        only_with=SGLANG,
    )
    sglang_server_concurrency: int = flag(512, "requests in flight per engine", ge=1)
    use_fault_tolerance: bool = flag(False, "also probe engines with requests, and check their weights")
    rollout_health_check_interval: float = flag(30.0, "seconds between probes", gt=0, only_with=PROBES)
    rollout_health_check_first_wait: float = flag(0.0, "seconds before the first one", ge=0, only_with=PROBES)


@dataclass
class WeightSyncFlags:
    """Weight sync."""

    update_weight_transport: str = flag(
        "auto",
        "how new weights reach the engines; "
        + "".join(f"{choice}: {meaning}; " for choice, meaning in TRANSPORT_CHOICES.items())
        + "auto: the fastest that these engines support",
        choices=("auto", *TRANSPORT_CHOICES),
    )
    update_weight_mode: str = flag(
        "full", "full, or delta: only changed bytes, through a folder (extra `delta`)", choices=MODES
    )
    update_weight_delta_encoding: str = flag(
        "xor",
        "a changed element is sent as old xor new, or as is",
        choices=ENCODINGS,
        only_with=DELTA,
    )
    update_weight_delta_checksum: str = flag(
        "xxh3-128", "checksum of every tensor, verified at load", choices=CHECKSUMS, only_with=DELTA
    )
    update_weight_local_checkpoint_dir: str | None = flag(
        None, "folder of the engines' local copy of the weights; default: RUN", only_with=DELTA
    )
    weight_agent_addrs: list[str] | None = flag(
        None,
        "one `slime weight-agent` per --rollout-external-engine-addrs, in that order",
        metavar="HOST:PORT",
        only_with=DELTA,
    )
    update_weight_disk_dir: str | None = flag(
        None, "folder shared with the engines, for disk; for delta also with agents", only_with=DISK
    )
    update_weight_disk_keep_files: bool = flag(
        False, "keep versions of the weights on disk, also after the run", only_with=DISK
    )
    custom_update_weight_post_write_path: str | None = flag(
        None, "function called on every rank after a version was written", only_with=DISK
    )
    rollout_quantization: str = flag(
        "none",
        "serve a 16-bit --hf-checkpoint in FP8 blocks, or in INT4, to which the trainer then rounds",
        choices=("none", *QUANTIZATIONS),
    )
    fp8_rounding: str = flag(
        "auto",
        "rounding to FP8 at a push. auto: stochastic if the trainer starts from FP8 weights, else nearest",
        choices=FP8_ROUNDINGS,
    )
    pause_generation_mode: str = flag(
        "auto",
        "requests in flight at a push: restart from their tokens, keep the old KV cache, or be sent "
        "again. auto: retract if the engine reports weight versions, else abort",
        choices=PAUSE_MODES,
    )
    update_weights_interval: int = flag(1, "rollouts between weight updates (train_async.py only)", ge=1)
    update_weight_buffer_size: int = flag(512 * 1024**2, "bytes per bucket of weights", ge=1)
    check_weight_update_equal: bool = flag(False, "compare every tensor of the engines after a push")
    weight_checksum_interval: int = flag(
        0, "pushes between comparisons of the engines' checksums. 0: only after the first push", ge=0
    )
    canary_interval: int = flag(
        20, "pushes between comparisons of log-probs of a few fixed sentences. 0: none", ge=0
    )


def engine_choice(draft: Draft) -> None:
    if draft.rollout_engine not in ENGINES:  # auto
        meant = {name: why for name, row in ENGINES.items() if (why := row.rules.why_meant(draft))}
        engine, why = next(iter(meant.items()), (DEFAULT_ENGINE, "needs nothing"))
        draft.derive("rollout_engine", engine, why)
    kind = ENGINES[draft.rollout_engine]
    if kind.own_python and not draft.debug_train_only and not draft.rollout_external_engine_addrs:
        found = kind.rules.interpreter(draft.sglang_python, f"--rollout-engine {draft.rollout_engine}")
        for name, python in found.items():
            if getattr(draft, name) is None:
                draft.derive(name, python, f"where {kind.label} is installed")


def reproducible_engine(draft: Draft) -> None:
    """Make the engine draw the same tokens in every run, as far as it can."""
    if draft.deterministic_mode:
        ENGINES[draft.rollout_engine].rules.make_reproducible(draft)


def weight_sync(draft: Draft) -> None:
    given = draft.update_weight_transport
    if given == "disk" and draft.update_weight_disk_dir is None:
        raise ValueError(
            "--update-weight-transport disk needs --update-weight-disk-dir, which engines can read."
        )
    if given in OLDER_NAMES:
        draft.derive("update_weight_transport", OLDER_NAMES[given], f"{given} is its older name")
    if draft.update_weight_mode == "delta":
        _delta(draft)
    kind = ENGINES[draft.rollout_engine]
    if draft.pause_generation_mode == "in_place" and not kind.dialect.flush_while_running:
        raise ValueError(
            f"--pause-generation-mode in_place with {kind.label}, which cannot empty its prefix cache while "
            "requests are held; use retract or abort."
        )


def need_delta_packages(checksum: str) -> None:
    """Raise a ValueError with the way out when a package that deltas need is absent."""
    for module, package, asked, instead in (
        ("zstandard", "'slime-rl[delta]'", "--update-weight-mode delta", "--update-weight-mode full"),
        (*_CHECKSUM_PACKAGES[checksum], f"--update-weight-delta-checksum {checksum}", "adler32"),
    ):
        if module is not None and importlib.util.find_spec(module) is None:
            raise ValueError(f"{asked} needs the package {module}: pip install {package}, or use {instead}.")


def _delta(draft: Draft) -> None:
    if draft.update_weight_transport not in ("auto", "disk"):
        raise ValueError(
            "--update-weight-mode delta needs a folder, but --update-weight-transport is "
            f"{draft.update_weight_transport}; use auto or disk, or --update-weight-mode full."
        )
    need_delta_packages(draft.update_weight_delta_checksum)
    agents, engines = draft.weight_agent_addrs, draft.rollout_external_engine_addrs or []
    if agents is not None and len(agents) != len(engines):
        raise ValueError(
            f"--weight-agent-addrs names {len(agents)} agents for {len(engines)} engines of "
            "--rollout-external-engine-addrs; give one for each, in the same order."
        )
