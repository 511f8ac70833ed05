"""Formats that weights get on their way to the engines: the choices of `--rollout-quantization`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QuantizationRow:
    """One format. `code`: a module with two functions.

    `engine_config(kind of engine, model folder)` returns the `quantization_config` with which engines serve
    the 16-bit model; None: they get 16-bit tensors. `make_converter(model folder, that config, seed)` returns
    the function that converts the tensors of a push.
    """

    code: str
    help: str


QUANTIZATIONS: dict[str, QuantizationRow] = {
    "fp8": QuantizationRow("slime.weight_sync.fp8", "FP8 in blocks"),
    "int4": QuantizationRow("slime.weight_sync.int4", "INT4 in groups, to which the trainer rounds, too"),
}
