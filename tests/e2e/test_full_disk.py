"""A disk that fills up under a whole run: one message, nothing damaged, and the same command goes on."""

import os
import re

import pytest
from loop_helpers import make_world, run_train, series
from small_disk import mounted

from slime.record import RECORD_FILE
from slime.record.audit import audit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROLLOUTS = 3
SMALL = {
    "num_rollout": ROLLOUTS,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 2,
    "global_batch_size": 4,
    "rollout_max_response_len": 6,
    "save_interval": 1,
    "eval_interval": 1,
    "skip_preflight": ["reward", "lengths", "machine"],
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = make_world(tmp_path_factory.mktemp("full"))
    rows = (world / "prompts.jsonl").read_text().splitlines(keepends=True)
    (world / "eval.jsonl").write_text("".join(rows[:2]))
    return world


# What lies on the small disk, and how much room it has: too little to start; for a step; for no rollout of
# --save-debug-rollout-data.
@pytest.mark.parametrize(
    "on_it, kib",
    [("run ckpt dump", 40), ("run ckpt", 2000), ("dump", 12)],
)
def test_a_full_disk_is_one_message_and_the_same_command_goes_on(world, on_it, kib):
    name = f"{on_it}-{kib}".replace(" ", "-")
    with mounted(world / f"disk-{name}", "size=64m") as disk:
        places = {what: (disk if what in on_it.split() else world) / name for what in ("run", "ckpt", "dump")}
        flags = {
            **SMALL,
            "run_dir": places["run"],
            "save": f"{places['ckpt']}-ckpt",
            "save_debug_rollout_data": f"{places['dump']}-dump/{{rollout_id}}.pt",
            "eval_prompt_data": ["held", world / "eval.jsonl"],
        }
        room = os.statvfs(disk)
        (disk / "filler").write_bytes(bytes(room.f_bavail * room.f_frsize - kib * 1024))
        full = run_train(world, name, check=False, **flags)
        assert full.returncode in (1, 2), full.stderr[-3000:]
        assert full.stderr.count("error: ") == 1 and "Traceback" not in full.stderr, full.stderr[-3000:]
        told = re.compile(r"No space left on device|the disk is full|MiB free, it needs")
        assert told.search(full.stderr), full.stderr[-3000:]
        (disk / "filler").unlink()
        run_train(world, name, **flags)
        found = audit(places["run"] / RECORD_FILE, finished=True)
        assert [v for v in found.violations if "could not be written" not in v] == []
        assert found.steps == list(range(ROLLOUTS)) and found.committed == ROLLOUTS - 1
        assert len(series(disk if "run" in on_it.split() else world, name, "train/loss")) == ROLLOUTS
