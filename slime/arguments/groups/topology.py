"""Flags and rules of which engines serve which models; reads the file of --sglang-config."""

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from slime.arguments.core.draft import Draft
from slime.arguments.core.files import read_yaml_mapping
from slime.arguments.core.flag import flag, option_of
from slime.arguments.passthrough.router_flags import need_router_python, read_router_flags
from slime.arguments.passthrough.sglang_flags import PREFIX, find_python, need_python, server_flags
from slime.catalog.engines import ENGINES

WORKER_TYPES = ("regular", "prefill", "decode", "placeholder")
_MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups")
_GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")
_SOURCES = ("sglang_config", "prefill_num_servers", "rollout_external_engine_addrs")
# The name among `model_routers` of what stands before the engines that
# --eval-num-engines keeps for evaluation.
EVALUATION_ENGINES = "evaluation"


@dataclass
class TopologyFlags:
    """Topology and routing."""

    sglang_config: str | None = flag(
        None, "YAML file of models, server groups and their GPUs (docs/topology.md)", metavar="FILE"
    )
    prefill_num_servers: int | None = flag(
        None, "engines that only prefill; the other engines only decode (needs SGLang and its router)", ge=1
    )
    rollout_external_engine_addrs: list[str] | None = flag(
        None,
        "host:port of engines that already run; they are used and never started or stopped",
        metavar="ADDR",
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
        None,
        "host of a router that already runs, with --sglang-router-port; slime registers its engines and "
        "never stops it",
        metavar="HOST",
    )
    sglang_router_port: int | None = flag(
        None, "port of the policy's router; default: any free one", ge=1, le=65535
    )
    router_middleware_paths: list[str] = flag(
        [],
        "classes that see each request and answer at the built-in balancer, outermost first",
        metavar="PATH",
    )


