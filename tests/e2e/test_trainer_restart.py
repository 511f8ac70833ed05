"""A trainer rank that dies or hangs is replaced, and the run ends as if nothing had happened, bit for bit."""

import json
import os
import subprocess
import sys

import pytest
from loop_helpers import ROOT, flags, make_world, series
from patience import PATIENCE_S

from slime.cli.inspect.status import status_main
from slime.record import RECORD_FILE
from slime.record.audit import audit
from slime.utils.files.run_file import read_run
from slime.utils.machine import shm
from tests.crash.chains import MODES, metric_names, same, weights_of

# The fast test of it is the fully asynchronous chain of tests/crash, which loses its trainer, too.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROLLOUTS = 5
SMALL = {
    "num_rollout": ROLLOUTS,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 2,
    "global_batch_size": 4,
    "rollout_max_response_len": 6,
    "deterministic_mode": True,
    "save_interval": 2,
    "skip_preflight": ["reward", "lengths", "machine"],
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("restarts"))


def start(world, run, traps=(), mode="train.py", **changes):
    """The exit code, and what it said."""
    values = {**SMALL, "save": world / f"{run}-ckpt", **MODES[mode], **changes}
    script = values.pop("script")
    traps = [{"note": str(world / f"{run}.struck-{i}"), **trap} for i, trap in enumerate(traps)]
    first = [sys.executable, str(ROOT / "tests" / "support" / "trapped_rank.py"), json.dumps(traps), script]
    done = subprocess.run(
        [*first, *flags(world, run, **values)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 4,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        check=False,
    )
    struck = [(world / f"{run}.struck-{i}").exists() for i in range(len(traps))]
    return done.returncode, done.stdout + done.stderr, struck


def assert_same_end(world, run, reference):
    names = metric_names(world, reference)
    assert names == metric_names(world, run)
    for name in names:
        assert same(series(world, run, name), series(world, reference, name)), name
    assert weights_of(world / f"{run}-ckpt") == weights_of(world / f"{reference}-ckpt")
    ours, theirs = (audit(world / name / RECORD_FILE, finished=True) for name in (run, reference))
    assert ours.violations == []
    assert (ours.digest, ours.steps) == (theirs.digest, theirs.steps)


TRAPS = [
    {"point": "push", "nth": 1},  # the first one: there is no checkpoint yet
    {"point": "backward", "nth": 1},
    {"point": "optimizer", "nth": 3},
    {"point": "checkpoint", "nth": 2},
]


def check_mode(world, mode, traps=TRAPS, *, tag="", **changes):
    name = f"{mode}{tag}".replace(" ", "-")
    code, said, _ = start(world, f"calm-{name}", mode=mode, **changes)
    assert code == 0, said[-4000:]
    code, said, struck = start(world, f"struck-{name}", traps, mode, **changes)
    assert code == 0, said[-6000:]
    assert struck == [True] * len(traps)
    assert_same_end(world, f"struck-{name}", f"calm-{name}")
    return said


def test_a_trainer_that_is_killed_four_times_changes_nothing(world, capsys):
    said = check_mode(world, "train.py")
    restarts = read_run(world / "struck-train.py").last.restarts
    assert [r["begins_from"] for r in restarts[:2]] == ["its initial weights"] * 2
    assert all("trainer-0 was killed by signal 9" in r["cause"] for r in restarts)
    assert len(restarts) == len(TRAPS) and f"trainer restarted {len(TRAPS)} times" in said  # the last lines
    assert "advice: the trainer was lost" in said
    status_main([str(world / "struck-train.py")])
    assert f"trainer restarted {len(TRAPS)} times" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["train_async.py", "fully asynchronous"])
def test_so_it_is_in_the_asynchronous_loops(world, mode):
    check_mode(world, mode)


@pytest.mark.megatron
@pytest.mark.parametrize("peer_copies", [0, 1])
def test_so_it_is_with_megatrons_tensor_parallel_ranks(world, peer_copies):
    pytest.importorskip("megatron.core", reason="Megatron is an extra: make test-megatron installs it")
    traps = [{"point": "push", "nth": 2}, {"point": "megatron's optimizer", "nth": 3, "rank": 1}]
    more = {"peer_copies": peer_copies, "save_interval": 3}
    check_mode(world, "Megatron, two tensor-parallel ranks", traps, tag=f"-{peer_copies}", **more)


