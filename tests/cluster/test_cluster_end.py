"""How a run ends: everything is closed, and nothing that went wrong on the way out is kept quiet."""

import contextlib
from types import SimpleNamespace

import pytest

from slime.cluster.cluster import Cluster


class Part:
    """Stands for a stage, a runtime, a janitor and a tracker at once; what is in `broken` raises."""

    def __init__(self, broken=()):
        self.called, self.broken = [], broken

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.called.append(name)
            if name in self.broken:
                raise OSError(28, "No space left on device")
            return {}

        return call


def cluster_of(part, staged=None):
    cluster = Cluster.__new__(Cluster)
    cluster._args = SimpleNamespace(save="no-such-folder", keep_last_n=None)
    cluster._folders = contextlib.ExitStack()
    cluster._run = SimpleNamespace(shm_prefix="slime-none", close=lambda cause: None)
    cluster._staged = staged
    cluster._trainer = cluster._rollout = cluster._runtime = cluster._janitor = cluster._tracker = part
    return cluster


STAGED = SimpleNamespace(rollout_id=3)


def test_a_last_checkpoint_that_fails_in_the_background_fails_the_run():
    part = Part(broken=("finish_save",))
    with pytest.raises(Exception, match="No space left on device"), cluster_of(part, STAGED):
        pass
    assert part.called[-3:] == ["close", "dismiss", "finish"], "everything else is closed all the same"


@pytest.mark.parametrize("broken", ["close", "dismiss", "finish"])
def test_a_clean_end_suppresses_nothing(broken):
    with pytest.raises(OSError, match="No space left"), cluster_of(Part(broken=(broken,))):
        pass


def test_the_cause_that_ended_the_run_is_not_replaced_by_what_breaks_while_closing():
    part = Part(broken=("finish_save", "close", "finish"))
    with pytest.raises(KeyError, match="first"), cluster_of(part, STAGED):
        raise KeyError("first")
    assert {"close", "dismiss", "finish"} <= set(part.called)
