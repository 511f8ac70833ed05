"""Every flag group in the order a reader meets them; the one list that the parser, the help and the docs walk."""

import functools

from slime.arguments.algorithm import AlgorithmFlags
from slime.arguments.checkpoint import CheckpointFlags
from slime.arguments.cluster import ClusterFlags
from slime.arguments.data import DataFlags
from slime.arguments.debug import DebugFlags
from slime.arguments.engine import EngineFlags, WeightSyncFlags
from slime.arguments.evaluation import EvaluationFlags
from slime.arguments.flag import FlagSpec, specs_of
from slime.arguments.fsdp import FSDPFlags
from slime.arguments.megatron import MegatronFlags
from slime.arguments.objectives import CriticFlags, DistillationFlags, KeptPolicyFlags, PreferenceFlags
from slime.arguments.off_policy import OffPolicyFlags
from slime.arguments.optimizer import OptimizerFlags
from slime.arguments.parallel import ParallelFlags
from slime.arguments.rewards import RewardFlags
from slime.arguments.rollout import RolloutFlags
from slime.arguments.run import RunFlags
from slime.arguments.topology import TopologyFlags
from slime.arguments.tracking import TrackingFlags
from slime.arguments.training import TrainingFlags

GROUPS = (
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
)


@functools.cache
def all_specs() -> dict[str, FlagSpec]:
    """Flag name -> declaration, in the order of the help."""
    specs: dict[str, FlagSpec] = {}
    for group in GROUPS:
        for spec in specs_of(group):
            if spec.name in specs:
                raise AssertionError(f"--{spec.name} is declared twice: {specs[spec.name].group} and {spec.group}")
            specs[spec.name] = spec
    return specs
