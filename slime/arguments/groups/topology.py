"""Which engines serve which models: flags, and the topology file of
`--sglang-config` read into plain values.
"""

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from slime.arguments.core.files import read_yaml_mapping
from slime.arguments.core.flag import flag

WORKER_TYPES = ("regular", "prefill", "decode", "placeholder")
_MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups")
_GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")


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
        "what stands before several engines; builtin: slime's own balancer; sglang: SGLang's router as a "
        "process of its own, taken by itself where prefill groups or its flags (--router-...) need it",
        choices=("builtin", "sglang"),
    )
    router_python: str | None = flag(
        None,
        "interpreter that has sglang-router; default: .venv-router of `make sglang-env`, else this one",
        metavar="PATH",
    )
    sglang_router_port: int | None = flag(
        None, "port of the policy's router; default: any free one", ge=1, le=65535
    )
    sglang_router_request_timeout_secs: int = flag(
        14400, "SGLang's router gives a request up after this", ge=1
    )
    router_middleware_paths: list[str] = flag(
        [],
        "classes that see each request and answer at the built-in balancer, outermost first",
        metavar="PATH",
    )
    no_engine_timeout_s: float = flag(
        600.0, "a run without any engine left waits this long for one, then stops", gt=0
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
    """Without a file: one model, all engines alike, and at least one engine."""
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
            f"(--rollout-num-gpus {num_gpus}, "
            f"--rollout-num-gpus-per-engine {num_gpus_per_engine}): at least one must decode; use less."
        )
    sizes = {"prefill": num_prefill, "decode": num_engines - num_prefill}
    groups = tuple(
        ServerGroup(kind, n * num_gpus_per_engine, num_gpus_per_engine) for kind, n in sizes.items()
    )
    return Topology((ServedModel("default", model_path, True, groups),))


def read_topology(path: str, hf_checkpoint: str | None, num_gpus_per_engine: int) -> Topology:
    """The file of `--sglang-config`; what it leaves open follows from the
    arguments. Mistakes name file, key and value.
    """
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
            f"{num_gpus % size} would stay "
            f"idle; use {num_gpus - num_gpus % size or size}, or a placeholder group for GPUs to leave free."
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
                f"--sglang-config {path}: model {model.name!r} has no model_path, and --hf-checkpoint is "
                "not set."
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
