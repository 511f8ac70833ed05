"""Every flag group in the order a reader meets them; the one list
that the parser, the help and the docs walk.
"""

import functools

from slime.arguments.core.flag import FlagSpec, specs_of
from slime.arguments.groups.algorithm import AlgorithmFlags
from slime.arguments.groups.checkpoints import CheckpointFlags
from slime.arguments.groups.cluster import ClusterFlags
from slime.arguments.groups.data import DataFlags
from slime.arguments.groups.debug import DebugFlags
from slime.arguments.groups.engine import EngineFlags, WeightSyncFlags
from slime.arguments.groups.evaluation import EvaluationFlags
from slime.arguments.groups.fsdp import FSDPFlags
from slime.arguments.groups.objectives import CriticFlags, DistillationFlags, KeptPolicyFlags, PreferenceFlags
from slime.arguments.groups.off_policy import OffPolicyFlags
from slime.arguments.groups.optimizer import OptimizerFlags
from slime.arguments.groups.parallel import ParallelFlags
from slime.arguments.groups.rewards import RewardFlags
from slime.arguments.groups.rollout import RolloutFlags
from slime.arguments.groups.run import RunFlags
from slime.arguments.groups.topology import TopologyFlags
from slime.arguments.groups.tracking import TrackingFlags
from slime.arguments.groups.training import TrainingFlags
from slime.arguments.passthrough.megatron import MegatronFlags


class Flags(
    RunFlags,
    DataFlags,
    RolloutFlags,
    RewardFlags,
    AlgorithmFlags,
    OffPolicyFlags,
    KeptPolicyFlags,
    CriticFlags,
    DistillationFlags,
    PreferenceFlags,
    TrainingFlags,
    ParallelFlags,
    FSDPFlags,
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
):
    """Every flag of a run as an attribute with its type: what `Args` and `PluginArgs` have in common."""


GROUPS = Flags.__bases__


@functools.cache
def all_specs() -> dict[str, FlagSpec]:
    """Flag name -> declaration, in the order of the help."""
    specs: dict[str, FlagSpec] = {}
    for group in GROUPS:
        for spec in specs_of(group):
            if spec.name in specs:
                raise AssertionError(
                    f"--{spec.name} is declared twice: {specs[spec.name].group} and {spec.group}"
                )
            specs[spec.name] = spec
    return specs
