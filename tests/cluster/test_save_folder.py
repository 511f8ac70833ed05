"""The folder of --save: unusable ones are told at once, it is one run's alone, and a full disk is named."""

import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from patience import eventually
from small_disk import mounted

from slime.cluster.checkpoints.checkpoint import write_checkpoint
from slime.cluster.checkpoints.save_folder import (
    check_folders,
    disk_error,
    naming_disk_errors,
    naming_full_disks,
    open_model_folder,
    open_save_folder,
    prepare_folder,
)
from slime.plugins import PLUGIN_POINTS
from slime.utils.errors import RunStopped
from slime.utils.files.folder_lock import FolderLock, is_locked
from slime.utils.files.step_folders import Manifest
from slime.utils.machine import shm


def saving(folder, **changes):
    values = {
        "save": str(folder),
        "load": None,
        "finetune": False,
        "save_hf": None,
        "run_dir": str(folder.parent / "run"),
        "ckpt_step": None,
        "hf_checkpoint": None,
        "lora_rank": 0,
        "debug_rollout_only": False,
        "only_train_params_name_list": None,
        "freeze_params_name_list": None,
        "optimizer": "adam",
        "no_save_optim": False,
        **dict.fromkeys(("ref_load", "critic_load", "opd_teacher_load", "judge_rubric")),
        **dict.fromkeys(point.flag for point in PLUGIN_POINTS),
        "eval_datasets": [],
    }
    return SimpleNamespace(**{**values, **changes})