@dataclass(frozen=True, slots=True)
class ServerGroup:
    """Engines that are alike. `overrides`: server flags of this group alone, by name with `_`; they win."""

    worker_type: str
    num_gpus: int
    num_gpus_per_engine: int
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def num_engines(self) -> int:
        return 0 if self.worker_type == "placeholder" else self.num_gpus // self.num_gpus_per_engine


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model behind one router. `update_weights`: it is the policy, and gets every push."""

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
    """All models of a run, in the order in which they take GPUs.

    Example: Topology((ServedModel("default", "Qwen/Qwen3-0.6B", True, (ServerGroup("regular", 4,
    2),)),)) is two engines of two GPUs each.
    """

    models: tuple[ServedModel, ...]

    @property
    def num_gpus(self) -> int:
        return sum(group.num_gpus for model in self.models for group in model.groups)

    @property
    def policy(self) -> ServedModel:
        """The model that learns; where none does, the first one."""
        return next((model for model in self.models if model.update_weights), self.models[0])


def plain_topology(model_path: str | None, num_gpus: int, num_gpus_per_engine: int) -> Topology:
    """The topology of a run without a file: one model, all engines alike, and at least one engine."""
    group = ServerGroup("regular", max(num_gpus, num_gpus_per_engine), num_gpus_per_engine)
    return Topology((ServedModel("default", model_path, True, (group,)),))


def prefill_topology(
    model_path: str | None, num_gpus: int, num_gpus_per_engine: int, num_prefill: int
) -> Topology:
    """What `--prefill-num-servers` stands for."""
    num_engines = num_gpus // num_gpus_per_engine
    if num_prefill >= num_engines:
        raise ValueError(
            f"--prefill-num-servers is {num_prefill}, but there are {num_engines} engines "
            f"(--rollout-num-gpus {num_gpus}, --rollout-num-gpus-per-engine {num_gpus_per_engine}): at least "
            "one must decode; use less."
        )
    sizes = {"prefill": num_prefill, "decode": num_engines - num_prefill}
    groups = tuple(
        ServerGroup(kind, n * num_gpus_per_engine, num_gpus_per_engine) for kind, n in sizes.items()
    )
    return Topology((ServedModel("default", model_path, True, groups),))


def read_topology(path: str, hf_checkpoint: str | None, num_gpus_per_engine: int) -> Topology:
    """Read the file of --sglang-config; what it leaves open follows from the arguments."""
    content = read_yaml_mapping(path, "--sglang-config")
    _refuse_unknown(content, ("sglang",), f"--sglang-config {path}")
    rows = content.get("sglang")
    if not isinstance(rows, list) or not rows:
        raise ValueError(
            f"--sglang-config {path}: `sglang` is {rows!r}; write a list of models, at least one."
        )
    models = tuple(
        _read_model(row, f"--sglang-config {path}: sglang[{i}]", hf_checkpoint, num_gpus_per_engine)
        for i, row in enumerate(rows)
    )
    _check_models(models, path)
    return Topology(models)


def _read_model(row: Any, where: str, hf_checkpoint: str | None, default_size: int) -> ServedModel:
    if isinstance(row, dict) and "engine_groups" in row and "server_groups" not in row:
        row = {("server_groups" if key == "engine_groups" else key): value for key, value in row.items()}
    _refuse_unknown(row, _MODEL_KEYS, where)
    name = row.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}.name is {name!r}; give each model a name, which plug-ins ask for.")
    size = _count(row.get("num_gpus_per_engine", default_size), f"{where}.num_gpus_per_engine")
    rows = row.get("server_groups")
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{where}.server_groups is {rows!r}; write a list of groups, at least one.")
    groups, paths = [], {}
    for i, group in enumerate(rows):
        at = f"{where}.server_groups[{i}]"
        groups.append(_read_group(group, at, size))
        if "model_path" in groups[-1].overrides:
            paths[at] = groups[-1].overrides.pop("model_path")
    path = _one_path(row.get("model_path"), paths, where) or hf_checkpoint
    update = row.get("update_weights", path == hf_checkpoint)
    if not isinstance(update, bool):
        raise ValueError(f"{where}.update_weights is {update!r}; write true or false.")
    model = ServedModel(name, path, update, tuple(groups))
    _check_worker_types(model, where)
    return model


def _read_group(row: Any, where: str, default_size: int) -> ServerGroup:
    _refuse_unknown(row, _GROUP_KEYS, where)
    kind = row.get("worker_type", "regular")
    if kind == "encoder":
        raise ValueError(f"{where}.worker_type is encoder, which this version does not build; use regular.")
    if kind not in WORKER_TYPES:
        raise ValueError(f"{where}.worker_type is {kind!r}; use one of {', '.join(WORKER_TYPES)}.")
    num_gpus = _count(row.get("num_gpus"), f"{where}.num_gpus")
    size = _count(row.get("num_gpus_per_engine", default_size), f"{where}.num_gpus_per_engine")
    if kind != "placeholder" and num_gpus % size:
        raise ValueError(
            f"{where}.num_gpus is {num_gpus}, not a multiple of num_gpus_per_engine {size}: "
            f"{num_gpus % size} would stay idle; use {num_gpus - num_gpus % size or size}, or a placeholder "
            "group for GPUs to leave free."
        )
    overrides = row.get("overrides") or {}
    if not isinstance(overrides, dict):
        raise ValueError(f"{where}.overrides is {overrides!r}; write `server_flag: value`, one per line.")
    return ServerGroup(
        kind, num_gpus, size, {str(key).replace("-", "_"): value for key, value in overrides.items()}
    )


def _one_path(given: str | None, paths: dict[str, Any], where: str) -> str | None:
    """A model has one path; groups may repeat it in their overrides."""
    found = {str(path) for path in [given, *paths.values()] if path is not None}
    if len(found) > 1:
        raise ValueError(
            f"{where} names several model paths ({', '.join(sorted(found))}); write two models instead."
        )
    return found.pop() if found else None


def _check_worker_types(model: ServedModel, where: str) -> None:
    kinds = {group.worker_type for group in model.groups} - {"placeholder"}
    if "regular" in kinds and len(kinds) > 1:
        raise ValueError(
            f"{where} ({model.name}) mixes regular groups with {', '.join(sorted(kinds - {'regular'}))}: a "
            "router serves either kind; make it two models."
        )
    if kinds in ({"prefill"}, {"decode"}):
        other = {"prefill": "decode", "decode": "prefill"}[kinds.pop()]
        raise ValueError(
            f"{where} ({model.name}) has no {other} group: prefill and decode engines work in pairs; add one."
        )


def _check_models(models: tuple[ServedModel, ...], path: str) -> None:
    names = [model.name for model in models]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"--sglang-config {path}: two models are called {twice[0]!r}; give each its own name."
        )
    learning = [model.name for model in models if model.update_weights]
    if len(learning) > 1:
        raise ValueError(
            f"--sglang-config {path}: update_weights is true for {', '.join(learning)}: one model learns; "
            "set it to false for the others."
        )
    if not any(model.num_engines for model in models):
        raise ValueError(f"--sglang-config {path}: every group is a placeholder, so nothing would serve.")
    for model in models:
        if model.num_engines and model.model_path is None:
            raise ValueError(
                f"--sglang-config {path}: model {model.name!r} has no model_path, and --hf-checkpoint is not "
                "set."
            )


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where} is {value!r}; write a whole number of at least 1.")
    return value


def _refuse_unknown(row: Any, known: tuple[str, ...], where: str) -> None:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is {row!r}; write `key: value` lines with {', '.join(known)}.")
    for key in row:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            raise ValueError(
                f"{where}: unknown key {key!r}"
                + (f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}.")
            )


def topology_source(draft: Draft) -> None:
    """Runs before sizes are derived: at most one flag may say which engines there are and on which GPUs."""
    given = [option_of(name) for name in _SOURCES if getattr(draft, name)]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} both say which engines serve; keep one of them.")
    if draft.sglang_config:
        topology = read_topology(draft.sglang_config, draft.hf_checkpoint, draft.rollout_num_gpus_per_engine)
        if draft.rollout_num_gpus is None:
            draft.derive("rollout_num_gpus", topology.num_gpus, "the sum over the groups of sglang_config")
        elif draft.rollout_num_gpus != topology.num_gpus:
            raise ValueError(
                f"--rollout-num-gpus is {draft.rollout_num_gpus}, but the groups of --sglang-config "
                f"{draft.sglang_config} have {topology.num_gpus} GPUs together; use that, or leave it out (a "
                "placeholder group keeps GPUs free)."
            )
        draft.derive("engine_topology", topology, "sglang_config")
    if draft.rollout_external_engine_addrs:
        _external(draft)


def _external(draft: Draft) -> None:
    if draft.colocate:
        raise ValueError(
            "--colocate is set beside --rollout-external-engine-addrs, but they share no GPU with us; remove "
            "one of them."
        )
    if draft.was_given("rollout_num_gpus") and draft.rollout_num_gpus:
        draft.idle.append(
            f"--rollout-num-gpus is {draft.rollout_num_gpus}, but external engines bring their own GPUs."
        )
    draft.derive("rollout_num_gpus", 0, "external engines bring their own")


def topology(draft: Draft) -> None:
    """Runs after the sizes are known: sets `args.engine_topology`, whichever flag described it."""
    size = (draft.hf_checkpoint, draft.rollout_num_gpus, draft.rollout_num_gpus_per_engine)
    if draft.prefill_num_servers:
        draft.derive(
            "engine_topology", prefill_topology(*size, draft.prefill_num_servers), "prefill_num_servers"
        )
    elif not draft.sglang_config:
        draft.derive("engine_topology", plain_topology(*size), "one model, all engines alike")
    _check_engine_kind(draft, draft.engine_topology)
    _check_evaluation_engines(draft)
    learns = any(model.update_weights for model in draft.engine_topology.models)
    if not learns and not draft.debug_rollout_only and not draft.debug_train_only:
        raise ValueError(
            f"--sglang-config {draft.sglang_config}: no model gets the trainer's weights; set "
            "update_weights: true for the policy, or leave its model_path out (it is then --hf-checkpoint)."
        )


def _check_evaluation_engines(draft: Draft) -> None:
    policy, wanted = draft.engine_topology.policy, draft.eval_num_engines
    if not wanted or draft.debug_train_only:
        return
    count = len(draft.rollout_external_engine_addrs or ()) or policy.num_engines
    if wanted >= count:
        raise ValueError(
            f"--eval-num-engines is {wanted}, but the policy has {count} engines: at least one must generate "
            "for training; use less, or more engines (--rollout-num-gpus)."
        )
    if policy.is_disaggregated:
        raise ValueError(
            "--eval-num-engines with prefill and decode engines: they work in pairs behind one router; "
            "remove one of them."
        )
    if any(model.name == EVALUATION_ENGINES for model in draft.engine_topology.models):
        raise ValueError(
            f"--sglang-config {draft.sglang_config}: a model is called {EVALUATION_ENGINES!r}, which "
            "--eval-num-engines uses for its own; give the model another name."
        )


def _check_engine_kind(draft: Draft, topology: Topology) -> None:
    special = [m.name for m in topology.models if m.is_disaggregated or any(g.overrides for g in m.groups)]
    if not special or draft.debug_train_only:
        return
    if not ENGINES[draft.rollout_engine].takes_sglang_flags:
        raise ValueError(
            f"model {special[0]!r} of the topology has prefill groups or overrides, which --rollout-engine "
            f"{draft.rollout_engine} does not know; use --rollout-engine sglang."
        )
    table = server_flags(need_python(draft.sglang_python, "--sglang-config"))
    for model in topology.models:
        for group in model.groups:
            for name in list(group.overrides):
                option = PREFIX + name.replace("_", "-")
                now = table.translate(option)
                if now is not None:
                    draft.warn(f"overrides of model {model.name!r}: {table.tell(name, now)}")
                    value, (new, _, implied) = group.overrides.pop(name), now.partition(" ")
                    if new:
                        group.overrides[new.removeprefix("--").replace("-", "_")] = implied or value
                    continue
                try:
                    table.find(option)
                except ValueError as error:
                    near = get_close_matches(name, (flag.dest for flag in table.by_option.values()), n=1)
                    hint = f" (did you mean {near[0]!r}?)" if near else ""
                    where = f"--sglang-config {draft.sglang_config}: overrides of model {model.name!r}"
                    raise ValueError(f"{where}: {name!r} cannot be set{hint}: {error}") from None


def _router_policy(draft: Draft) -> None:
    """The policy becomes a flag of SGLang's router where there is one."""
    policy, why = draft.sglang_router_policy, None
    if policy is None or draft.debug_train_only:
        return
    if draft.rollout_router == "builtin" and draft.was_given("rollout_router"):
        why = "--rollout-router is builtin"
    elif not ENGINES[draft.rollout_engine].takes_sglang_flags and not draft.rollout_external_engine_addrs:
        why = f"--rollout-engine {draft.rollout_engine} has slime's own balancer"
    elif find_python(None, ".venv-router", "sglang_router") is None:
        why = "sglang-router is not installed: slime's own balancer chooses"
    if why:
        draft.idle.append(f"--sglang-router-policy is {policy}, but {why}.")
    else:
        options = {"--router-policy": [policy]} | draft.router_options
        draft.set("router_options", options, draft.sources["router_options"])


