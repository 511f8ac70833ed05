"""Runs whose weights travel by process groups, from a trainer of one stage and from a pipeline of two."""

import contextlib
import re
import threading
from collections.abc import Iterator

import psutil
import pytest
from loop_helpers import make_world, run_train, series

PUSH = dict(update_weight_transport="distributed", check_weight_update_equal=True, weight_checksum_interval=1)


def check(world, run: str, num_rollout: int) -> None:
    differences = series(world, run, "train/train_rollout_logprob_abs_diff")
    assert len(differences) == num_rollout and max(differences.values()) < 1e-3, (
        "engine and trainer hold the same"
    )
    assert sum(series(world, run, "perf/engines_missed").values()) == 0
    assert sum(series(world, run, "perf/engines_evicted").values()) == 0


@contextlib.contextmanager
def listeners_seen() -> Iterator[set[str]]:
    """Addresses at which processes that are started inside listen, looked at all the time."""
    seen: set[str] = set()
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.2):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    sockets = process.net_connections(kind="inet")
                    seen.update(s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


@pytest.mark.slow
def test_one_stage_pushes_to_two_engines_and_nothing_listens_beyond_this_machine(tmp_path):
    world = make_world(tmp_path)
    with listeners_seen() as addresses:
        run_train(world, "run", num_rollout=3, rollout_num_gpus=2, actor_num_gpus_per_node=2, **PUSH)
    check(world, "run", 3)
    assert addresses == {"127.0.0.1"}


@pytest.mark.megatron
@pytest.mark.slow
def test_two_stages_push_to_one_engine(tmp_path):
    pytest.importorskip("megatron.core")
    world = make_world(tmp_path)
    layout = dict(train_backend="megatron", pipeline_model_parallel_size=2, actor_num_gpus_per_node=2)
    run_train(world, "run", num_rollout=3, **layout, **PUSH)
    check(world, "run", 3)
    for rank in range(2):
        log = (world / "run" / "logs" / f"trainer-{rank}.log").read_text()
        groups = re.findall(r"slime-pp_(\d)-\w+: this rank sends", log)
        assert groups == [str(rank)], "each stage has a group of its own, kept over all pushes"
