"""Weight transports: the choices of `--update-weight-transport` and `--update-weight-mode`."""

from dataclasses import dataclass

# Values of --update-weight-transport besides auto, and what they mean; each allows some of the rows below.
TRANSPORT_CHOICES = {
    "tensor": "in memory on one machine",
    "distributed": "a process group of trainer and engines",
    "nccl": "older name of distributed",
    "disk": "a checkpoint folder",
}
OLDER_NAMES = {"nccl": "distributed"}


@dataclass(frozen=True, slots=True)
class TransportRow:
    """One weight transport. `code`: a `Transport`, or the sender class of a live transport."""

    code: str
    help: str
    choice: str  # the value of --update-weight-transport that allows it
    engine_needs: str  # one of the transports that an engine's dialect must name
    # Ranks in the order that auto tries, fastest first; None: never tried. Request bodies are faster than a
    # gloo group on a CPU machine, and slower than NCCL on GPUs. A folder needs less of the network than a
    # group that is equally slow.
    order_on_cpu: int | None
    order_on_cuda: int | None
    mode: str = "full"  # the value of --update-weight-mode that allows it
    content: str = "model"  # or "adapter": low-rank adapters alone
    live: bool = False  # engines must take part in the sync; for a late one the trainer writes files
    # Each trainer rank sends to the engines on its device; False: each pipeline stage sends.
    every_rank: bool = False
    # True: only where trainer and engines share GPUs; False: only where they do not.
    on_shared_gpus: bool | None = None
    keeps_requests: bool = True  # paused requests may stay in the engine during the sync


_HOME = "slime.weight_sync"
TRANSPORTS: dict[str, TransportRow] = {
    "shared_memory": TransportRow(
        f"{_HOME}.shared_memory.SHARED_MEMORY",
        "segments of shared memory, with checksums",
        "tensor",
        "shared_memory",
        0,
        0,
    ),
    "cuda_ipc": TransportRow(
        f"{_HOME}.cuda_ipc.CudaIpcSender",
        "handles of GPU memory, on the same GPUs",
        "tensor",
        "tensor",
        order_on_cpu=None,
        order_on_cuda=1,
        live=True,
        every_rank=True,
        on_shared_gpus=True,
    ),
    "http_tensor": TransportRow(
        f"{_HOME}.http_tensor.HTTP_TENSOR", "bodies of requests, for small models", "tensor", "tensor", 1, 4
    ),
    "distributed": TransportRow(
        f"{_HOME}.distributed.DistributedSender",
        "broadcasts in a process group, by NCCL or gloo",
        "distributed",
        "distributed",
        order_on_cpu=3,
        order_on_cuda=2,
        live=True,
        on_shared_gpus=False,  # two ranks of one NCCL group cannot share a device
    ),
    "disk": TransportRow(f"{_HOME}.disk.DISK", "a checkpoint folder that engines load", "disk", "disk", 2, 3),
    "delta": TransportRow(
        f"{_HOME}.delta.transport.DELTA",
        "changed bytes, in a folder from which each engine host updates a local copy",
        "disk",
        "disk",
        4,
        5,
        mode="delta",
    ),
    "adapter_shared_memory": TransportRow(
        f"{_HOME}.lora_push.ADAPTER_SHARED_MEMORY",
        "low-rank adapters alone, in shared memory",
        "tensor",
        "adapter_shared_memory",
        0,
        0,
        content="adapter",
    ),
    "adapter_tensors": TransportRow(
        f"{_HOME}.lora_push.ADAPTER_TENSORS",
        "low-rank adapters alone, in bodies of requests",
        "tensor",
        "adapter_tensors",
        order_on_cpu=1,
        order_on_cuda=1,
        content="adapter",
        keeps_requests=False,
    ),
}
MODES = tuple(dict.fromkeys(row.mode for row in TRANSPORTS.values()))