def test_one_of_two_ranks_that_stops_is_replaced_with_the_other(world):
    two = {"actor_num_gpus_per_node": 2, "timeouts": "worker-silence=6"}
    code, said, _ = start(world, "calm-two", **two)
    assert code == 0, said[-4000:]
    traps = [{"point": "optimizer", "nth": 2, "rank": 1, "how": "stop"}, {"point": "backward", "nth": 3}]
    code, said, struck = start(world, "struck-two", traps, **two)
    assert code == 0 and struck == [True, True], said[-6000:]
    assert_same_end(world, "struck-two", "calm-two")


def test_with_peer_copies_a_lost_rank_costs_one_step_bit_for_bit(world):
    two = {"actor_num_gpus_per_node": 2, "save_interval": 100}
    code, said, _ = start(world, "calm-copies", **two)
    assert code == 0, said[-4000:]
    # In the second step; then, as new processes count anew, while the copy of the fourth is half written.
    traps = [{"point": "optimizer", "nth": 2, "rank": 1}, {"point": "checkpoint", "nth": 3, "rank": 1}]
    code, said, struck = start(world, "struck-copies", traps, **two, peer_copies=1)
    assert code == 0 and struck == [True, True], said[-6000:]
    restarts = read_run(world / "struck-copies").last.restarts
    assert [(r["step"], r["begins_from"]) for r in restarts] == [
        (2, "its state after step 1"),
        (4, "its state after step 3"),
    ]
    assert_same_end(world, "struck-copies", "calm-copies")
    assert "-state-" not in " ".join(shm.list_segments("slime"))  # no other test makes copies


@pytest.mark.parametrize("how", ["cut", "flip"])
def test_a_damaged_copy_is_named_and_the_state_before_it_taken(world, how):
    sizes = {"save_interval": 2, "num_rollout": 4}
    code, said, _ = start(world, f"whole-{how}", **sizes)
    assert code == 0, said[-4000:]
    traps = [{"point": "optimizer", "nth": 4, "how": f"{how} copies"}]  # of step 3; step 2 is on disk
    code, said, struck = start(world, f"hurt-{how}", traps, **sizes, peer_copies=1)
    assert code == 0 and struck == [True], said[-6000:]
    assert "its state after step 3 cannot be read (the copy in memory of step 3 is damaged: " in said
    assert "the trainer starts from its state after step 2 instead" in said
    assert_same_end(world, f"hurt-{how}", f"whole-{how}")


def test_checkpoints_that_are_written_meanwhile_are_written_again(world):
    code, said, _ = start(world, "calm-late", async_save=True)
    assert code == 0, said[-4000:]
    traps = [{"point": "checksums", "nth": n} for n in (1, 3)]
    code, said, struck = start(world, "struck-late", traps, async_save=True)
    assert code == 0 and all(struck), said[-6000:]
    assert_same_end(world, "struck-late", "calm-late")


def test_a_step_that_was_lost_is_taken_again(tmp_path):
    world = make_world(tmp_path)
    check_mode(world, "train.py", [{"point": "optimizer", "nth": 2}], num_rollout=2)


def test_a_loss_that_comes_again_ends_the_run_with_all_causes(world):
    traps = [{"point": "backward", "nth": 1}, {"point": "optimizer", "nth": 1}]
    code, said, _ = start(world, "ended", traps, save=None, save_interval=None, max_restarts=1)
    assert code == 1
    assert "the trainer was lost 2 times and made no new step in between (--max-restarts 1): step 1: " in said
    assert "; then step 1: trainer-0 was killed by signal 9" in said and "Traceback" not in said


def test_a_mistake_in_the_users_code_is_not_tried_again(world):
    traps = [{"point": "backward", "nth": 1, "how": "raise"}]
    code, said, _ = start(world, "mistake", traps, save=None, save_interval=None)
    assert code != 0 and "a mistake in a loss" in said and "starts again" not in said
    assert (world / "mistake.struck-0").read_text() == "x"