def _given_router(draft: Draft) -> None:
    """A router of others: engines that it can serve, and nothing that only one of ours would do."""
    host, options = draft.sglang_router_ip, draft.router_options
    if draft.sglang_router_port is None:
        raise ValueError(
            f"--sglang-router-ip is {host}: a router that runs already has a port, too; add "
            "--sglang-router-port, or leave both out and slime starts one."
        )
    if not ENGINES[draft.rollout_engine].takes_sglang_flags and not draft.rollout_external_engine_addrs:
        raise ValueError(
            f"--sglang-router-ip is {host}, but SGLang's router adds fields of its own to requests, which "
            f"--rollout-engine {draft.rollout_engine} refuses; use --rollout-engine sglang."
        )
    if draft.router_middleware_paths:
        raise ValueError(
            "--router-middleware-paths are called by the built-in balancer; leave --sglang-router-ip out."
        )
    if ":" in host and not host.startswith("["):
        draft.derive("sglang_router_ip", f"[{host}]", "an address of version 6")
    given = [*options, *(["--sglang-router-policy"] if draft.sglang_router_policy else [])]
    draft.idle += [f"{option} is set, but the router of --sglang-router-ip runs already." for option in given]
    draft.derive("rollout_router", "sglang", "sglang_router_ip is one")


