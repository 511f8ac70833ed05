"""Old module paths of slime users, resolved to their new homes.

A moved module is the same module object under both names, so what is patched or pickled under one is found
under the other. A module that was split into several is a facade: it re-exports the names listed here, and
patching a name of a facade does not reach the home of the function. Each import of an old name warns with the
new one.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence

MOVED = {
    "slime.agent.rewards.programs": "slime.agent.rewards.code",
    "slime.ray.rollout_data_source": "slime.rollout.data_source",
    "slime.rollout.answers": "slime.rollout.response_text",
    "slime.rollout.policy_requests": "slime.rollout.generation.policy_requests",
    "slime.rollout.rm_hub.answers": "slime.rollout.response_text",
    "slime.utils.arguments": "slime.arguments",
    "slime.utils.data": "slime.data.dataset",
    "slime.utils.external_utils.command_utils": "slime.cli.launch",
    "slime.utils.eval_config": "slime.arguments.groups.eval_config",
    "slime.utils.logging_utils": "slime.observability.logging_utils",
    "slime.utils.trace_utils": "slime.observability.trace_utils",
    "slime.utils.waits": "slime.liveness.waits",
}

# Old module -> new module -> the names it took over.
FACADES: dict[str, dict[str, tuple[str, ...]]] = {
    "slime.backends.megatron_utils": {},
    "slime.backends.megatron_utils.cp_utils": {
        "slime.utils.whole_responses": ("all_gather_with_cp", "slice_log_prob_with_cp"),
    },
    "slime.backends.megatron_utils.loss": {
        "slime.algorithms.off_policy": ("icepop_function",),
        "slime.algorithms.response_logits": (
            "get_log_probs_and_entropy",
            "get_responses",
            "get_rollout_top_p_logprob_kwargs",
        ),
    },
    "slime.observability.tensorboard_utils": {"slime.observability.logging_utils": ("_TensorboardAdapter",)},
    "slime.ray": {},
    "slime.ray.rollout": {
        "slime.observability.plugin_metrics": (
            "compute_metrics_from_samples",
            "compute_perf_metrics_from_samples",
            "compute_rollout_step",
        ),
    },
    "slime.rollout.sglang_streaming_rollout": {"slime.rollout.sglang_rollout": ("generate_streaming",)},
    "slime.utils.external_utils": {},
    "slime.utils.metric_utils": {
        "slime.observability.plugin_metrics": (
            "compression_ratio",
            "compute_pass_rate",
            "compute_rollout_step",
            "compute_statistics",
            "dict_add_prefix",
            "has_repetition",
        ),
    },
    "slime.utils.ppo_utils": {
        "slime.algorithms.kl": ("compute_approx_kl",),
        "slime.algorithms.policy_loss": (
            "compute_policy_loss",
            "compute_cispo_loss",
            "compute_gspo_kl",
            "compute_opsm_mask",
        ),
        "slime.algorithms.gae": (
            "vanilla_gae",
            "chunked_gae",
            "chunked_discounted_returns",
            "get_advantages_and_returns_batch",
        ),
        "slime.algorithms.advantages": (
            "get_grpo_returns",
            "get_reinforce_plus_plus_returns",
            "get_reinforce_plus_plus_baseline_advantages",
        ),
        "slime.algorithms.logprobs": ("calculate_log_probs_and_entropy", "compute_log_probs"),
    },
    "slime.utils.ray_utils": {"slime.utils.misc": ("Box",)},
    "slime.utils.tensorboard_utils": {"slime.observability.logging_utils": ("_TensorboardAdapter",)},
    "slime.utils.wandb_utils": {
        "slime.observability.logging_utils": (
            "init_wandb_primary",
            "init_wandb_secondary",
            "reinit_wandb_primary_with_open_metrics",
        ),
    },
}


class MovedFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder for the names in the tables above; it ignores every other import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in MOVED or fullname in FACADES:
            holds = any(name.startswith(fullname + ".") for name in (*MOVED, *FACADES))
            listed = [name for names in FACADES.get(fullname, {}).values() for name in names]
            # Tools that read the spec without importing see here whether it is a package.
            state = MOVED.get(fullname) or frozenset(listed)
            return importlib.machinery.ModuleSpec(fullname, self, loader_state=state, is_package=holds)
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        homes = MOVED.get(name) or ", ".join(FACADES[name])
        if not homes:  # a package of moved modules
            return
        # The import machinery's own frames do not count, so level 2 is the line that wrote the import.
        warnings.warn(f"{name} moved to {homes}; import it from there", DeprecationWarning, stacklevel=2)
        if name in MOVED:
            # The import machinery reads the module back from sys.modules: both names become one object.
            sys.modules[name] = importlib.import_module(MOVED[name])
            return
        module.__doc__ = f"Re-exports of {homes}, under their old module name."
        for home, names in FACADES[name].items():
            source = importlib.import_module(home)
            for exported in names:
                setattr(module, exported, getattr(source, exported))


def install() -> None:
    """Make the old names importable. Called once, when slime is first imported."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(MovedFinder())
