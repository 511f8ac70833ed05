"""Rollout dumps: what was saved is what comes back, and files with code in them are refused."""

import zipfile

import numpy as np
import pytest
import torch

from slime.rollout.dumps import load_rollout_dump, save_rollout_dump
from slime.utils.types import RewardFailure, Sample


def make_samples():
    full = Sample(index=0, group_index=0, tokens=[1, 2, 3], reward=0.5, metadata={"a": {"b": [1]}})
    full.response_length, full.rollout_log_probs, full.loss_mask = 2, [-0.1, -0.2], [1, 0]
    full.version_spans, full.status = [("run:1", 0, 2)], Sample.Status.TRUNCATED
    failed = Sample(index=1, group_index=0, reward_failure=RewardFailure("infra_error", "down"))
    return full, failed


def test_samples_survive_a_round_trip(tmp_path):
    full, failed = make_samples()
    template = str(tmp_path / "dumps" / "r_{rollout_id}.pt")
    save_rollout_dump(template, 4, [[full, [failed]]])
    assert load_rollout_dump(template, 4) == [full, failed]
    assert [p.name for p in (tmp_path / "dumps").iterdir()] == ["r_4.pt"]


def test_arrays_of_routed_experts_survive(tmp_path):
    for dtype in (np.int32, np.uint8):
        sample = Sample(rollout_routed_experts=np.arange(6, dtype=dtype).reshape(1, 2, 3))
        save_rollout_dump(str(tmp_path / "d.pt"), 0, [sample])
        # numpy 1, with which many of these files were written, calls the module otherwise.
        with zipfile.ZipFile(tmp_path / "d.pt") as now, zipfile.ZipFile(tmp_path / "old.pt", "w") as old:
            for name in now.namelist():
                old.writestr(name, now.read(name).replace(b"numpy._core", b"numpy.core"))
        for file in ("d.pt", "old.pt"):
            [loaded] = load_rollout_dump(str(tmp_path / file), 0)
            assert np.array_equal(loaded.rollout_routed_experts, sample.rollout_routed_experts)
            assert loaded.rollout_routed_experts.dtype == dtype


def test_images_come_back_as_their_pixels(tmp_path):
    image = pytest.importorskip("PIL.Image")
    made = image.new("RGB", (3, 2), (1, 2, 3))
    made.save(tmp_path / "a.png")
    sample = Sample(multimodal_inputs={"images": [made, image.open(tmp_path / "a.png")]})
    save_rollout_dump(str(tmp_path / "d.pt"), 0, [sample])
    [loaded] = load_rollout_dump(str(tmp_path / "d.pt"), 0)
    assert [i.tobytes() for i in loaded.multimodal_inputs["images"]] == [made.tobytes()] * 2


def test_a_share_of_the_samples_can_be_loaded(tmp_path):
    save_rollout_dump(str(tmp_path / "d.pt"), 0, [Sample(index=i) for i in range(10)])
    assert [s.index for s in load_rollout_dump(str(tmp_path / "d.pt"), 0, subsample=0.3)] == [0, 1, 2]


def test_a_missing_dump_and_another_file_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"r_7\.pt does not exist"):
        load_rollout_dump(str(tmp_path / "r_{rollout_id}.pt"), 7)
    torch.save({"model": {}}, tmp_path / "m.pt")
    with pytest.raises(ValueError, match="not a rollout dump"):
        load_rollout_dump(str(tmp_path / "m.pt"), 0)


class Evil:
    def __reduce__(self):
        return print, ("this must not run",)


def test_a_dump_with_code_in_it_is_refused(tmp_path, capsys):
    torch.save({"rollout_id": 0, "samples": [Evil()]}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match=r"evil\.pt holds a \S*print: it is read without running code"):
        load_rollout_dump(str(tmp_path / "evil.pt"), 0)
    assert "must not run" not in capsys.readouterr().out
