"""One GPU that counts as several: which device each process sees, and how NCCL tells its ranks apart."""

import pytest

from slime.utils.machine import shared_gpu


def test_a_device_is_seen_as_it_is_counted(monkeypatch):
    monkeypatch.delenv(shared_gpu.VARIABLE, raising=False)
    assert shared_gpu.device_environment(()) == {}
    assert shared_gpu.device_environment((2, 3)) == {"CUDA_VISIBLE_DEVICES": "2,3"}


def test_ranks_that_share_a_device_have_names_of_their_own(monkeypatch):
    monkeypatch.setenv(shared_gpu.VARIABLE, "2")
    found = [shared_gpu.device_environment((gpu,)) for gpu in range(4)]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in found] == ["0", "0", "1", "1"]
    assert len({env["NCCL_HOSTID"] for env in found}) == 4
    assert shared_gpu.device_environment((0, 1, 2))["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.parametrize("text", ["0", "two", "-1"])
def test_a_number_that_makes_no_sense_is_refused(monkeypatch, text):
    monkeypatch.setenv(shared_gpu.VARIABLE, text)
    with pytest.raises(ValueError, match=f"{shared_gpu.VARIABLE} is '{text}'"):
        shared_gpu.ranks_per_gpu()
