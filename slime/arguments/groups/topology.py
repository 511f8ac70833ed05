"""Flags and rules of which engines serve which models; reads the file of --sglang-config."""

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from slime.arguments.core.draft import Draft
from slime.arguments.core.files import read_yaml_mapping
from slime.arguments.core.flag import flag, name_of, option_of
from slime.arguments.passthrough.router_flags import need_router_python, read_router_flags
from slime.arguments.passthrough.sglang_flags import find_python, need_python, server_flags
from slime.catalog.engines import ENGINES

WORKER_TYPES = ("regular", "prefill", "decode", "placeholder")
_MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups")
_GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")
_SOURCES = ("sglang_config", "prefill_num_servers", "rollout_external_engine_addrs")
EVALUATION_ENGINES = "evaluation"  # the name among `model_routers` of the engines of --eval-num-engines


@dataclass
class TopologyFlags:
    """Topology and routing."""

    sglang_config: str | None = flag(
        None, "YAML file of models, server groups and their GPUs (docs/topology.md)", metavar="FILE"
    )
    prefill_num_servers: int | None = flag(
        None, "engines that only prefill; the others only decode (SGLang and its router)", ge=1
    )
    rollout_external_engine_addrs: list[str] | None = flag(
        None, "host:port of engines that already run; slime only uses them", metavar="ADDR"
    )
    rollout_router: str = flag(
        "builtin",
        "what balances several engines: slime's own balancer, or SGLang's router, chosen by itself for "
        "prefill groups and --router-... flags",
        choices=("builtin", "sglang"),
    )
    sglang_router_policy: str | None = flag(
        None, "how SGLang's router chooses among engines; slime's balancer ignores it", metavar="NAME"
    )
    sglang_router_ip: str | None = flag(
        None, "host of a router that already runs, with --sglang-router-port", metavar="HOST"
    )
    sglang_router_port: int | None = flag(
        None, "port of the policy's router; default: a free one", ge=1, le=65535
    )
    router_middleware_paths: list[str] = flag(
        [], "classes that see each request at the built-in balancer, outermost first", metavar="PATH"
    )


