"""Where trainer and engines meet for a broadcast: at an address that every engine reaches."""

import os
from types import SimpleNamespace

import pytest

from slime.cluster.training.rank_sender import RankSender
from slime.utils.machine.ports import get_host_info, hold_port, interface_towards, with_port
from slime.utils.machine.process_groups import prefer_interface_of, reaching
from slime.utils.machine.run_identity import LOOPBACK, Run


@pytest.fixture
def own_address():
    """An address of this machine that is not loopback, as of an engine that runs elsewhere."""
    address = get_host_info()[1]
    if address == LOOPBACK:
        pytest.skip("this machine has no network but loopback")
    return address


def address_of(tmp_path, *engine_urls, rank=0, **hosts):
    run = Run("run", tmp_path, "slime-1-x", **hosts)
    sender = SimpleNamespace(_run=run, _rank=rank, _engine_urls=engine_urls)
    return RankSender._own_address(sender)


def test_a_local_run_meets_on_loopback_where_all_engines_are_on_this_machine(tmp_path):
    assert address_of(tmp_path, "http://127.0.0.1:30000", "http://localhost:30001") == LOOPBACK


@pytest.mark.parametrize("rank", [0, 1])
def test_a_local_run_meets_where_an_engine_of_another_host_reaches_it(tmp_path, own_address, rank):
    urls = ("http://127.0.0.1:30000", f"http://{own_address}:30000")
    assert address_of(tmp_path, *urls, rank=rank) == own_address


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_on_ray_meets_engines_at_the_address_by_which_the_scheduler_knows_its_host(tmp_path, rank):
    found = address_of(tmp_path, "http://10.0.0.3:30000", rank=rank, host="10.0.0.1", own_host="10.0.0.2")
    assert found == "10.0.0.2"


def test_groups_with_another_host_leave_loopback_and_come_back_to_it(own_address, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # as ranks of a local run have it
    with reaching(own_address):
        assert os.environ["GLOO_SOCKET_IFNAME"] == interface_towards(own_address) != "lo"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    with reaching(LOOPBACK):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    with reaching(own_address):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0", "the user's own choice"


def test_ranks_of_several_hosts_use_the_interface_of_their_own_address(own_address, monkeypatch):
    """Gloo asks for the address of the machine's name, which many machines do not know, or as 127.0.1.1."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    prefer_interface_of(LOOPBACK)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    prefer_interface_of(own_address)
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface_towards(own_address) != "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0", "the user's own choice"


def test_urls_of_version_6_have_brackets_and_their_ports_can_be_held():
    assert with_port("10.0.0.1", 80) == "10.0.0.1:80"
    assert with_port("fd00::1", 80) == with_port("[fd00::1]", 80) == "[fd00::1]:80"
    held = hold_port("::1")
    if held is None:
        pytest.skip("this machine has no version 6 of the Internet Protocol")
    held.close()
