"""Sends errors and warnings of a worker to the driver with its heartbeats, where they are logged.

Each worker writes its log where it runs, but people read the terminal, `driver.log` and `slime status`.
Reports that a worker passes on from its own workers keep their names.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_MOST = 100  # kept between two signs of life; older ones are in the worker's log
_PASSED_ON = "passed_on"  # an attribute of log records that came from another process


@dataclass(frozen=True, slots=True)
class Report:
    """A log record in the form that is sent."""

    logger: str
    level: int
    text: str
    place: tuple[str, int]  # file and line
    host: str
    named: bool  # the text names the worker that it came from


class Reporter(logging.Handler):
    """Keeps errors of this process, and warnings of slime's own code, until the next heartbeat."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: deque[Report] = deque(maxlen=_MOST)
        self._host = socket.gethostname()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.ERROR and not record.name.startswith("slime"):
            return
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            text += f" ({type(error).__name__}: {error})"
        place = (record.pathname, record.lineno)
        named = hasattr(record, _PASSED_ON)
        self._kept.append(Report(record.name, record.levelno, text, place, self._host, named))

    def drain(self) -> list[Report]:
        """Return the reports since the last call."""
        return [self._kept.popleft() for _ in range(len(self._kept))]


_reporter: Reporter | None = None


def keep_reports() -> None:
    """Start to keep reports in this process, which is a worker."""
    global _reporter
    if _reporter is None:
        _reporter = Reporter()
        logging.getLogger().addHandler(_reporter)


def drain_reports() -> list[Report]:
    """Return the reports of this process since the last call; none if it is no worker."""
    return _reporter.drain() if _reporter is not None else []


def log_reports(worker: str, reports: Sequence[Report], *, warnings: bool) -> None:
    """Log what a worker reported, under its name and host. `warnings` False: errors alone."""
    for report in reports:
        if report.level < logging.ERROR and not warnings:
            continue
        elsewhere = f" on {report.host}" if report.host != socket.gethostname() else ""
        text = report.text if report.named else f"{worker}{elsewhere}: {report.text}"
        logger = logging.getLogger(report.logger)
        record = logger.makeRecord(
            report.logger, report.level, *report.place, text, (), None, extra={_PASSED_ON: True}
        )
        logger.handle(record)
