"""Flags about machines: how many ranks train, how many engines generate, and whether they share devices."""

from dataclasses import dataclass

from slime.arguments.core.flag import flag


@dataclass
class ClusterFlags:
    """Cluster (on a machine without GPUs, "gpus" means ranks)."""

    actor_num_nodes: int = flag(1, "machines that train", ge=1)
    actor_num_gpus_per_node: int | None = flag(
        None, "GPUs that train on each machine; default: those visible", ge=0
    )
    rollout_num_gpus: int | None = flag(
        None, "GPUs that generate, all machines together; default: those left", ge=0
    )
    rollout_num_gpus_per_engine: int = flag(1, "GPUs of one engine", ge=1)
    num_gpus_per_node: int | None = flag(None, "GPUs of one machine; default: those visible", ge=1)
    colocate: bool = flag(False, "trainer and engines share the same GPUs, in turns")
    offload: bool = flag(False, "same as --offload-train --offload-rollout")
    offload_train: bool | None = flag(None, "move the trainer off the device while engines generate")
    offload_rollout: bool | None = flag(None, "release engine memory while the trainer works")
    distributed_backend: str | None = flag(
        None, "torch.distributed backend; default: nccl on GPUs, gloo on CPU", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = flag(10, "longest wait for one collective", gt=0)
    worker_silence_timeout_s: float = flag(
        60.0,
        "a process of the run (a trainer rank) that gives no sign of life for this long ends it, one that "
        "is seen to compute gets 12 times as much; its work may take as long as it needs; 0: never",
        ge=0,
    )
    trainer_threads: int | None = flag(
        None, "CPU threads of each trainer rank; default: a share of the cores", ge=1
    )
    engine_threads: int | None = flag(None, "CPU threads of each engine; default: a share of the cores", ge=1)
