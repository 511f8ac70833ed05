"""Flags that earlier versions of slime had, and what takes the place of each: the text of the error."""

_DEADLINES = {
    **{f"{name}-timeout-s": name for name in ("custom-generate", "generate", "reward", "env", "episode")},
    **{f"{name}-timeout-s": name for name in ("judge", "worker-silence", "host", "hang", "engine-start")},
    **{f"{name}-timeout-s": name for name in ("engine-silence", "no-engine", "update-weight")},
    "restart-wait-s": "restart-wait",
}

REMOVED_FLAGS: dict[str, str] = {
    **{old: f"give it as --timeouts {name}=SECONDS" for old, name in _DEADLINES.items()},
    "engine-restart-window-s": "the window of --engine-restart-limit is always 600 seconds; remove the flag",
}
