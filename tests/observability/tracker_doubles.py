"""Services for tests: one that keeps what it gets in a file, and ones that fail or hang."""

import json
import time


class Keeping:
    """Appends every call to RUN/kept.jsonl."""

    def __init__(self, run):
        self._file = run.folder / "kept.jsonl"
        self._note("open", run.id)

    def _note(self, *what):
        with self._file.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def scalars(self, values, step_key, step, time):
        self._note("scalars", values, step_key, step)

    def table(self, table):
        self._note("table", table.name, table.step, table.rows)

    def flush(self):
        self._note("flush")

    def finish(self):
        self._note("finish")


class Absent(Keeping):
    def __init__(self, run):
        raise ConnectionError("no route to the tracker")


class Picky(Keeping):
    """Refuses reports with one name, and is otherwise well."""

    def scalars(self, values, step_key, step, time):
        if "bad/name" in values:
            raise ValueError("bad/name is no name")
        super().scalars(values, step_key, step, time)


class Hanging(Keeping):
    def scalars(self, values, step_key, step, time_):
        self._note("hangs")
        while True:
            time.sleep(60)
