"""Files of tensors are written with the rights that the user's umask gives, and a failed one is not left."""

import os

import pytest
import safetensors
import torch

from slime.utils.files.safetensors_files import read_tensors, write_tensors


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_others_can_read_a_written_file_where_the_umask_lets_them(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == mode
    assert [name for name, _ in read_tensors([tmp_path / "model.safetensors"])] == ["a"]


def test_a_full_disk_is_an_os_error_and_leaves_no_empty_file(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="No space left on device"):
        write_tensors(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    assert not list(tmp_path.iterdir())
