"""Finds out whether a CPU computes bfloat16 natively, or emulates it many times slower than float32."""

import re
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_X86_FLAGS = ("amx_bf16", "avx512_bf16")
_ARM_FLAGS = ("bf16", "svebf16")


def bfloat16_units(cpuinfo: str | None = None) -> tuple[bool, str]:
    """Return whether this CPU has bfloat16 units, and the evidence: (False, "has no amx_bf16, avx512_bf16").

    `cpuinfo`: text in the form of /proc/cpuinfo. If nothing is known, the result is False.
    """
    line = re.search(
        r"^(?:flags|Features)\s*:(.*)$",
        _CPUINFO.read_text(errors="replace") if cpuinfo is None else cpuinfo,
        re.MULTILINE,
    )
    flags = line[1].split() if line else []  # of the first core; the others are alike
    wanted = _ARM_FLAGS if "asimd" in flags else _X86_FLAGS
    found = [flag for flag in wanted if flag in flags]
    return bool(found), f"has {', '.join(found)}" if found else f"has no {', '.join(wanted)}"
