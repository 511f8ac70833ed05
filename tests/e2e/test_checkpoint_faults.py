"""Checkpoints under attack in whole runs: flipped bits, full disks, a second run in the same folders."""

import json
import shutil
from pathlib import Path

import pytest
from loop_helpers import make_world, run_train, series, start_train, wait_for
from small_disk import mounted

from slime.utils.files.step_folders import by_content, find_step, read_step

pytestmark = pytest.mark.timeout(1200)

LAST = 2
TRAINERS = [
    "fsdp",
    pytest.param("megatron", marks=[pytest.mark.megatron, pytest.mark.slow]),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A live run of three rollouts, recorded; what follows replays it without engines."""
    folder = make_world(tmp_path_factory.mktemp("checkpoints"))
    run_train(
        folder, "live", num_rollout=LAST + 1, save_debug_rollout_data=f"{folder}/dump/{{rollout_id}}.pt"
    )
    return folder


def replay(world, run, **changes):
    values = {
        "load_debug_rollout_data": f"{world}/dump/{{rollout_id}}.pt",
        "num_rollout": LAST + 1,
        "timeout": 400,
    }
    return run_train(world, run, **{**values, **changes})


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


HARMS = (flip, truncate, Path.unlink)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_flipped_bit_is_named_and_the_run_goes_on_from_the_checkpoint_before(world, trainer):
    if trainer == "megatron":
        pytest.importorskip("megatron.core")
    save = world / f"{trainer}-ckpt"
    flags = {"train_backend": trainer, "save": save, "load": save, "save_interval": 1}
    flags["save_hf"] = f"{save}/step_{{rollout_id:07d}}/hf"
    replay(world, trainer, **flags)
    whole = series(world, trainer, "train/grad_norm")
    last = find_step(save, damage_of=by_content)
    assert last.manifest.rollout_id == LAST and "hf/model.safetensors" in last.manifest.files
    for name in sorted(path.relative_to(last.path) for path in last.path.rglob("*") if path.is_file()):
        before = (last.path / name).read_bytes()
        for harm in HARMS:
            harm(last.path / name)
            assert find_step(save, damage_of=by_content).manifest.rollout_id == LAST - 1, (name, harm)
            (last.path / name).write_bytes(before)
    [weights] = [name for name in last.manifest.files if name.endswith("__0_0.distcp")]
    flip(last.path / weights)
    ended = replay(world, trainer, **flags)
    assert f"step_{LAST:07d} is damaged: {weights}: its content has changed" in ended.stderr
    assert f"Resuming from the checkpoint before it: {save}/step_{LAST - 1:07d}" in ended.stderr
    assert series(world, trainer, "train/grad_norm") == whole, "the step was taken again, bit for bit"
    assert by_content(read_step(last.path)) == [] and (save / f"{last.path.name}.aside").is_dir()
    flip(last.path / weights)
    chosen = replay(world, f"{trainer}-chosen", check=False, load=save, ckpt_step=LAST, train_backend=trainer)
    assert chosen.returncode == 2 and f"or try --ckpt-step {LAST - 1}, the one before it" in chosen.stderr


@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_disk_that_fills_up_in_mid_write_is_named_and_the_run_fails(world, trainer, background):
    name = f"full-{trainer}-{background}"
    with mounted(world / name / "disk", "size=1200k") as disk:
        flags = {"save": disk / "ckpt", "train_backend": trainer, "async_save": background}
        ended = replay(world, name, check=False, num_rollout=1, **flags)
        assert ended.returncode == 1, ended.stderr[-3000:]
        assert (
            "the checkpoint of rollout 0 was not written: the disk is full (No space left on device)"
            in ended.stderr
        )
        assert list((disk / "ckpt").iterdir()) == [], "what there was of it gave its room back"
    assert json.loads((world / name / "run.json").read_text())["exit"].startswith("RunStopped: --save")


def test_a_second_run_in_the_same_folders_is_refused_while_the_first_one_runs_and_after(world):
    folders = {"save": world / "one-ckpt", "load": world / "one-ckpt"}
    first = start_train(world, "one", num_rollout=100_000, save_interval=1, **folders)
    try:
        wait_for(lambda: len(series(world, "one", "train/loss")) > 1, first, 600)
        second = run_train(world, "two", check=False, **folders)
        assert second.returncode == 2 and f"is in use by process {first.pid} on" in second.stderr
        assert not (world / "two").exists()
        second = run_train(world, "one", check=False)
        assert (
            second.returncode == 2
            and f"--run-dir {world}/one is in use by process {first.pid}" in second.stderr
        )
        assert second.stdout == "", "what the first one logs there is not shown as the second one's"
    finally:
        first.kill()
        first.wait()
    before = (world / "one" / "metrics.jsonl").read_bytes()
    new = run_train(world, "one", check=False)
    assert new.returncode == 2 and f"--run-dir {world}/one belongs to run" in new.stderr
    assert (world / "one" / "metrics.jsonl").read_bytes() == before and not (
        world / "one" / "error.txt"
    ).exists()
    new = run_train(world, "three", check=False, save=folders["save"])
    assert new.returncode == 2 and "holds checkpoints of an earlier run" in new.stderr
    done = find_step(folders["save"]).manifest.rollout_id
    shutil.copy(world / "one" / "run.json", world / "one-before.json")
    run_train(world, "one", num_rollout=done + 2, **folders)
    run = json.loads((world / "one" / "run.json").read_text())
    assert run["id"] == json.loads((world / "one-before.json").read_text())["id"] and len(run["earlier"]) == 1
    lines = [json.loads(line) for line in (world / "one" / "metrics.jsonl").read_text().splitlines()]
    assert {line["run"] for line in lines} == {run["id"]} and {line["start"] for line in lines} == {1, 2}