def test_a_folder_that_is_not_there_yet_is_made_and_nothing_stays_in_it(tmp_path):
    open_save_folder(saving(tmp_path / "a" / "b")).release()
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_file_in_place_of_the_folder_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"--save .*file cannot be written: a file of that name is in its place"
    ):
        open_save_folder(saving(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"--save .*below cannot be written: a part of its path is a file"):
        open_save_folder(saving(tmp_path / "file" / "below"))


def test_a_read_only_folder_is_told(tmp_path):
    with (
        mounted(tmp_path / "ro", "ro"),
        pytest.raises(ValueError, match=r"--save .*/ro cannot be written: it is read-only .*; give another"),
    ):
        open_save_folder(saving(tmp_path / "ro"))


def test_a_full_disk_is_told(tmp_path):
    with mounted(tmp_path / "disk", "size=64k") as disk:
        with pytest.raises(ValueError, match=r"--save .*/disk cannot be written: the disk is full .*; free"):
            open_save_folder(saving(disk))
        assert list(disk.iterdir()) == [], "what was tried is gone"


def test_a_disk_that_is_too_small_for_one_checkpoint_is_told_with_the_numbers(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(1 << 20))
    with mounted(tmp_path / "disk", "size=2m") as disk:
        args = saving(disk, hf_checkpoint=str(tmp_path / "model"))
        with pytest.raises(
            ValueError, match="has 2 MiB free, and a checkpoint of this model takes at least 3 MiB"
        ):
            open_save_folder(args)
        args.no_save_optim = True
        open_save_folder(args).release()


def test_so_is_a_folder_of_hugging_face_models(tmp_path):
    (tmp_path / "hf").write_text("")
    args = saving(tmp_path / "ckpt", save_hf=f"{tmp_path}/hf/step-{{rollout_id}}/model")
    with pytest.raises(ValueError, match=r"--save-hf .*/hf cannot be written: a file of that name"):
        open_model_folder(args)
    args.save_hf = f"{tmp_path}/new/step-{{rollout_id}}"
    open_model_folder(args)
    assert (tmp_path / "new").is_dir()


def test_a_file_size_limit_is_told(tmp_path):
    code = (
        "import resource, sys; from pathlib import Path; from slime.cluster.checkpoints.save_folder import "
        "prepare_folder\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); prepare_folder('--save', Path(sys.argv[1]))"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert "larger than this process may write (ulimit -f)" in ended.stderr


# ---- one run -----------------------------------------------------------------------------------------------


def test_a_new_run_does_not_write_into_the_checkpoints_of_another(tmp_path):
    (tmp_path / "step_0000007").mkdir()
    with pytest.raises(
        ValueError, match=r"holds checkpoints of an earlier run .*rollouts 7.*--load .*another folder"
    ):
        open_save_folder(saving(tmp_path))
    with pytest.raises(ValueError, match="resume it without --finetune"):
        open_save_folder(saving(tmp_path, load=str(tmp_path), finetune=True))
    open_save_folder(saving(tmp_path, load=f"{tmp_path}/../{tmp_path.name}")).release()


HOLD = """
import sys, time
from pathlib import Path
from slime.utils.files.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), "--save")
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_run_is_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"--save .* is in use by process {holder.pid} on "):
            open_save_folder(saving(tmp_path))
        os.kill(holder.pid, signal.SIGKILL)
        eventually(lambda: psutil.Process(holder.pid).status() == psutil.STATUS_ZOMBIE)
        open_save_folder(saving(tmp_path)).release()  # not even reaped yet
    finally:
        holder.kill()
        holder.wait()


def test_who_may_only_read_a_folder_sees_that_it_is_held(tmp_path, monkeypatch):
    lock, opened = FolderLock(tmp_path, "--run-dir"), os.open

    def reading(path, flags, *more, **named):
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, flags, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", reading)
        assert is_locked(tmp_path, "--run-dir")
    lock.release()
    assert not is_locked(tmp_path, "--run-dir")


def test_what_a_killed_run_left_behind_is_waited_for(tmp_path):
    """A child that was forked while the lock was held holds it too, until it sees that its parent is gone."""
    code = HOLD.replace(
        'print("held"', "import os\nif os.fork() == 0: time.sleep(4); os._exit(0)\nprint('held'"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.wait()
    started = time.monotonic()
    FolderLock(tmp_path, "--save").release()
    assert time.monotonic() - started < 60


def test_many_who_want_the_lock_get_it_one_after_another(tmp_path):
    """The file goes with each release: nobody may hold the file that went while another holds the new one."""
    held, most, lock = [], [], threading.Lock()

    def work():
        for _ in range(5):
            while True:
                try:
                    own = FolderLock(tmp_path, "--save")
                    break
                except ValueError:
                    continue
            with lock:
                held.append(own)
                most.append(len(held))
            time.sleep(0.002)
            with lock:
                held.remove(own)
            own.release()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and len(most) == 30


def test_the_lock_is_not_handed_to_children(tmp_path):
    lock = FolderLock(tmp_path, "--save")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
    lock.release()
    try:
        FolderLock(tmp_path, "--save").release()
    finally:
        child.kill()
        child.wait()


# ---- in mid-write ------------------------------------------------------------------------------------------


def test_a_disk_that_fills_up_is_named_however_the_error_arrives(tmp_path):
    direct = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    wrapped = RuntimeError("rank 1: something broke")
    wrapped.__cause__ = direct
    as_text = RuntimeError("rank 0: SafetensorError: I/O error: No space left on device (os error 28)")
    in_a_note = RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")
    in_a_note.add_note("in a worker process:\nOSError: [Errno 28] No space left on device")
    for error in (direct, wrapped, as_text, in_a_note):
        assert disk_error(error, tmp_path) == "the disk is full (No space left on device)"
    assert disk_error(RuntimeError("out of memory"), tmp_path) is None
    assert disk_error(OSError(errno.EROFS, "Read-only file system"), tmp_path).startswith("it is read-only")


def test_an_error_without_a_reason_on_a_full_disk_is_the_full_disk(tmp_path):
    with mounted(tmp_path / "disk", "size=2m") as disk:
        prepare_folder("--save", disk)
        (disk / "filler").write_bytes(bytes((2 << 20) - 4096))
        (disk / "step_0000003").mkdir()
        with (
            pytest.raises(
                RunStopped,
                match=r"checkpoint of rollout 4 .*the disk is full.*complete one is that of rollout 3",
            ),
            naming_disk_errors("--save", disk, 4),
        ):
            raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")


def writing(folder):
    return SimpleNamespace(
        run_dir=str(folder),
        save=None,
        save_debug_rollout_data=f"{folder}/dump/{{rollout_id}}.pt",
        save_debug_train_data=None,
        update_weight_disk_dir=None,
    )


def test_whatever_a_run_cannot_write_for_want_of_room_is_one_message(tmp_path):
    named = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/x/dump/3.pt")
    told = RuntimeError("Error in rank 0: [Errno 28] No space left on device")
    for error, where in ((named, r"runs/x/dump/3\.pt"), (told, "a file of this run")):
        match = rf"{where}: the disk is full .*start this command again"
        with pytest.raises(RunStopped, match=match), naming_full_disks(writing(tmp_path)):
            raise error
    with mounted(tmp_path / "disk", "size=2m") as disk:
        (disk / "filler").write_bytes(bytes((2 << 20) - 4096))
        with (
            pytest.raises(RunStopped, match=rf"--run-dir {disk}: the disk is full"),
            naming_full_disks(writing(disk)),
        ):
            raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")
    for error in (KeyError("a defect"), ValueError("--flag 3"), RunStopped("No space left on device, told")):
        with pytest.raises(type(error)) as raised, naming_full_disks(writing(tmp_path)):
            raise error
        assert raised.value is error


def test_shared_memory_that_is_too_small_is_named_and_not_taken_for_the_disk(tmp_path, monkeypatch):
    with mounted(tmp_path / "shm", "size=64k") as small:
        monkeypatch.setattr(shm, "FOLDER", small)
        match = rf"the shared memory {small}: it is full .*1000000 bytes\); enlarge it \(docker: --shm-size\)"
        with pytest.raises(RunStopped, match=match), naming_full_disks(writing(tmp_path)):
            try:
                shm.create_segment(1_000_000, shm.make_prefix())
            except OSError as error:
                raise pickle.loads(pickle.dumps(error)) from None  # as it comes from a rank
        assert not any(small.iterdir())


def test_what_the_disk_did_not_do_rises_as_it_is(tmp_path):
    with pytest.raises(KeyError), naming_disk_errors("--save", tmp_path, 4):
        raise KeyError("a defect")


def test_a_folder_of_the_user_in_the_place_of_a_model_to_come_is_told_at_the_start(tmp_path):
    args = saving(tmp_path / "save", save_hf=str(tmp_path / "hf-{rollout_id}"))
    (tmp_path / "hf-2").mkdir()
    open_model_folder(args)
    (tmp_path / "hf-2" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"--save-hf .*hf-2 exists and holds no model"):
        open_model_folder(args)
    assert (tmp_path / "hf-2" / "thesis.tex").exists()


@pytest.mark.parametrize("name", ["hf-{rollout_id}", "hf-3"])
def test_a_model_is_replaced_only_by_the_run_that_wrote_it(tmp_path, name):
    (tmp_path / "hf-3").mkdir()
    (tmp_path / "hf-3" / "config.json").write_text("{}")
    args = saving(tmp_path / "save", save_hf=str(tmp_path / name), run_dir=str(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"--save-hf .*hf-3 exists and holds a model that this run did not"):
        open_model_folder(args)
    write_checkpoint(tmp_path / "save", Manifest(3, "run", 1), {}, lambda path: path.mkdir(), 0)
    args.load = args.save
    open_model_folder(args)
    args.hf_checkpoint = str(tmp_path / "hf-3")
    with pytest.raises(ValueError, match=r"--save-hf .*hf-3 exists and holds a model"):
        open_model_folder(args)


def test_a_look_names_every_folder_that_a_run_would_not_get_and_writes_nothing(tmp_path):
    for name in ("empty", "mine", "other", "used"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "step_0000003").mkdir()
    (tmp_path / "used" / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))

    def told(save=None, run_dir=tmp_path / "free", **changes) -> str:
        args = saving(tmp_path, run_dir=str(run_dir), ckpt_step=None, record_max_mib=1, auto_resume=True)
        args.record_dir = None
        args.to_dict = lambda hide_secrets: {}
        args.save = None if save is None else str(tmp_path / save)
        vars(args).update(changes)
        return "\n".join(map(str, check_folders(args)))

    assert told(save="mine") == told(save="new", load=str(tmp_path / "new")) == ""
    assert "holds no checkpoint: nothing is resumed" in told(save="mine", load=str(tmp_path / "mine"))
    assert "nothing can be made in /proc" in told(save="/proc/foo")
    assert "--record-dir /proc/foo cannot be written" in told(record_dir="/proc/foo")
    assert told(save="not/yet/there", run_dir=tmp_path / "nor" / "this") == ""
    both = told(save="other", run_dir=tmp_path / "used")
    assert "--run-dir" in both and "belongs to" in both and "--save" in both and "earlier run" in both
    assert f"--load {tmp_path / 'empty'} holds no complete checkpoint" in told(load=str(tmp_path / "empty"))
    assert "rollouts none" in told(save="mine", load=str(tmp_path / "mine"), ckpt_step=4)
    assert "manifest.json: the file is missing" in told(load=str(tmp_path / "other"))
    assert f"nothing can be made in {tmp_path / 'file'} (Not a directory)" in told(save="file/below")
    assert sorted(tmp_path.rglob("*")) == before
    lock = FolderLock(tmp_path / "mine", "--save")
    assert "is in use by process" in told(save="mine")
    lock.release()
