"""Reads what a run has logged so far (`metrics.jsonl`), while it runs and after it has ended."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime.cli.quickstart.data import GREEDY, SAMPLED

LOSS = "train/loss"
REWARD = "rollout/raw_reward"
NUM_SAMPLES = "rollout/num_samples"
WEIGHT_VERSION = "rollout/weight_version"
ACCURACY = {"greedy": f"eval/{GREEDY}", "sampled": f"eval/{SAMPLED}"}
POLL_S = 0.2

Record = dict[str, Any]


class MetricsReader:
    """Hands out the records of a growing file, each once;
    a line still being written is left for the next time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new_records(self) -> list[Record]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [json.loads(line) for line in complete.splitlines() if line.strip()]


class MetricsFollower:
    """Calls `on_record` for every record while a `with` block
    runs; all records have been seen when the block ends.
    """

    def __init__(self, path: Path, on_record: Callable[[Record], None]) -> None:
        self._reader = MetricsReader(path)
        self._on_record = on_record
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="quickstart-metrics", daemon=True)

    def __enter__(self) -> "MetricsFollower":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()
        self._pass_on()

    def _follow(self) -> None:
        while not self._ended.wait(POLL_S):
            self._pass_on()

    def _pass_on(self) -> None:
        for record in self._reader.new_records():
            self._on_record(record)


def values_by_step(records: list[Record], key: str) -> dict[int, float]:
    """One metric over the steps at which it was logged; of a step logged twice, the later value counts."""
    return {int(record["step"]): record[key] for record in records if key in record}
