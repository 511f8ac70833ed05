"""Reads the logs of a run: a part of a file, and the advice and errors in them."""

import contextlib
import re
import threading
from collections import deque
from pathlib import Path
from typing import Any

_STRETCH = 128 << 10
_SEARCHED = 16 << 20  # bytes before the end that are searched
_MAX_LINES = 2000
HIDDEN = "[hidden]"
_TOKEN = re.compile(r"([#&?]token=)[\w-]+")
_NAME = re.compile(r"[A-Za-z0-9._-]+\.(log|txt|out|err)")
_ADVICE = re.compile(r"^\[([^\]]+)\] \S+ - WARNING: advice: (.*)$")
_ERROR = re.compile(r"^\[([^\]]+)\] \S+ - (?:ERROR|CRITICAL): (.*)$")


def log_files(folder: Path) -> list[dict[str, Any]]:
    """List the plain files of RUN/logs and error.txt; links are never followed."""
    found = []
    for file in [folder / "error.txt", *sorted((folder / "logs").glob("*"))]:
        if _NAME.fullmatch(file.name) and file.is_file() and not _is_elsewhere(file, folder):
            found.append({"name": file.name, "bytes": file.stat().st_size})
    return found


def _is_elsewhere(file: Path, folder: Path) -> bool:
    """Return whether a link leads out of the run folder."""
    return file.is_symlink() or file.resolve().parent not in (folder.resolve(), folder.resolve() / "logs")


def log_path(folder: Path, name: str) -> Path | None:
    """Return the path of a listed log; None for any other name, so that no path leads elsewhere."""
    if name not in {entry["name"] for entry in log_files(folder)}:
        return None
    return folder / name if name == "error.txt" else folder / "logs" / name


def without_tokens(text: str, token: str = "") -> str:
    """Hide the token of this dashboard, and any text that is printed as the token of another one."""
    text = _TOKEN.sub(rf"\1{HIDDEN}", text)
    return text.replace(token, HIDDEN) if token else text


def read_log(file: Path, end: int | None = None, contains: str = "", token: str = "") -> dict[str, Any]:
    """Return the lines before byte `end` (None: the last ones), or those of the last part that hold a text.

    Tokens are hidden before lines are searched: a search that finds one would give it away.
    """
    size = file.stat().st_size
    end = size if end is None else max(0, min(end, size))
    start = max(0, end - (_SEARCHED if contains else _STRETCH))
    with file.open("rb") as log:
        log.seek(start)
        data = log.read(end - start)
    if start:
        cut = data.find(b"\n") + 1
        data, start = data[cut:], start + cut
    lines = without_tokens(data.decode("utf-8", "replace"), token).splitlines()
    if contains:
        low = contains.lower()
        lines = [line for line in lines if low in line.lower()]
    return {"lines": lines[-_MAX_LINES:], "start": 0 if contains else start, "size": size}


class LogTrouble:
    """Collects advice and the last errors from the driver's log; each call reads only what is new."""

    def __init__(self, folder: Path):
        self._file, self._offset, self._lock = folder / "logs" / "driver.log", 0, threading.Lock()
        self._advice: deque[dict[str, str]] = deque(maxlen=20)
        self._errors: deque[dict[str, str]] = deque(maxlen=5)

    def read(self) -> list[dict[str, str]]:
        """Return advice and errors, newest last; only the end of a very long log is read."""
        with self._lock, contextlib.suppress(OSError):
            if not _is_elsewhere(self._file, self._file.parent.parent):
                self._read_on(self._file.stat().st_size)
            return [*self._advice, *self._errors]
        return []

    def _read_on(self, size: int) -> None:
        if size < self._offset:
            self._offset = 0
            self._advice.clear()
            self._errors.clear()
        self._offset = max(self._offset, size - _SEARCHED)
        with self._file.open("rb") as log:
            log.seek(self._offset)
            data = log.read(size - self._offset)
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        for line in without_tokens(data[:whole].decode("utf-8", "replace")).splitlines():
            self._take(line)

    def _take(self, line: str) -> None:
        if match := _ADVICE.match(line):
            if all(row["text"] != match[2] for row in self._advice):  # a resumed run logs it again
                self._advice.append({"kind": "advice", "time": match[1], "text": match[2]})
        elif match := _ERROR.match(line):
            self._errors.append({"kind": "error", "time": match[1], "text": match[2][:500]})