@dataclass(frozen=True, slots=True)
class ServerGroup:
    """A group of identical engines. `overrides`: server flags of this group, by name with `_`; they win."""

    worker_type: str
    num_gpus: int
    num_gpus_per_engine: int
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def num_engines(self) -> int:
        return 0 if self.worker_type == "placeholder" else self.num_gpus // self.num_gpus_per_engine


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model with one router in front. `update_weights`: it is the policy, and gets every push."""

    name: str
    model_path: str | None
    update_weights: bool
    groups: tuple[ServerGroup, ...]

    @property
    def num_engines(self) -> int:
        return sum(group.num_engines for group in self.groups)

    @property
    def is_disaggregated(self) -> bool:
        return any(group.worker_type == "prefill" for group in self.groups)


@dataclass(frozen=True, slots=True)
class Topology:
    """All models of a run, in the order in which they take GPUs."""

    models: tuple[ServedModel, ...]

    @property
    def num_gpus(self) -> int:
        return sum(group.num_gpus for model in self.models for group in model.groups)

    @property
    def largest_engine(self) -> int:
        """GPUs of the largest engine."""
        return max(
            (
                group.num_gpus_per_engine
                for model in self.models
                for group in model.groups
                if group.num_engines
            ),
            default=0,
        )

    @property
    def policy(self) -> ServedModel:
        """The model that is trained; if none is, the first one."""
        return next((model for model in self.models if model.update_weights), self.models[0])


def plain_topology(model_path: str | None, num_gpus: int, num_gpus_per_engine: int) -> Topology:
    """Return the topology of a run without a file: one model with identical engines, at least one."""
    group = ServerGroup("regular", max(num_gpus, num_gpus_per_engine), num_gpus_per_engine)
    return Topology((ServedModel("default", model_path, True, (group,)),))


def prefill_topology(
    model_path: str | None, num_gpus: int, num_gpus_per_engine: int, num_prefill: int
) -> Topology:
    """Return the topology that `--prefill-num-servers` is short for."""
    num_engines = num_gpus // num_gpus_per_engine
    if num_prefill >= num_engines:
        raise ValueError(
            f"--prefill-num-servers is {num_prefill}, but there are {num_engines} engines "
            "(--rollout-num-gpus / --rollout-num-gpus-per-engine): at least one must decode; use less."
        )
    sizes = {"prefill": num_prefill, "decode": num_engines - num_prefill}
    groups = (ServerGroup(kind, n * num_gpus_per_engine, num_gpus_per_engine) for kind, n in sizes.items())
    return Topology((ServedModel("default", model_path, True, tuple(groups)),))


def read_topology(path: str, hf_checkpoint: str | None, num_gpus_per_engine: int) -> Topology:
    """Read the file of --sglang-config; what it leaves out is derived from the arguments."""
    file = f"--sglang-config {path}"
    content = read_yaml_mapping(path, "--sglang-config")
    _refuse_unknown(content, ("sglang",), file)
    rows = content.get("sglang")
    _must(isinstance(rows, list) and rows, f"{file}: `sglang`", rows, "write a list of models, at least one")
    models = tuple(
        _read_model(row, f"{file}: sglang[{i}]", hf_checkpoint, num_gpus_per_engine)
        for i, row in enumerate(rows or ())
    )
    names = [model.name for model in models]
    learning = [model.name for model in models if model.update_weights]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{file}: two models are called {name!r}; give each its own name.")
    if len(learning) > 1:
        raise ValueError(f"{file}: update_weights is true for {', '.join(learning)}: keep one.")
    if not any(model.num_engines for model in models):
        raise ValueError(f"{file}: every group is a placeholder, so nothing would serve.")
    for model in models:
        if model.num_engines and model.model_path is None:
            raise ValueError(f"{file}: model {model.name!r} has no model_path, nor is --hf-checkpoint set.")
    return Topology(models)


def _read_model(row: Any, where: str, hf_checkpoint: str | None, default_size: int) -> ServedModel:
    if isinstance(row, dict) and "engine_groups" in row and "server_groups" not in row:
        row = {("server_groups" if key == "engine_groups" else key): value for key, value in row.items()}
    _refuse_unknown(row, _MODEL_KEYS, where)
    name, rows = row.get("name"), row.get("server_groups")
    _must(isinstance(name, str) and name, f"{where}.name", name, "give each model a name")
    _must(isinstance(rows, list) and rows, f"{where}.server_groups", rows, "write a list of groups")
    size = _count(row, "num_gpus_per_engine", where, default_size)
    groups = tuple(_read_group(group, f"{where}.server_groups[{i}]", size) for i, group in enumerate(rows))
    # Groups may repeat the path of the model in their overrides.
    paths = {row.get("model_path"), *(group.overrides.pop("model_path", None) for group in groups)} - {None}
    if len(paths) > 1:
        raise ValueError(f"{where} names several model paths ({', '.join(sorted(paths))}); write two models.")
    path = paths.pop() if paths else hf_checkpoint
    update = row.get("update_weights", path == hf_checkpoint)
    _must(isinstance(update, bool), f"{where}.update_weights", update, "write true or false")
    kinds = {group.worker_type for group in groups} - {"placeholder"}
    if "regular" in kinds and len(kinds) > 1:
        others = ", ".join(sorted(kinds - {"regular"}))
        raise ValueError(f"{where} ({name}) mixes regular groups with {others}; make it two models.")
    if len(kinds) == 1 and "regular" not in kinds:
        other = "decode" if "prefill" in kinds else "prefill"
        raise ValueError(f"{where} ({name}) has no {other} group: the two kinds work in pairs; add one.")
    return ServedModel(name, path, update, groups)


def _read_group(row: Any, where: str, default_size: int) -> ServerGroup:
    _refuse_unknown(row, _GROUP_KEYS, where)
    kind = row.get("worker_type", "regular")
    if kind == "encoder":
        raise ValueError(f"{where}.worker_type is encoder, which this version does not build; use regular.")
    _must(kind in WORKER_TYPES, f"{where}.worker_type", kind, f"use one of {', '.join(WORKER_TYPES)}")
    num_gpus = _count(row, "num_gpus", where, None)
    size = _count(row, "num_gpus_per_engine", where, default_size)
    if kind != "placeholder" and num_gpus % size:
        raise ValueError(
            f"{where}.num_gpus is {num_gpus}, not a multiple of num_gpus_per_engine {size}: "
            f"{num_gpus % size} would stay idle; a placeholder group leaves GPUs free."
        )
    overrides = row.get("overrides") or {}
    _must(isinstance(overrides, dict), f"{where}.overrides", overrides, "write `server_flag: value` lines")
    return ServerGroup(kind, num_gpus, size, {name_of(str(key)): value for key, value in overrides.items()})


def _count(row: dict[str, Any], key: str, where: str, default: int | None) -> int:
    value: Any = row.get(key, default)
    _must(type(value) is int and value > 0, f"{where}.{key}", value, "write a whole number of at least 1")
    return value


def _must(holds: object, where: str, value: object, instead: str) -> None:
    if not holds:
        raise ValueError(f"{where} is {value!r}; {instead}.")


def _refuse_unknown(row: Any, known: tuple[str, ...], where: str) -> None:
    _must(isinstance(row, dict), where, row, f"write `key: value` lines with {', '.join(known)}")
    for key in row:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}."
            raise ValueError(f"{where}: unknown key {key!r}; {hint}")


def topology_source(draft: Draft) -> None:
    """Check, before sizes are derived, that at most one flag defines the engines and their GPUs."""
    given = [option_of(name) for name in _SOURCES if getattr(draft, name)]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} both say which engines serve; keep one of them.")
    if draft.sglang_config:
        topology = read_topology(draft.sglang_config, draft.hf_checkpoint, draft.rollout_num_gpus_per_engine)
        if draft.rollout_num_gpus not in (None, topology.num_gpus):
            raise ValueError(
                f"--rollout-num-gpus is {draft.rollout_num_gpus}, but the groups of --sglang-config "
                f"{draft.sglang_config} have {topology.num_gpus} GPUs together; use that, or leave it out."
            )
        draft.derive("rollout_num_gpus", topology.num_gpus, "the sum over the groups of sglang_config")
        draft.derive("engine_topology", topology, "sglang_config")
    if draft.rollout_external_engine_addrs:
        if draft.was_given("rollout_num_gpus") and draft.rollout_num_gpus:
            draft.idle.append(
                f"--rollout-num-gpus is {draft.rollout_num_gpus}, but external engines have their own GPUs."
            )
        draft.derive("rollout_num_gpus", 0, "external engines have their own")


def topology(draft: Draft) -> None:
    """Set `args.engine_topology`, whichever flag described it; runs after the sizes are known."""
    size = (draft.hf_checkpoint, draft.rollout_num_gpus, draft.rollout_num_gpus_per_engine)
    if draft.prefill_num_servers:
        found = prefill_topology(*size, draft.prefill_num_servers)
        draft.derive("engine_topology", found, "prefill_num_servers")
    elif not draft.sglang_config:
        draft.derive("engine_topology", plain_topology(*size), "one model, all engines alike")
    if not draft.debug_train_only:
        _check_overrides(draft, draft.engine_topology)
        _check_evaluation_engines(draft)
        if not draft.rollout_external_engine_addrs:
            _check_machines(draft)
            ENGINES[draft.rollout_engine].rules.check_parallel_sizes(draft)
    learns = any(model.update_weights for model in draft.engine_topology.models)
    if not learns and not draft.debug_rollout_only and not draft.debug_train_only:
        raise ValueError(
            f"--sglang-config {draft.sglang_config}: no model gets the trainer's weights; set "
            "update_weights: true for the policy, or leave its model_path out (it is then --hf-checkpoint)."
        )


def _check_machines(draft: Draft) -> None:
    """An engine that is larger than a machine needs several of them, and a server that can span them."""
    size, each = draft.engine_topology.largest_engine, draft.num_gpus_per_node
    if size > each and not draft.was_given("runtime"):
        draft.derive("runtime", "ray", "an engine on several machines")
    if size > each and not (draft.runtime == "ray" and ENGINES[draft.rollout_engine].spans_machines):
        raise ValueError(
            f"--rollout-num-gpus-per-engine is {size}, and a machine has {each} (--num-gpus-per-node): only "
            f"--runtime ray with --rollout-engine sglang puts an engine on several machines, and these are "
            f"{draft.runtime} and {draft.rollout_engine}; use at most {each}, or those."
        )


def _check_evaluation_engines(draft: Draft) -> None:
    policy, wanted = draft.engine_topology.policy, draft.eval_num_engines
    if not wanted:
        return
    count = len(draft.rollout_external_engine_addrs or ()) or policy.num_engines
    if wanted >= count:
        raise ValueError(
            f"--eval-num-engines is {wanted}, but the policy has {count} engines: at least one must generate "
            "for training; use less, or more engines (--rollout-num-gpus)."
        )
    if policy.is_disaggregated:
        raise ValueError("--eval-num-engines with prefill and decode engines, which work in pairs.")
    if any(model.name == EVALUATION_ENGINES for model in draft.engine_topology.models):
        raise ValueError(f"--eval-num-engines uses the name {EVALUATION_ENGINES!r}; rename that model.")


def _check_overrides(draft: Draft, topology: Topology) -> None:
    special = [m.name for m in topology.models if m.is_disaggregated or any(g.overrides for g in m.groups)]
    if not special:
        return
    if not ENGINES[draft.rollout_engine].takes_sglang_flags:
        raise ValueError(
            f"model {special[0]!r} of the topology has prefill groups or overrides, which --rollout-engine "
            f"{draft.rollout_engine} does not know; use --rollout-engine sglang."
        )
    table = server_flags(need_python(draft.sglang_python, "--sglang-config"))
    for model in topology.models:
        where = f"overrides of model {model.name!r}"
        for overrides, name in [(g.overrides, name) for g in model.groups for name in g.overrides]:
            now = table.translate(option_of(f"sglang_{name}"))
            if now is not None:
                draft.warn(f"{where}: {table.note(name, now)}")
                value, (new, _, implied) = overrides.pop(name), now.partition(" ")
                if new:
                    overrides[name_of(new)] = implied or value
                continue
            try:
                table.find(option_of(f"sglang_{name}"))
            except ValueError as error:
                raise ValueError(f"--sglang-config {draft.sglang_config}: {where}: {error}") from None


def _router_policy(draft: Draft) -> None:
    """Make the policy a flag of SGLang's router, if there is one."""
    policy, why = draft.sglang_router_policy, None
    if policy is None or draft.debug_train_only:
        return
    if draft.rollout_router == "builtin" and draft.was_given("rollout_router"):
        why = "--rollout-router is builtin"
    elif not _takes_router(draft):
        why = f"--rollout-engine {draft.rollout_engine} uses slime's own balancer"
    elif find_python(None, ".venv-router", "sglang_router") is None:
        why = "sglang-router is not installed: slime's own balancer chooses"
    if why:
        draft.idle.append(f"--sglang-router-policy is {policy}, but {why}.")
    else:
        options = {"--router-policy": [policy]} | draft.router_options
        draft.set("router_options", options, draft.sources["router_options"])


