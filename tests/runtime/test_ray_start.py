"""A Ray cluster that does not start, or is not there: `ray.init` is a fake that fails."""

import pytest

from slime.utils.errors import RunStopped


@pytest.fixture(scope="module")
def on_ray():
    """Not imported while tests are collected: Ray takes seconds."""
    return pytest.importorskip("slime.runtime.on_ray")


@pytest.fixture
def failing(on_ray, monkeypatch):
    """Makes the first starts fail; gives how often Ray was asked to start."""
    asked = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(on_ray.ray, "shutdown", lambda: None)

    def fail_first(count):
        def fake_init(**kwargs):
            asked.append(kwargs)
            if len(asked) <= count:
                raise Exception("The current node timed out during startup.")

        monkeypatch.setattr(on_ray.ray, "init", fake_init)
        return asked

    return fail_first


def test_a_node_that_was_too_slow_is_started_again(on_ray, failing, caplog):
    asked = failing(2)
    on_ray._join_or_start()
    assert len(asked) == 3 and "timed out during startup" in caplog.text


def test_the_reason_is_told_when_it_never_starts(on_ray, failing):
    asked = failing(100)
    with pytest.raises(RunStopped, match="Ray did not start: The current node timed out"):
        on_ray._join_or_start()
    assert len(asked) == on_ray._STARTS


def test_a_cluster_that_is_not_there_is_named_and_not_asked_again(on_ray, failing, monkeypatch):
    asked = failing(100)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    with pytest.raises(RunStopped, match=r"no Ray cluster answers at RAY_ADDRESS=10\.0\.0\.9:6379"):
        on_ray._join_or_start()
    assert len(asked) == 1
