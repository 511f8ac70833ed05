"""How a run ends: everything is closed, and nothing that went wrong on the way out is kept quiet."""

import contextlib
from types import SimpleNamespace

import pytest

from slime.cluster.checkpoints.saving import Saver
from slime.cluster.closing import Closing
from slime.cluster.trainer import Trainer
from slime.cluster.training.train_group import Ranks
from slime.runtime.base import Ready


class Part:
    """Stands for a rank, a runtime, a janitor and a tracker at once; what is in `broken` raises."""

    def __init__(self, broken=()):
        self.called, self.broken = [], broken

    def __getattr__(self, name):
        def act():
            self.called.append(name)
            if name in self.broken:
                raise OSError(28, "No space left on device")
            return {}

        return act

    def call(self, method, *args, **kwargs):
        return Ready(getattr(self, method.__name__)())


@contextlib.contextmanager
def run_of(part, tmp_path, staged=None):
    """A run of one rank, in the order of `open_cluster`."""
    ranks = Ranks([part])
    saver = Saver(tmp_path, None, None, ranks, part)
    saver.staged = staged
    with Closing() as closing:
        for step in (part.finish, part.dismiss, part.end):
            closing.add(step)
        yield
        recovery = SimpleNamespace(run=lambda rollout_id, work, **options: work(**options), is_on=False)
        others = dict.fromkeys(("args", "run", "residency", "timeline", "replay", "weight_push"))
        group = SimpleNamespace(ranks=ranks)
        Trainer(**others, group=group, recovery=recovery, saver=saver).finish(3)


STAGED = SimpleNamespace(rollout_id=3)


def test_a_last_checkpoint_that_fails_in_the_background_fails_the_run(tmp_path):
    part = Part(broken=("finish_save",))
    with pytest.raises(Exception, match="the disk is full"), run_of(part, tmp_path, STAGED):
        pass
    assert part.called == ["finish_save", "close", "end", "dismiss", "finish"], (
        "all else is closed all the same"
    )


@pytest.mark.parametrize("broken", ["close", "end", "dismiss", "finish"])
def test_a_clean_end_suppresses_nothing(broken, tmp_path):
    with pytest.raises(OSError, match="No space left"), run_of(Part(broken=(broken,)), tmp_path):
        pass


def test_the_cause_that_ended_the_run_is_not_replaced_by_what_breaks_while_closing(tmp_path, caplog):
    part = Part(broken=("end", "finish"))
    with pytest.raises(KeyError, match="first"), run_of(part, tmp_path, STAGED):
        raise KeyError("first")
    assert part.called == ["end", "dismiss", "finish"]
    assert caplog.text.count("while the run ended: OSError") == 2


def test_a_part_that_could_not_start_does_not_say_why_a_second_time(tmp_path, caplog):
    cause = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space left"), run_of(Part(broken=("end",)), tmp_path):
        raise cause
    assert "while the run ended" not in caplog.text
