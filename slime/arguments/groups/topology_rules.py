"""Rules about engines and routers as a whole: who serves which model, on how many GPUs, behind what."""

from difflib import get_close_matches

from slime.arguments.core.draft import Draft
from slime.arguments.groups.topology import Topology, plain_topology, prefill_topology, read_topology
from slime.arguments.passthrough.router import need_router_python, read_router_flags
from slime.arguments.passthrough.sglang import PREFIX, need_python, server_flags
from slime.arguments.run_info import EVALUATION_ENGINES
from slime.catalog.engines import ENGINES

_SOURCES = ("sglang_config", "prefill_num_servers", "rollout_external_engine_addrs")


def topology_source(draft: Draft) -> None:
    """Before the sizes: at most one thing says which engines there
    are, and it may say how many GPUs they take.
    """
    given = ["--" + name.replace("_", "-") for name in _SOURCES if getattr(draft, name)]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} both say which engines serve; keep one of them.")
    if draft.sglang_config:
        topology = read_topology(draft.sglang_config, draft.hf_checkpoint, draft.rollout_num_gpus_per_engine)
        if draft.rollout_num_gpus is None:
            draft.derive("rollout_num_gpus", topology.num_gpus, "the sum over the groups of sglang_config")
        elif draft.rollout_num_gpus != topology.num_gpus:
            raise ValueError(
                f"--rollout-num-gpus is {draft.rollout_num_gpus}, but the groups of --sglang-config "
                f"{draft.sglang_config} have {topology.num_gpus} GPUs together; use that, or leave it out "
                "(a placeholder group keeps GPUs free)."
            )
        draft.derive("engine_topology", topology, "sglang_config")
    if draft.rollout_external_engine_addrs:
        _external(draft)


def _external(draft: Draft) -> None:
    for name, why in (
        ("rollout_num_gpus", "they bring their own GPUs"),
        ("colocate", "they share no GPU with us"),
    ):
        if draft.was_given(name) and getattr(draft, name):
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"{option} is set beside --rollout-external-engine-addrs, but {why}; remove one of them."
            )
    draft.derive("rollout_num_gpus", 0, "external engines bring their own")


def topology(draft: Draft) -> None:
    """After the sizes: `args.engine_topology`, whatever said it."""
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
            f"--eval-num-engines is {wanted}, but the policy has {count} engines: at least one must "
            "generate for training; use less, or more engines (--rollout-num-gpus)."
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
            for name in group.overrides:
                try:
                    table.find(PREFIX + name.replace("_", "-"))
                except ValueError as error:
                    near = get_close_matches(name, (flag.dest for flag in table.by_option.values()), n=1)
                    hint = f" (did you mean {near[0]!r}?)" if near else ""
                    where = f"--sglang-config {draft.sglang_config}: overrides of model {model.name!r}"
                    raise ValueError(f"{where}: {name!r} cannot be set{hint}: {error}") from None


def router(draft: Draft) -> None:
    """SGLang's router where it is needed, or where flags of its own are given; those are checked."""
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
        draft.set("router_options", [], draft.source("router_options"))
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
    python = need_router_python(draft.router_python, reason or "--rollout-router sglang")
    if draft.router_python is None:
        draft.derive("router_python", python, "where sglang-router is installed")
    draft.set("router_options", read_router_flags(given, python), draft.source("router_options"))
