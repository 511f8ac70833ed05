"""A pause lasts until somebody resumes the run: its length is shown, and no step is charged for it."""

import types

from slime.cluster import cluster as cluster_module
from slime.cluster.cluster import Requests
from slime.cluster.driver_spans import Timeline
from slime.liveness import phases, waits
from slime.record.actions import ActionRow


class Scripted(Requests):
    """A fake: somebody asks for these actions, one batch at each look."""

    def __init__(self, batches):
        super().__init__(None)
        self.batches = list(batches)

    def _asked(self):
        return self.batches.pop(0) if self.batches else []

    def _reply(self, row, state, rollout_id, text):
        pass


def row(name):
    return ActionRow(1, 0.0, name, None, "test", "asked", None, None, None)


def test_a_pause_is_one_wait_and_its_seconds_are_no_part_of_a_step(monkeypatch):
    seen, left_out, clock, ended = [], [], [100.0], []

    def sleep(seconds):  # a fake: time passes at once
        clock[0] += 60.0
        seen.append([(wait.name, round(wait.age_s)) for wait in phases.active()])
        ended.append(waits.num_ended())

    monkeypatch.setattr(cluster_module.time, "sleep", sleep)
    monkeypatch.setattr(cluster_module.time, "monotonic", lambda: clock[0])
    cluster = types.SimpleNamespace(
        timeline=Timeline(None),
        trainer=types.SimpleNamespace(check=lambda rollout_id: None),
        log=types.SimpleNamespace(leave_out=left_out.append),
    )
    requests = Scripted([[row("pause")], [], [], [row("resume")]])
    assert requests.handle(cluster, 3, None, None) is None
    assert seen == [[("paused", 60)], [("paused", 120)], [("paused", 180)]]
    assert left_out == [180.0] and not phases.active()
    assert ended == sorted(set(ended))  # something ends at each look: a run that is paused does not hang