def _takes_router(draft: Draft) -> bool:
    """Return whether SGLang's router, which adds fields of its own to requests, can serve the engines."""
    return bool(draft.rollout_external_engine_addrs) or ENGINES[draft.rollout_engine].takes_sglang_flags


def _check_router(draft: Draft, reason: str) -> None:
    if not _takes_router(draft):
        raise ValueError(
            f"{reason} means SGLang's router, but that adds fields of its own to requests, which "
            f"--rollout-engine {draft.rollout_engine} refuses; use --rollout-engine sglang."
        )
    if draft.router_middleware_paths:
        raise ValueError(
            f"--router-middleware-paths are called by the built-in balancer; leave {reason} out."
        )


def _given_router(draft: Draft) -> None:
    """Check a router that already runs: its engines, and that no flag needs slime's own balancer."""
    host, options = draft.sglang_router_ip, draft.router_options
    if draft.sglang_router_port is None:
        raise ValueError(
            "--sglang-router-ip: a router that runs already has a port, too; add --sglang-router-port."
        )
    _check_router(draft, "--sglang-router-ip")
    if ":" in host and not host.startswith("["):
        draft.derive("sglang_router_ip", f"[{host}]", "an address of version 6")
    given = [*options, *(["--sglang-router-policy"] if draft.sglang_router_policy else [])]
    draft.idle += [f"{option} is set, but the router of --sglang-router-ip runs already." for option in given]
    draft.derive("rollout_router", "sglang", "sglang_router_ip is one")


def router(draft: Draft) -> None:
    """Choose SGLang's router if it is needed or its flags are given; those are checked."""
    source = draft.sources["router_options"]
    if draft.sglang_router_ip is not None and not draft.debug_train_only:
        _given_router(draft)
        draft.set("router_options", [], source)
        return
    _router_policy(draft)
    given, split = draft.router_options, [m.name for m in draft.engine_topology.models if m.is_disaggregated]
    reason = next(iter(given)) if given else f"prefill and decode of model {split[0]!r}" if split else None
    if reason and draft.rollout_router == "builtin":
        if draft.was_given("rollout_router"):
            raise ValueError(
                f"--rollout-router builtin is set, but {reason} needs SGLang's router; use that."
            )
        draft.derive("rollout_router", "sglang", f"{reason} needs it")
    if draft.rollout_router == "builtin" or draft.debug_train_only:
        draft.set("router_options", [], source)
        return
    reason = reason or "--rollout-router sglang"
    _check_router(draft, reason)
    draft.set("router_options", read_router_flags(given, need_router_python(reason)), source)