def router(draft: Draft) -> None:
    """SGLang's router where it is needed, or where flags of its own are given; those are checked."""
    if draft.sglang_router_ip is not None and not draft.debug_train_only:
        _given_router(draft)
        draft.set("router_options", [], draft.sources["router_options"])
        return
    _router_policy(draft)
    given, split = draft.router_options, [m.name for m in draft.engine_topology.models if m.is_disaggregated]
    reason = next(iter(given)) if given else f"prefill and decode of model {split[0]!r}" if split else None
    if reason and draft.rollout_router == "builtin":
        if draft.was_given("rollout_router"):
            raise ValueError(
                f"--rollout-router builtin is set, but {reason} needs SGLang's router; use --rollout-router "
                "sglang."
            )
        draft.derive("rollout_router", "sglang", f"{reason} needs it")
    if draft.rollout_router == "builtin" or draft.debug_train_only:
        draft.set("router_options", [], draft.sources["router_options"])
        return
    if not ENGINES[draft.rollout_engine].takes_sglang_flags and not draft.rollout_external_engine_addrs:
        raise ValueError(
            f"{reason or '--rollout-router sglang'} means SGLang's router, which adds fields of its own to "
            f"requests that --rollout-engine {draft.rollout_engine} refuses; use --rollout-engine sglang."
        )
    if draft.router_middleware_paths:
        raise ValueError(
            "--router-middleware-paths are called by the built-in balancer; use --rollout-router builtin."
        )
    python = need_router_python(reason or "--rollout-router sglang")
    draft.set("router_options", read_router_flags(given, python), draft.sources["router_options"])
