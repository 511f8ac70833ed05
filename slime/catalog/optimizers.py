"""Optimizers: the rows of `--optimizer`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Optimizer:
    """One optimizer. `moments`: tensors of a parameter's size that it keeps for most parameters."""

    help: str
    moments: int = 0
    uses_adam: bool = False  # reads the flags of Adam, for all parameters or for some
    trainers: tuple[str, ...] = ("fsdp", "megatron")  # rows of --train-backend that have it


OPTIMIZERS: dict[str, Optimizer] = {
    "adam": Optimizer("AdamW, whose moments can be in host memory or in fewer bits", 2, True),
    "sgd": Optimizer("plain gradient descent, without momentum"),
    "muon": Optimizer(
        "orthogonalised momentum for the matrices of hidden layers, scaled to the size of AdamW's steps; "
        "AdamW for embeddings, output head and vectors",
        1,
        True,
        ("fsdp",),
    ),
}
