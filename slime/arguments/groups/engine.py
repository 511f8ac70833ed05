"""Flags about the engines: which kind, how large, how long to wait for them and when to give up."""

from dataclasses import dataclass

from slime.arguments.core.flag import flag
from slime.catalog.engines import ENGINES
from slime.catalog.transports import MODES, TRANSPORT_CHOICES

FP8_ROUNDINGS = ("auto", "nearest", "stochastic")
ENCODINGS = ("xor", "overwrite")
CHECKSUMS = ("xxh3-128", "blake3", "adler32")


@dataclass
class EngineFlags:
    """Engine."""

    rollout_engine: str = flag(
        "auto",
        "inference engine; auto: sglang where flags of its own (--sglang-...) are given, else embedded",
        choices=("auto", *ENGINES),
    )
    sglang_python: str | None = flag(
        None,
        "interpreter that has SGLang; default: .venv-sglang of `make sglang-env`, else this one",
        metavar="PATH",
    )
    sglang_server_concurrency: int = flag(512, "requests in flight per engine", ge=1)
    embedded_device: str = flag(
        "auto", "device of the embedded engine: auto, cpu, cuda or cuda:N", metavar="DEVICE"
    )
    embedded_dtype: str = flag(
        "auto",
        "precision of the embedded engine; auto: that of the trainer",
        choices=("auto", "float32", "bfloat16"),
    )
    embedded_max_running_requests: int = flag(
        256,
        "requests decoded together; 1 computes each alone and keeps no prefixes, as --deterministic-mode does",
        ge=1,
    )
    embedded_max_total_tokens: int | None = flag(
        None, "tokens of KV cache; default: from the memory at hand", ge=1
    )
    engine_start_timeout_s: float = flag(300.0, "longest wait for an engine to serve", gt=0)
    generate_timeout_s: float = flag(1800.0, "longest wait for one generation", gt=0)
    engine_restart_limit: int = flag(3, "engine deaths within the window that stop the run", ge=0)
    engine_restart_window_s: float = flag(600.0, "the window of --engine-restart-limit", gt=0)
    engine_silence_timeout_s: float = flag(
        10.0,
        "an engine that gives no sign of life for this long is replaced; one that is seen to compute gets "
        "12 times as much; 0: never",
        ge=0,
    )
    use_fault_tolerance: bool = flag(False, "also ask engines for a token, and for the weights they hold")
    rollout_health_check_interval: float = flag(30.0, "seconds between probes", gt=0)
    rollout_health_check_timeout: float = flag(30.0, "seconds until a probe counts as failed", gt=0)
    rollout_health_check_first_wait: float = flag(0.0, "seconds before the first probe", ge=0)
    rollout_health_check_failures: int = flag(
        1, "failed probes in a row after which an engine is replaced", ge=1
    )


@dataclass
class WeightSyncFlags:
    """Weight sync."""

    update_weight_transport: str = flag(
        "auto",
        "how new weights reach the engines; "
        + "".join(f"{choice}: {meaning}; " for choice, meaning in TRANSPORT_CHOICES.items())
        + "auto: the fastest that these engines take",
        choices=("auto", *TRANSPORT_CHOICES),
    )
    update_weight_mode: str = flag(
        "full",
        "delta: only changed bytes travel, through a folder, to a copy of the weights beside the engines, "
        "which load it from disk; needs the extra `delta`",
        choices=MODES,
    )
    update_weight_delta_encoding: str = flag(
        "xor",
        "what a delta holds of a changed element: old xor new (smaller), or the new one",
        choices=ENCODINGS,
    )
    update_weight_delta_checksum: str = flag(
        "xxh3-128", "checksum of every tensor, verified before an engine loads it", choices=CHECKSUMS
    )
    update_weight_local_checkpoint_dir: str | None = flag(
        None,
        "where the copy beside the engines is kept, for delta; default: in the run's folder",
        metavar="DIR",
    )
    weight_agent_addrs: list[str] | None = flag(
        None,
        "one `slime weight-agent` for each of --rollout-external-engine-addrs, in that order: they keep the "
        "copies, for delta; default: the engines read this machine's disk",
        metavar="HOST:PORT",
    )
    update_weight_disk_dir: str | None = flag(
        None, "folder shared with the engines, for disk; for delta also with agents", metavar="DIR"
    )
    update_weight_disk_keep_files: bool = flag(
        False, "versions of the weights on disk stay, also after the run"
    )
    custom_update_weight_post_write_path: str | None = flag(
        None,
        "function called on every trainer rank between writing a version and the engines' reading it",
        metavar="PATH",
    )
    rollout_quantization: str = flag(
        "none",
        "fp8: engines serve the linear layers of a 16-bit --hf-checkpoint in FP8 blocks, made from the "
        "trainer's weights at each push; the trainer keeps its 16-bit start, and no second folder is needed",
        choices=("none", "fp8"),
    )
    fp8_rounding: str = flag(
        "auto",
        "how weights become FP8 at a push; stochastic: up or down by a number of each weight's own (from "
        "--seed), right on average; auto: stochastic where the trainer starts from FP8 weights, from which "
        "nearest would not move, else nearest",
        choices=FP8_ROUNDINGS,
    )
    update_weights_interval: int = flag(1, "rollouts between weight updates (train_async.py only)", ge=1)
    update_weight_timeout_s: float = flag(
        600.0,
        "an engine that has not answered one step of a push after this is evicted: a bucket, a load from "
        "disk, a checksum",
        gt=0,
    )
    update_weight_buffer_size: int = flag(512 * 1024**2, "bytes per bucket of weights", ge=1)
    check_weight_update_equal: bool = flag(
        False, "compare every tensor of the engines with the trainer after a push"
    )
    weight_checksum_interval: int = flag(
        0,
        "pushes between comparisons of the engines' own checksums over all engines; 0: only the first push",
        ge=0,
    )
