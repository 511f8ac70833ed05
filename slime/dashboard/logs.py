"""The logs of a run: a stretch of a file from its end or any place, and what advice and errors they hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_STRETCH = 128 << 10
_SEARCHED = 16 << 20  # bytes before the end that a filter looks at
_TROUBLE_BYTES = 4 << 20
_MAX_LINES = 2000
_NAME = re.compile(r"[A-Za-z0-9._-]+\.(log|txt|out|err)")
_ADVICE = re.compile(r"^\[([^\]]+)\] \S+ - WARNING: advice: (.*)$")
_ERROR = re.compile(r"^\[([^\]]+)\] \S+ - (?:ERROR|CRITICAL): (.*)$")


def log_files(folder: Path) -> list[dict[str, Any]]:
    """Plain files of RUN/logs, and the traceback beside them; never what a link leads to."""
    found = []
    for file in [folder / "error.txt", *sorted((folder / "logs").glob("*"))]:
        if _NAME.fullmatch(file.name) and file.is_file() and not file.is_symlink():
            found.append({"name": file.name, "bytes": file.stat().st_size})
    return found


def log_path(folder: Path, name: str) -> Path | None:
    """None: there is no such log. Only names from the list are taken, so no path leads elsewhere."""
    if name not in {entry["name"] for entry in log_files(folder)}:
        return None
    return folder / name if name == "error.txt" else folder / "logs" / name


def read_log(file: Path, end: int | None = None, contains: str = "") -> dict[str, Any]:
    """The lines before byte `end` (None: the last ones), or those of the last part that hold a text."""
    size = file.stat().st_size
    end = size if end is None else max(0, min(end, size))
    start = max(0, end - (_SEARCHED if contains else _STRETCH))
    with file.open("rb") as log:
        log.seek(start)
        data = log.read(end - start)
    if start:
        cut = data.find(b"\n") + 1
        data, start = data[cut:], start + cut
    lines = data.decode("utf-8", "replace").splitlines()
    if contains:
        low = contains.lower()
        lines = [line for line in lines if low in line.lower()]
    return {"lines": lines[-_MAX_LINES:], "start": 0 if contains else start, "size": size}


def advice_and_errors(folder: Path) -> list[dict[str, str]]:
    """What the driver's log tells of a run in trouble, newest last: advice, and the last errors."""
    file = folder / "logs" / "driver.log"
    if not file.is_file() or file.is_symlink():
        return []
    with file.open("rb") as log:
        head = log.read(_TROUBLE_BYTES)
        size = file.stat().st_size
        if size > 2 * _TROUBLE_BYTES:
            log.seek(size - _TROUBLE_BYTES)
        tail = log.read()
    found: list[dict[str, str]] = []
    for line in (head + b"\n" + tail).decode("utf-8", "replace").splitlines():
        if match := _ADVICE.match(line):
            found.append({"kind": "advice", "time": match[1], "text": match[2]})
        elif match := _ERROR.match(line):
            found.append({"kind": "error", "time": match[1], "text": match[2][:500]})
    errors = [entry for entry in found if entry["kind"] == "error"][-5:]
    return [*[entry for entry in found if entry["kind"] == "advice"][-20:], *errors]
