"""Which errors are the fault of a rank, to be met by a restart, and which would come again at once."""

from __future__ import annotations

import re

import torch.distributed as dist

from slime.cluster.training.train_group import RankProcesses

# Of collectives whose other side has gone or hangs, by gloo and NCCL, and of a device that failed.
_SIGNS = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Timed out waiting|Socket Timeout"
    r"|timeout caused pair closure|NCCL (?:error|timeout)|ncclRemoteError|ncclSystemError"
    r"|uncorrectable ECC|CUDA error: (?:unspecified launch failure|an illegal memory access|unknown error)"
)


def cause_of(error: Exception, ranks: RankProcesses) -> str | None:
    """Why the trainer is lost, in a sentence; None: it is not, and whatever failed would fail again.

    A rank that has gone is found by asking all of them, for what the others say of it comes first at times.
    An exception of the user's code, or a device that is too small, is none of this.
    """
    lost = ranks.find_lost()
    if lost:
        return ", ".join(map(headline, lost))
    if isinstance(error, dist.DistError) or _SIGNS.search("\n".join([str(error), *_notes(error)])):
        return f"the ranks lost each other ({type(error).__name__}: {headline(error)})"
    return None


def headline(error: BaseException) -> str:
    """The first line of an error, without the log behind it."""
    return str(error).partition("\n")[0].partition("; last lines of")[0][:300]


def _notes(error: BaseException) -> list[str]:
    found: list[str] = getattr(error, "__notes__", [])  # only there once one is added
    return found
