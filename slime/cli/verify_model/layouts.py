"""Parallel layouts by name (`tp2`, `pp2`, `cp2`, `ep2`, `dp2`, `tp2sp`, `tp2pp2`) and their ranks."""

import re
from dataclasses import dataclass
from typing import Any

_FLAGS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
_PART = re.compile(r"(vpp|etp|tp|pp|cp|ep|dp)(\d+)|(sp)")
DENSE = ("single", "tp2", "tp2sp", "pp2", "cp2", "dp2", "tp2pp2")
EXPERTS = ("single", "tp2", "pp2", "cp2", "ep2", "ep2pp2")


@dataclass(frozen=True, slots=True)
class CheckTarget:
    """One trainer under one layout. `settings` are flags of the run."""

    backend: str  # fsdp or megatron
    layout: str
    ranks: int
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.backend} {self.layout}"


def parse_layout(text: str, *, experts: bool) -> CheckTarget:
    """Parse `tp2pp2`: the Megatron trainer on four ranks. With experts, `tp` adds sequence parallelism."""
    parts = [] if text == "single" else list(_PART.finditer(text))
    if text != "single" and (not parts or "".join(part.group() for part in parts) != text):
        raise ValueError(
            f"--layouts names {text!r}: a layout is `single`, or joined sizes such as tp2, pp2, "
            "tp2sp, pp2vpp2, cp2, ep2, dp2, tp2pp2."
        )
    sizes = {part.group(1) or "sp": int(part.group(2) or 1) for part in parts}
    tp, cp, pp, dp = (sizes.get(name, 1) for name in ("tp", "cp", "pp", "dp"))
    while (tp * cp * dp) % (sizes.get("ep", 1) * sizes.get("etp", 1)):
        dp += 1
    settings = {_FLAGS[name]: size for name, size in sizes.items() if name in _FLAGS}
    settings["sequence_parallel"] = "sp" in sizes or (experts and tp > 1)
    return CheckTarget("megatron", text, tp * cp * pp * dp, tuple(settings.items()))


def choose_targets(layouts: str | None, *, experts: bool, megatron: bool) -> list[CheckTarget]:
    """Return the FSDP trainer on one and two ranks, then the Megatron trainer under each layout."""
    targets = [CheckTarget("fsdp", "single", 1), CheckTarget("fsdp", "dp2", 2)]
    if layouts is None and not megatron:
        return targets
    if not megatron:
        raise ValueError(f"--layouts {layouts}: layouts are Megatron's, and megatron-core is not installed.")
    names = layouts.split(",") if layouts else (EXPERTS if experts else DENSE)
    return targets + [parse_layout(name.strip(), experts=experts) for name in names]
