"""The checkpoint transaction: what is found is whole, damage is named, and no kill leaves half of one."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from slime.cluster.checkpoints.checkpoint import (
    ROLLOUT,
    files_of_rank,
    read_state,
    resolve_load,
    stage_checkpoint,
    write_checkpoint,
    write_state,
)
from slime.utils.errors import RunStopped
from slime.utils.files.checksums import find_damage, record_files
from slime.utils.files.step_folders import (
    Manifest,
    by_content,
    check_trainer_folder,
    find_step,
    read_step,
    step_folders,
)


def trainer_files(path):
    path.mkdir()
    for name in ("__0_0.distcp", "__1_0.distcp", "rng_0.pt", "rng_1.pt", ".metadata", "trainer.json"):
        (path / name).write_bytes(name.encode() * 100)
    (path / "critic").mkdir()
    (path / "critic" / "__1_0.distcp").write_bytes(b"critic")


def write(folder, rollout_id, state=None, trainer=trainer_files):
    return write_checkpoint(folder, Manifest(rollout_id, "run", rollout_id + 1), state or {}, trainer, 0)


def stage(folder, rollout_id):
    staged = stage_checkpoint(folder, Manifest(rollout_id, "run", rollout_id + 1), trainer_files, 0)
    write_state({}, staged.staging / ROLLOUT)
    return staged, record_files(staged.staging, files_of_rank(staged.staging, 0, 1))


def test_the_latest_complete_checkpoint_is_found(tmp_path):
    write(tmp_path, 3, {"offset": 7, "buffer": [{"tokens": [1, 2]}]})
    write(tmp_path, 11)
    assert find_step(tmp_path).manifest.rollout_id == 11
    assert read_state(find_step(tmp_path, 3).path / ROLLOUT) == {"offset": 7, "buffer": [{"tokens": [1, 2]}]}


def test_a_data_source_that_keeps_its_own_state_leaves_none(tmp_path):
    checkpoint = write_checkpoint(tmp_path, Manifest(0, "run", 1), None, trainer_files, 0)
    assert read_state(checkpoint.path / ROLLOUT) is None


def test_arrays_in_the_rollout_state_come_back_and_other_objects_are_refused_when_saved(tmp_path):
    pixels = np.arange(6, dtype=np.uint8).reshape(2, 3)
    state = {"buffer": [{"experts": np.ones(3, np.int32), "pixels": pixels, "score": np.float32(2)}]}
    found = read_state(write(tmp_path, 0, state).path / ROLLOUT)["buffer"][0]
    assert (found["pixels"] == pixels).all() and found["score"] == 2
    with pytest.raises(
        ValueError,
        match=r"rollout.msgpack cannot hold a \w*Path at \['buffer'\]\[0\]\['metadata'\]\['file'\]",
    ):
        write(tmp_path, 1, {"buffer": [{"metadata": {"file": Path("x")}}]})


def test_an_interrupted_checkpoint_is_never_read_and_later_removed(tmp_path):
    def interrupted(path):
        path.mkdir()
        torch.save({}, path / "half.pt")
        raise KeyboardInterrupt

    write(tmp_path, 1)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 2, trainer=interrupted)
    assert find_step(tmp_path).manifest.rollout_id == 1
    write(tmp_path, 3)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_checkpoint_that_ranks_still_write_is_not_found(tmp_path):
    write(tmp_path, 1)
    staged, files = stage(tmp_path, 2)
    assert find_step(tmp_path).manifest.rollout_id == 1
    assert staged.complete(files).path == tmp_path / "step_0000002"
    assert find_step(tmp_path).manifest.rollout_id == 2


def test_a_checkpoint_without_the_files_of_a_rank_on_another_host_is_never_renamed(tmp_path):
    staged, files = stage(tmp_path, 4)
    (staged.staging / "trainer" / "__1_0.distcp").unlink()  # that rank has written to a folder of its own
    with pytest.raises(
        RunStopped, match=r"rollout 4 is incomplete .*trainer/__1_0.distcp: the file is missing"
    ):
        staged.complete(files)
    assert find_step(tmp_path) is None and not staged.final.exists()


def test_only_the_last_checkpoints_stay(tmp_path):
    for rollout_id in (1, 2, 3):
        write(tmp_path, rollout_id)
    staged, files = stage(tmp_path, 4)
    assert len(list(tmp_path.iterdir())) == 4, "older ones go only when the new one is complete"
    staged.complete(files, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_0000003", "step_0000004"]


@pytest.mark.parametrize("harm", ["truncated", "a file is missing", "its manifest is missing"])
def test_a_damaged_checkpoint_does_not_count_among_those_that_stay(tmp_path, caplog, harm):
    for rollout_id in (1, 2, 3):
        write(tmp_path, rollout_id)
    hit = tmp_path / "step_0000003" / ("manifest.json" if "manifest" in harm else "trainer/__1_0.distcp")
    hit.write_bytes(hit.read_bytes()[:-1]) if harm == "truncated" else hit.unlink()
    staged, files = stage(tmp_path, 4)
    staged.complete(files, keep_last=2)
    assert sorted(step_folders(tmp_path)) == [2, 3, 4], "two that are whole, and the damaged one between"
    assert "step_0000003 is damaged" in caplog.text and hit.name in caplog.text
    staged, files = stage(tmp_path, 5)
    staged.complete(files, keep_last=2)
    assert sorted(step_folders(tmp_path)) == [4, 5]


def test_a_run_that_goes_on_from_an_earlier_step_keeps_its_own_checkpoint_and_sets_later_ones_aside(tmp_path):
    for rollout_id in (1, 2, 3):
        write(tmp_path, rollout_id)
    staged, files = stage(tmp_path, 2)
    staged.complete(files, keep_last=1)
    assert find_step(tmp_path).manifest.rollout_id == 2
    aside = sorted(path.name for path in tmp_path.glob("*.aside"))
    assert aside == ["step_0000002.aside", "step_0000003.aside"]
    write(tmp_path, 2)
    assert (tmp_path / "step_0000002.2.aside").is_dir(), "what was set aside before stays"


def test_each_rank_records_the_files_it_wrote_and_together_they_are_all(tmp_path):
    staged, files = stage(tmp_path, 0)
    shares = [files_of_rank(staged.staging, rank, 2) for rank in range(2)]
    assert sorted(shares[1]) == ["trainer/__1_0.distcp", "trainer/critic/__1_0.distcp", "trainer/rng_1.pt"]
    assert sorted(shares[0] + shares[1]) == sorted(files)


def test_every_file_is_in_the_manifest(tmp_path):
    checkpoint = write(tmp_path, 0)
    there = {str(path.relative_to(checkpoint.path)) for path in checkpoint.path.rglob("*") if path.is_file()}
    assert read_step(checkpoint.path).manifest.files.keys() == there - {"manifest.json"}


# ---- damage ------------------------------------------------------------------------------------------------


def flip(path, position=None, bit=3):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 1 << bit
    path.write_bytes(data)


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_flipped_bit_in_any_file_is_named_and_the_checkpoint_before_is_used(tmp_path, caplog):
    write(tmp_path, 0)
    last = write(tmp_path, 1).path
    for name in names(last):
        flip(last / name)
        caplog.clear()
        found = resolve_load(str(tmp_path), str(tmp_path), None, damage_of=by_content)
        assert found.manifest.rollout_id == 0, name
        assert "step_0000001 is damaged" in caplog.text and name in caplog.text
        assert "step_0000000" in caplog.text, "what is used instead is told"
        flip(last / name)
    assert find_step(tmp_path, damage_of=by_content).manifest.rollout_id == 1


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path):
    path = write(tmp_path, 0).path
    whole = read_step(path)
    for position in range(len((path / "manifest.json").read_bytes())):
        flip(path / "manifest.json", position, bit=position % 8)
        try:
            assert read_step(path) == whole, position
        except ValueError as error:
            assert "manifest" in str(error) or "format" in str(error)
        flip(path / "manifest.json", position, bit=position % 8)


@pytest.mark.parametrize("check", ["sizes", "content"])
def test_a_truncated_grown_or_missing_file_is_noticed_by_its_size(tmp_path, caplog, check):
    write(tmp_path, 0)
    last = write(tmp_path, 1).path
    file = last / "trainer" / "__0_0.distcp"
    kwargs = {"damage_of": by_content} if check == "content" else {}
    for content, why in (
        (b"", "0 bytes instead of 1200"),
        (file.read_bytes() + b"x", "1201 bytes"),
        (None, "missing"),
    ):
        file.unlink() if content is None else file.write_bytes(content)
        caplog.clear()
        assert find_step(tmp_path, **kwargs).manifest.rollout_id == 0
        assert f"trainer/__0_0.distcp: {why}" in caplog.text or why in caplog.text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "manifest.json: the file is missing"),
        (b"", "manifest.json: not a manifest"),
        (b"\xff\xfe\x00garbage", "manifest.json: not a manifest"),
        (b"[" * 100_000, "manifest.json: not a manifest"),
        (b"[1, 2]", "manifest.json: not a manifest"),
        (b"{}", "KeyError: 'format_version'"),
        (b'{"format_version": "2"}', "manifest.json: not a manifest"),
        (b'{"format_version": 2, "rollout_id": 1}', "its checksum does not fit"),
        (b'{"format_version": 1, "rollout_id": 1, "run_id": "x"}', "KeyError: 'num_pushes'"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_named(tmp_path, content, why):
    write(tmp_path, 0)
    manifest = write(tmp_path, 1).path / "manifest.json"
    manifest.unlink() if content is None else manifest.write_bytes(content)
    assert find_step(tmp_path).manifest.rollout_id == 0
    with pytest.raises(
        ValueError, match=f"step_0000001 is damaged: .*{why}.* or try --ckpt-step 0, the one before it"
    ):
        find_step(tmp_path, 1)


def test_when_no_checkpoint_is_whole_all_are_named(tmp_path):
    for rollout_id in (0, 1):
        flip(write(tmp_path, rollout_id).path / ROLLOUT)
    with pytest.raises(
        ValueError, match=r"no intact checkpoint:\n.*step_0000001 is damaged.*\n.*step_0000000 is"
    ):
        find_step(tmp_path, damage_of=by_content)


@pytest.mark.parametrize("more", [{"format_version": 99}, {"format_version": 3, "shards": [1]}])
def test_a_newer_format_is_refused_with_both_numbers_and_the_one_before_is_offered(tmp_path, more):
    write(tmp_path, 0)
    path = write(tmp_path, 1).path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    version = more["format_version"]
    with pytest.raises(
        ValueError, match=f"format {version}, this version of slime reads up to 2.*--ckpt-step 0"
    ):
        find_step(tmp_path)


def test_a_checkpoint_from_before_checksums_is_read_also_with_keys_that_are_not_known(tmp_path):
    path = write(tmp_path, 1).path / "manifest.json"
    path.write_text(
        json.dumps({"format_version": 1, "rollout_id": 1, "run_id": "a", "num_pushes": 2, "more": 5})
    )
    found = find_step(tmp_path, damage_of=by_content)
    assert found.manifest == Manifest(1, "a", 2, files=None)


@pytest.mark.parametrize("content", [None, b"", b"PK half", b"\x80\x05garbage"])
def test_a_rollout_state_that_cannot_be_read_is_named_where_no_checksum_found_it(tmp_path, content):
    path = write(tmp_path, 1).path / ROLLOUT
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=r"rollout\.msgpack cannot be read"):
        read_state(read_step(path.parent).path / ROLLOUT)


def test_a_missing_step_names_those_there_are(tmp_path):
    write(tmp_path, 4)
    with pytest.raises(ValueError, match=r"--ckpt-step is 5: .* rollouts 4"):
        find_step(tmp_path, 5)


def test_a_file_named_like_a_checkpoint_is_none(tmp_path):
    (tmp_path / "step_0000004").write_text("no folder")
    assert find_step(tmp_path) is None


def test_the_trainers_part_is_checked_where_it_is_read_by_itself(tmp_path):
    path = write(tmp_path, 0).path
    check_trainer_folder(path / "trainer")
    flip(path / "trainer" / "__1_0.distcp")
    with pytest.raises(
        ValueError, match=r"step_0000000 is damaged: trainer/__1_0.distcp: its content has changed"
    ):
        check_trainer_folder(path / "trainer")
    found = []
    for rank in range(3):
        try:
            check_trainer_folder(path / "trainer", share=(rank, 3))
        except ValueError:
            found.append(rank)
    assert len(found) == 1


def test_an_empty_load_folder_is_a_first_start_only_where_the_run_saves(tmp_path):
    assert resolve_load(str(tmp_path), str(tmp_path), None) is None
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        resolve_load(str(tmp_path), None, None)


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path):
    with pytest.raises(RunStopped, match="MiB free"):
        write_checkpoint(tmp_path, Manifest(0, "run", 1), {}, trainer_files, 1 << 60)
    assert list(tmp_path.iterdir()) == []


# ---- kills -------------------------------------------------------------------------------------------------


def killed_at(point, staged, files):
    """Complete in a child that is killed before the `point`-th change to the disk; whether it ended."""
    child = os.fork()
    if child == 0:
        left = point

        def counting(function):
            def call(*args, **kwargs):
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return function(*args, **kwargs)

            return call

        for module, name in (
            (Path, "rename"),
            (Path, "write_text"),
            (os, "fsync"),
            (os, "rmdir"),
            (os, "unlink"),
        ):
            setattr(module, name, counting(getattr(module, name)))
        try:
            staged.complete(files, keep_last=1)
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status == 0


def test_a_kill_at_any_point_of_completing_leaves_only_whole_checkpoints(tmp_path):
    point, done = 0, False
    while not done:
        folder = tmp_path / str(point)
        for rollout_id in (3, 4, 5):  # 5 is replaced, 3 and 4 go
            write(folder, rollout_id)
        done = killed_at(point, *stage(folder, 5))
        found = {step: by_content(read_step(path)) for step, path in step_folders(folder).items()}
        assert found and not any(found.values()), (point, found)
        point += 1
    assert point > 20, "the test counts the points"
    assert sorted(path.name for path in folder.iterdir()) == ["step_0000005", "step_0000005.aside"]


def test_large_files_are_read_in_blocks_and_any_block_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("slime.utils.files.checksums.BLOCK_BYTES", 1 << 12)
    (tmp_path / "large").write_bytes(os.urandom(5 * (1 << 12) + 7))
    records = record_files(tmp_path, ["large"])
    assert find_damage(tmp_path, records) == []
    for position in (0, 1 << 12, 5 * (1 << 12) + 6):
        flip(tmp_path / "large", position)
        assert find_damage(tmp_path, records) and not find_damage(tmp_path, records, read=False)
        flip(tmp_path / "large", position)
    data = (tmp_path / "large").read_bytes()
    (tmp_path / "large").write_bytes(data[1 << 12 : 2 << 12] + data[: 1 << 12] + data[2 << 12 :])
    assert find_damage(tmp_path, records), "blocks in another order"
