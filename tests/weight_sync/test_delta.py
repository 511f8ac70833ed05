"""Published versions and the copy that follows them: bit-exact, and whole again after accidents."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from delta_world import assert_same_bits, index_of, load_folder, make_sender, publish, small_state, step
from patience import PATIENCE_S, eventually

from slime.arguments.groups.engine import CHECKSUMS, ENCODINGS
from slime.utils.errors import RunStopped
from slime.weight_sync.base import DeltaOptions, SenderOptions
from slime.weight_sync.delta.local_copy import LocalCopy, find_route
from slime.weight_sync.delta.publication import INDEX, WANTED, DeltaEntry, FolderSource, Index, is_at_least
from slime.weight_sync.delta.transport import DeltaSender
from slime.wire.delta_codec import DeltaError

pytest.importorskip("zstandard")
pytest.importorskip("xxhash")

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def place(tmp_path):
    """(published folder, sender, local copy, source)."""
    sender = make_sender(tmp_path / "published", tmp_path / "local")
    yield tmp_path / "published", sender, LocalCopy(tmp_path / "local"), FolderSource(tmp_path / "published")
    sender.close()


def flip_bit(path: Path, place: int = -20) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


# ---- the way it should go ----------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("checksum", CHECKSUMS)
def test_after_many_deltas_the_copy_is_the_trainer_s_bit_by_bit(tmp_path, encoding, checksum):
    if checksum == "blake3":
        pytest.importorskip("blake3")
    sender = make_sender(tmp_path / "p", tmp_path / "l", encoding=encoding, checksum=checksum)
    copy, source, state = LocalCopy(tmp_path / "l"), FolderSource(tmp_path / "p"), small_state()
    for i in range(1, 7):
        state = step(state, i)
        bundle = publish(sender, state, f"run:{i}")
        arrival = copy.bring_to(source, f"run:{i}", exact=True)
        assert (arrival.version, arrival.route) == (f"run:{i}", "full" if i == 1 else "delta")
        assert_same_bits(load_folder(arrival.folder), state)
        if i > 1:
            assert 0.01 < bundle.metrics["perf/update_weights_density"] < 0.1
    sender.close()
    assert list((tmp_path / "p").iterdir()) == []


def test_a_copy_that_is_behind_follows_several_deltas_in_order(place):
    _, sender, copy, source = place
    state = small_state()
    publish(sender, state, "run:1")
    copy.bring_to(source)
    for i in range(2, 6):
        state = step(state, i)
        publish(sender, state, f"run:{i}")
    arrival = copy.bring_to(source, "run:3")
    assert (arrival.version, arrival.route, arrival.num_deltas) == ("run:5", "delta", 4)
    assert_same_bits(load_folder(arrival.folder), state)


def test_a_copy_that_starts_late_takes_the_full_copy_and_the_deltas_after_it(place):
    _, sender, copy, source = place
    state = small_state()
    for i in range(1, 4):
        publish(sender, state := step(state, i), f"run:{i}")
    arrival = copy.bring_to(source, "run:3", exact=True)
    assert (arrival.route, arrival.num_deltas) == ("full", 2)
    assert_same_bits(load_folder(arrival.folder), state)


def test_an_older_version_can_be_asked_for_while_the_next_is_published(place):
    _, sender, copy, source = place
    first, second = small_state(), step(small_state(), 1)
    publish(sender, first, "run:1")
    publish(sender, second, "run:2")
    assert_same_bits(load_folder(copy.bring_to(source, "run:1", exact=True).folder), first)
    assert_same_bits(load_folder(copy.bring_to(source, "run:2", exact=True).folder), second)


def test_a_version_that_is_held_is_not_fetched_again_and_files_without_change_are_shared(place):
    _, sender, copy, source = place
    state = small_state()
    publish(sender, state, "run:1")
    first = copy.bring_to(source)
    assert copy.bring_to(source, "run:1").route == "held"
    publish(sender, state, "run:2")  # nothing changed
    second = copy.bring_to(source)
    [old], [new] = (list(folder.glob("*.safetensors")) for folder in (first.folder, second.folder))
    assert second.route == "delta" and old.stat().st_ino == new.stat().st_ino


def test_a_model_with_other_tensors_is_published_in_full(place):
    folder, sender, copy, source = place
    state = small_state()
    publish(sender, state, "run:1")
    other = {**state, "b.weight": torch.randn(5, 5)}
    del other["d.scalar"]
    publish(sender, other, "run:2")
    assert index_of(folder).entries[-1].base is None
    assert_same_bits(load_folder(copy.bring_to(source, "run:2").folder), other)


def test_weights_of_another_run_are_never_new_enough(place):
    _, sender, copy, source = place
    publish(sender, small_state(), "new:1")
    assert is_at_least("a:3", "a:2") and not is_at_least("a:3", "b:2")
    with pytest.raises(DeltaError, match=r"no route from weights None .* to old:1: .* publishes up to new:1"):
        copy.bring_to(source, "old:1", deadline_s=0.2)


def test_deltas_that_outgrow_the_full_copy_lead_to_a_new_one_and_old_files_go(place):
    folder, sender, copy, source = place
    state = small_state()
    for i in range(1, 12):
        publish(sender, state := step(state, i, share=0.9), f"run:{i}")
        if i in (3, 6):
            eventually(lambda: not sender._deltas_outgrow())  # the copy is written beside training
    entries = index_of(folder).entries
    assert entries[0].version != "run:1", entries

    def shows_what_there_is() -> bool:
        return {e.folder for e in index_of(folder).entries} == {
            path.name for path in folder.iterdir() if path.is_dir()
        }

    eventually(shows_what_there_is)  # a copy may be on its way beside training
    assert_same_bits(load_folder(copy.bring_to(source, "run:11", exact=True).folder), state)


def test_a_full_copy_beside_training_is_told_before_readers_learn_of_it(tmp_path):
    folder, told = tmp_path / "p", []

    def tell(written: Path) -> None:
        known = {e.folder for e in index_of(folder).entries} if (folder / INDEX).exists() else set()
        told.append((written.name, written.name in known))

    options = SenderOptions(
        "no-shm", folder, "hub/name", delta=DeltaOptions(tmp_path / "l"), after_writing=tell
    )
    sender = DeltaSender(options)
    state = small_state()
    for i in range(1, 4):
        publish(sender, state := step(state, i, share=0.9), f"run:{i}")
    (folder / WANTED).touch()  # as a copy does that finds no way to the newest version
    eventually(lambda: len(told) == 2)
    sender.close()
    assert told == [("p", False), ("full-run-3", False)]


def test_files_stay_when_they_are_to_be_kept(tmp_path):
    sender = make_sender(tmp_path / "p", tmp_path / "l", keep_files=True)
    for i in range(1, 4):
        publish(sender, step(small_state(), i), f"run:{i}")
    sender.close()
    assert sorted(p.name for p in (tmp_path / "p").iterdir()) == [
        *("delta-run-2", "delta-run-3", "full-run-1", "published.json")
    ]


def test_the_shorter_way_is_taken():
    full1, full3 = DeltaEntry("r:1", None, "full-1", 100), DeltaEntry("r:3", None, "full-3", 100)
    delta = {i: DeltaEntry(f"r:{i}", f"r:{i - 1}", f"delta-{i}", 60) for i in (2, 3, 4)}
    index = Index((full1, delta[2], delta[3], full3, delta[4]))
    assert find_route(index, "r:3", "r:4").deltas == (delta[4],)
    assert find_route(index, "r:2", "r:4").deltas == (delta[3], delta[4])  # 120 bytes; 160 from the full copy
    assert find_route(index, "r:1", "r:4").full == full3  # 180 bytes of deltas
    assert find_route(index, "other:3", "r:4").full == full3
    assert find_route(index, "r:3", "r:4", without=["delta-4"]) is None
    assert find_route(index, "r:4", "r:9") is None


# ---- accidents ---------------------------------------------------------------------------------------------


def test_a_corrupt_delta_is_noticed_and_a_full_copy_taken_instead(place, caplog):
    folder, sender, copy, source = place
    publish(sender, state := small_state(), "run:1")
    copy.bring_to(source)
    publish(sender, state := step(state, 1), "run:2")
    flip_bit(next((folder / "delta-run-2").glob("*.bin")))
    arrival = copy.bring_to(source, "run:2", exact=True, deadline_s=PATIENCE_S)
    assert (arrival.route, arrival.num_deltas) == ("full", 0)
    assert "delta-run-2: tensor" in caplog.text and "requesting a full copy" in caplog.text
    assert_same_bits(load_folder(arrival.folder), state)
    publish(sender, state := step(state, 2), "run:3")  # and deltas go on from there
    assert copy.bring_to(source, "run:3").route == "delta"


@pytest.mark.parametrize("what", ["manifest", "cut", "index"])
def test_damage_anywhere_is_an_error_that_names_the_file_and_leaves_the_copy_alone(place, what):
    folder, sender, copy, source = place
    publish(sender, state := small_state(), "run:1")
    copy.bring_to(source)
    publish(sender, step(state, 1), "run:2")
    sender._closing.set()  # the trainer is gone: nobody writes a full copy
    sender._background.join()
    if what == "manifest":
        (folder / "delta-run-2" / "weights.json").write_text('{"version": ')
    elif what == "cut":
        file = next((folder / "delta-run-2").glob("*.bin"))
        file.write_bytes(file.read_bytes()[:-3])
    else:
        (folder / "published.json").write_text("{}")
    with pytest.raises(
        DeltaError, match=r"delta-run-2: (weights.json is damaged|.*bytes)|published.json is damaged"
    ):
        copy.bring_to(source, "run:2", exact=True, deadline_s=0.3)
    assert copy.version == "run:1"
    assert_same_bits(load_folder(copy._folder / "weights-run-1"), state)


def test_a_damaged_full_copy_is_written_again_by_the_trainer(place):
    folder, sender, copy, source = place
    publish(sender, state := small_state(), "run:1")
    flip_bit(next((folder / "full-run-1").glob("*.safetensors")))
    arrival = copy.bring_to(source, "run:1", exact=True, deadline_s=PATIENCE_S)
    assert_same_bits(load_folder(arrival.folder), state)
    assert "full-run-1-2" in {entry.folder for entry in index_of(folder).entries}


def test_a_delta_on_the_wrong_base_is_refused_and_a_full_copy_taken(place, caplog):
    _, sender, copy, source = place
    publish(sender, state := small_state(), "run:1")
    local = copy.bring_to(source).folder
    flip_bit(next(local.glob("*.safetensors")), place=-600)  # says run:1, and is not
    publish(sender, state := step(state, 1), "run:2")
    arrival = copy.bring_to(source, "run:2", exact=True, deadline_s=PATIENCE_S)
    assert arrival.route == "full" and "another checksum than the trainer's" in caplog.text
    assert_same_bits(load_folder(arrival.folder), state)


def test_a_delta_that_was_made_from_another_version_than_the_list_says_is_refused(place):
    folder, sender, copy, source = place
    publish(sender, state := small_state(), "run:1")
    copy.bring_to(source)
    publish(sender, state := step(state, 1), "run:2")
    file = folder / "delta-run-2" / "weights.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base": "run:0"}))
    sender._closing.set()
    sender._background.join()
    with pytest.raises(
        DeltaError, match=r"made from run:0 to run:2, but published.json says from run:1 to run:2"
    ):
        copy.bring_to(source, "run:2", exact=True, deadline_s=0.3)
    assert copy.version == "run:1"


def test_weights_that_are_no_copy_of_ours_are_not_removed(place, tmp_path):
    _, sender, copy, source = place
    mine = tmp_path / "local" / "weights-mine"
    mine.mkdir(parents=True)
    publish(sender, small_state(), "run:1")
    with pytest.raises(DeltaError, match="holds weights-mine, which slime did not write"):
        copy.bring_to(source, "run:1")
    assert mine.is_dir()


def test_a_list_of_another_machine_cannot_name_files_outside(tmp_path):
    entry = {"version": "r:1", "base": None, "folder": "../../etc", "nbytes": 1}
    with pytest.raises(DeltaError, match=r"'../../etc' is not the name"):
        Index.from_json(json.dumps({"entries": [entry]}))


@pytest.fixture
def small_files():
    """A fake full disk: no file of this process may pass a size, and the error is EFBIG instead of ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(nbytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_at_the_trainer_stops_with_the_folder_and_loses_no_version(place, small_files):
    folder, sender, copy, source = place
    publish(sender, state := small_state(), "run:1")
    small_files(200)
    with pytest.raises(RunStopped, match=r"no room for weights.* in .*published .*--update-weight-disk-dir"):
        publish(sender, step(state, 1), "run:2")
    with pytest.raises(RunStopped, match=r"no room for weights run:2 in .*published"):
        publish(sender, step(state, 1), "run:2")  # a full copy this time
    small_files(resource.RLIM_INFINITY)
    assert [entry.version for entry in index_of(folder).entries] == ["run:1"]
    assert_same_bits(load_folder(copy.bring_to(source).folder), state)
    publish(
        sender, state := step(state, 2), "run:2"
    )  # with room again: in full, as half of a version was remembered
    assert index_of(folder).entries[-1].base is None
    assert_same_bits(load_folder(copy.bring_to(source).folder), state)


def test_a_full_disk_beside_the_engine_leaves_the_version_before(place, small_files):
    _, sender, copy, source = place
    publish(sender, state := small_state(), "run:1")
    held = copy.bring_to(source).folder
    publish(sender, after := step(state, 1), "run:2")
    small_files(1000)
    with pytest.raises(
        RunStopped, match=r"no room for weights run:2 in .*local.*--update-weight-local-checkpoint-dir"
    ):
        copy.bring_to(source)
    small_files(resource.RLIM_INFINITY)
    assert copy.version == "run:1" and not (copy._folder / "incoming.tmp").exists()
    assert_same_bits(load_folder(held), state)
    assert_same_bits(load_folder(copy.bring_to(source).folder), after)


PULL = """
import os, sys, time
from pathlib import Path
from slime.weight_sync.delta import local_copy
from slime.weight_sync.delta.publication import FolderSource

def stop_in_the_middle(*args):
    os.write(1, b"in the middle\\n")  # one write: several threads come here
    time.sleep(1000)

local_copy._builder = lambda *args: stop_in_the_middle
local_copy.LocalCopy(Path(sys.argv[1])).bring_to(FolderSource(Path(sys.argv[2])), "run:2")
"""


def test_a_kill_in_mid_apply_leaves_the_version_before_and_the_next_pull_ends_well(tmp_path):
    sender = make_sender(tmp_path / "p", tmp_path / "l")
    publish(sender, before := small_state(), "run:1")
    copy, source = LocalCopy(tmp_path / "l"), FolderSource(tmp_path / "p")
    copy.bring_to(source)
    publish(sender, after := step(before, 1, share=0.3), "run:2")
    words = [sys.executable, "-c", PULL, str(tmp_path / "l"), str(tmp_path / "p")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE)
    staging = tmp_path / "l" / "incoming.tmp"
    assert process.stdout.readline() == b"in the middle\n" and any(staging.glob("new/*.safetensors"))
    process.kill()
    process.wait()
    assert staging.exists() and copy.version == "run:1"
    assert_same_bits(load_folder(tmp_path / "l" / "weights-run-1"), before)
    assert_same_bits(load_folder(copy.bring_to(source).folder), after)
    assert copy.version == "run:2" and not staging.exists()
    sender.close()
