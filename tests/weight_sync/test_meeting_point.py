"""Where trainer and engines meet for a broadcast: at an address that every engine reaches."""

import os
from types import SimpleNamespace

import pytest

from slime.cluster.training.rank_sender import RankSender
from slime.utils.machine.ports import get_host_info, interface_towards
from slime.utils.machine.process_groups import prefer_interface_towards, reaching
from slime.utils.machine.run_identity import LOOPBACK, Run


@pytest.fixture
def own_address():
    """An address of this machine that is not loopback, as of an engine that runs elsewhere."""
    address = get_host_info()[1]
    if address == LOOPBACK:
        pytest.skip("this machine has no network but loopback")
    return address


def address_of(tmp_path, *engine_urls, rank=0):
    sender = SimpleNamespace(_run=Run("run", tmp_path, "slime-1-x"), _rank=rank, _engine_urls=engine_urls)
    return RankSender._own_address(sender)


def test_a_local_run_meets_on_loopback_where_all_engines_are_on_this_machine(tmp_path):
    assert address_of(tmp_path, "http://127.0.0.1:30000", "http://localhost:30001") == LOOPBACK


@pytest.mark.parametrize("rank", [0, 1])
def test_a_local_run_meets_where_an_engine_of_another_host_reaches_it(tmp_path, own_address, rank):
    urls = ("http://127.0.0.1:30000", f"http://{own_address}:30000")
    assert address_of(tmp_path, *urls, rank=rank) == own_address


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


def test_ranks_of_several_hosts_use_the_interface_that_leads_to_their_meeting_point(own_address, monkeypatch):
    """Gloo asks for the address of the machine's name, which many machines do not know, or as 127.0.1.1."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    prefer_interface_towards(LOOPBACK)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    prefer_interface_towards(own_address)
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface_towards(own_address) != "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    prefer_interface_towards(own_address)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
