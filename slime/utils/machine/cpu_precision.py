"""Finds out whether a CPU computes bfloat16 natively, or emulates it many times slower than float32."""

import platform
import re
import subprocess
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_X86_FLAGS = ("amx_bf16", "avx512_bf16")
_ARM_FLAGS = ("bf16", "svebf16")


def bfloat16_units(cpuinfo: str | None = None) -> tuple[bool, str]:
    """Return whether this CPU has bfloat16 units, and the evidence: (False, "has no amx_bf16, avx512_bf16").

    `cpuinfo`: text in the form of /proc/cpuinfo. If nothing is known, the result is False.
    """
    if cpuinfo is None and not _CPUINFO.exists():
        return _ask_macos()
    flags = _flags(cpuinfo if cpuinfo is not None else _CPUINFO.read_text(errors="replace"))
    wanted = _ARM_FLAGS if "asimd" in flags else _X86_FLAGS
    found = [flag for flag in wanted if flag in flags]
    return bool(found), f"has {', '.join(found)}" if found else f"has no {', '.join(wanted)}"


def _flags(cpuinfo: str) -> set[str]:
    """Return the flags of the first core; the others are alike."""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return set(line.group(1).split()) if line else set()


def _ask_macos() -> tuple[bool, str]:
    if platform.system() != "Darwin":
        return False, "does not say what it can do"
    name = "hw.optional.arm.FEAT_BF16"
    done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
    has = done.stdout.strip() == "1"
    return has, f"{'has' if has else 'has no'} FEAT_BF16"
