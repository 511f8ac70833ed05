"""Raises the limit of open files of a process, connections included."""

import resource

_MOST = 1 << 16  # the most that any process of slime needs
_KEPT_BACK = 128  # reserved for weights, logs, probes and libraries


def raise_limit() -> int:
    """Raise the soft limit, often 1024, to what the system allows (`ulimit -Hn`); return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MOST if soft == resource.RLIM_INFINITY else soft


def most_requests(files_each: int = 1) -> int:
    """Return how many requests may be open at once, each with `files_each` connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    places = _MOST if soft == resource.RLIM_INFINITY else soft
    return max(1, (places - min(_KEPT_BACK, places // 2)) // files_each)
