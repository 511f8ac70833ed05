"""Inference engines: the rows of `--rollout-engine`, and what servers of each kind can do."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Dialect:
    """What servers of one kind and version can do over HTTP, so that nobody asks for their name."""

    name: str
    transports: tuple[str, ...]  # ways to bring weights in: what rows of catalog.transports need of an engine
    has_spans: bool = False  # answers say which weight version drew which tokens
    has_begin_end: bool = False  # updates stand between begin_weight_update and end_weight_update
    memory_saver: bool = False  # release and resume free memory (SGLang: only with its flag, see EngineInfo)
    flush_while_running: bool = False  # the prefix cache can be flushed while requests are held in place
    compares_manifests: bool = False  # it compares its tensors with the bytes of a manifest
    overwrites_weights: bool = False  # with noise, when asked: those alone that it tells checksums of
    # `sampling_seed` alone decides the tokens (SGLang: only with its flag, see EngineInfo).
    has_seeds: bool = False
    strict: bool = False  # it answers 400 to whatever is wrong with a request; others may ignore it, or end
    probes_while_paused: bool = False  # a health probe makes its token also while generation is paused
    clamps_length: bool = False  # more new tokens than the context holds are cut to fit; others answer 400
    frees_at_hang_up: bool = False  # a client that hangs up ends its request at once; others notice later
    # /abort_request with `prefix` ends all requests whose ids begin with the `rid`. SGLang 0.5.23 has no such
    # field, and drops an id that is not exactly that of a request it holds.
    aborts_by_prefix: bool = False
    # The transport of low-rank adapters, if it was started for them; None: none.
    adapters_by: str | None = None
    tells_nucleus: bool = False  # it can say which ids each token was drawn from, with log-probs over these
    oldest_version: tuple[int, ...] = ()  # of the server; an older one is refused


_SGLANG = Dialect(
    name="sglang",
    transports=("disk", "tensor", "distributed"),
    has_spans=True,
    has_begin_end=True,
    overwrites_weights=True,
    adapters_by="adapter_tensors",
    oldest_version=(0, 5),
)


@dataclass(frozen=True, slots=True)
class EngineKind:
    """`command` gets the arguments of a run and an `EngineSite`, and returns how one such engine is started.

    Example: embedded engines are processes of this Python, which serve with as many threads as they get.
    """

    command: str
    help: str
    label: str = field(repr=False)  # its name in messages
    dialect: Dialect
    # (V, dialect): servers older than version V speak that one.
    older_dialects: tuple[tuple[tuple[int, ...], Dialect], ...] = field(default=(), repr=False)
    chosen_by: tuple[str, ...] = ()  # flags whose use means this engine, where --rollout-engine is auto
    chosen_why: str = field(default="", repr=False)
    flags: tuple[str, ...] = ()  # that no other engine reads
    # Why such a flag has no effect on a run with another engine, and the remedy.
    flags_unread: str = field(default="", repr=False)
    lacks_models: tuple[str, ...] = ()  # types of vision-language models that it cannot serve
    # Gets what `command` gets, and returns variables of the engine's process; None: it needs none.
    environment: str | None = field(default=None, repr=False)
    # Finds the interpreter that it runs in; None: ours, with our modules.
    find_python: str | None = field(default=None, repr=False)
    python_flag: str = ""  # the flag that names this interpreter
    # Says of a model's configuration why it cannot serve it, or None; None: it is asked when it starts.
    why_unserved: str | None = field(default=None, repr=False)
    single_request_flag: str | None = None  # at 1, requests are computed one at a time: reproducibly
    # Its own mode, in which tokens and log-probs depend on nothing but the request, is for GPUs only.
    reproduces_on_gpus_only: bool = False
    several_processes: bool = False  # whose threads get in each other's way on a CPU machine
    takes_sglang_flags: bool = False  # --sglang-..., topology groups, and fields that SGLang's router adds
    loses_weights_with_memory: bool = False  # released memory comes back empty: only a whole push fills it
    requests_name_adapters: bool = False  # a request that names none is answered by the model alone


ENGINES: dict[str, EngineKind] = {
    "embedded": EngineKind(
        "slime.engines.embedded.command.run_command",
        "our own server process, on a CPU or one GPU",
        "the embedded engine",
        Dialect(
            name="embedded",
            transports=("shared_memory", "disk", "distributed"),
            has_spans=True,
            memory_saver=True,
            flush_while_running=True,
            compares_manifests=True,
            has_seeds=True,
            strict=True,
            probes_while_paused=True,
            clamps_length=True,
            frees_at_hang_up=True,
            aborts_by_prefix=True,
            adapters_by="adapter_shared_memory",
            tells_nucleus=True,
        ),
        flags=(
            "embedded_device",
            "embedded_dtype",
            "embedded_max_running_requests",
            "embedded_max_total_tokens",
        ),
        flags_unread="SGLang is the engine; use its own flags (--sglang-...)",
        single_request_flag="embedded_max_running_requests",
        why_unserved="slime.engines.embedded.runner.why_unserved",
    ),
    "sglang": EngineKind(
        "slime.engines.sglang.command.run_command",
        "real SGLang servers, in a Python of their own",
        "SGLang",
        _SGLANG,
        lacks_models=("idefics3", "smolvlm"),
        environment="slime.engines.sglang.command.run_environment",
        # 0.5.16 answers 404 to begin_weight_update and reports one weight_version per answer; 0.5.23 demands
        # the first and reports spans. Releases in between were not examined: they count as old.
        older_dialects=(
            (
                (0, 5, 23),
                replace(
                    _SGLANG, name="sglang<0.5.23", has_spans=False, has_begin_end=False, adapters_by=None
                ),
            ),
        ),
        chosen_by=("sglang_options", "sglang_config", "prefill_num_servers"),
        chosen_why="flags of SGLang are given",
        flags=("sglang_python",),
        flags_unread="no SGLang is started; add --rollout-engine sglang",
        find_python="slime.arguments.passthrough.sglang_flags.need_python",
        python_flag="sglang_python",
        reproduces_on_gpus_only=True,
        several_processes=True,
        takes_sglang_flags=True,
        loses_weights_with_memory=True,
        requests_name_adapters=True,
    ),
}
DEFAULT_ENGINE = "embedded"  # where nothing asks for another: it needs nothing
UNNAMED_ENGINE = "sglang"  # what a server is taken for that does not name its kind
