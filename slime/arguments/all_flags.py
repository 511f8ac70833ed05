"""Lists all flag groups, in the order of the help page and the docs."""

import functools
from typing import Any

from slime.arguments.core.flag import FlagSpec, specs_of
from slime.arguments.groups.agents import AgentFlags
from slime.arguments.groups.algorithm import AlgorithmFlags
from slime.arguments.groups.checkpoints import CheckpointFlags
from slime.arguments.groups.cluster import ClusterFlags
from slime.arguments.groups.data import DataFlags
from slime.arguments.groups.engine import EngineFlags, WeightSyncFlags
from slime.arguments.groups.evaluation import EvaluationFlags
from slime.arguments.groups.images import ImageFlags
from slime.arguments.groups.megatron import MegatronFlags
from slime.arguments.groups.objectives import CriticFlags, DistillationFlags, KeptPolicyFlags, PreferenceFlags
from slime.arguments.groups.off_policy import OffPolicyFlags
from slime.arguments.groups.profiling import ProfilingFlags
from slime.arguments.groups.rewards import RewardFlags
from slime.arguments.groups.rollout import RolloutFlags
from slime.arguments.groups.run import AssertionFlags, DebugFlags, RunFlags
from slime.arguments.groups.sandbox import SandboxFlags
from slime.arguments.groups.topology import TopologyFlags
from slime.arguments.groups.tracking import TrackingFlags
from slime.arguments.groups.trainer import AdapterFlags, FSDPFlags, ParallelFlags
from slime.arguments.groups.training import OptimizerFlags, TrainingFlags


class Flags(
    RunFlags,
    DataFlags,
    ImageFlags,
    RolloutFlags,
    RewardFlags,
    AgentFlags,
    SandboxFlags,
    AlgorithmFlags,
    OffPolicyFlags,
    KeptPolicyFlags,
    CriticFlags,
    DistillationFlags,
    PreferenceFlags,
    TrainingFlags,
    ParallelFlags,
    FSDPFlags,
    AdapterFlags,
    MegatronFlags,
    OptimizerFlags,
    EvaluationFlags,
    CheckpointFlags,
    ClusterFlags,
    EngineFlags,
    TopologyFlags,
    WeightSyncFlags,
    TrackingFlags,
    DebugFlags,
    ProfilingFlags,
    AssertionFlags,
):
    """Every flag of a run as an attribute with its type: what `Args` and `PluginArgs` have in common.

    The flags below may be left out on the command line: rules derive them, so a run always has their value.
    """

    rollout_batch_size: int
    over_sampling_batch_size: int
    global_batch_size: int
    num_steps_per_rollout: int
    policy_loss_type: str
    loss_reduction: str
    eps_clip_high: float
    rs_lower: float
    eval_function_path: str
    actor_num_gpus_per_node: int
    rollout_num_gpus: int
    num_gpus_per_node: int
    offload_train: bool
    offload_rollout: bool
    distributed_backend: str
    run_dir: str
    hf_checkpoint: str  # None only for --debug-rollout-only with a custom rollout function
    critic_overrides: dict[str, Any]  # no flag: settings of the critic alone, from --megatron-config-path
    megatron_config: dict[str, Any]  # no flag: fields of megatron-core given as flags
    start_from: str  # no flag: source of the first weights, --hf-checkpoint or a torch_dist folder


GROUPS = Flags.__bases__


@functools.cache
def all_specs() -> dict[str, FlagSpec]:
    """Return flag name -> declaration, in the order of the help."""
    specs: dict[str, FlagSpec] = {}
    for group in GROUPS:
        for spec in specs_of(group):
            if spec.name in specs:
                raise AssertionError(
                    f"--{spec.name} is declared twice: {specs[spec.name].group} and {spec.group}"
                )
            specs[spec.name] = spec
    return specs
