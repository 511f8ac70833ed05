"""Where ranks meet: at the address they were given, and nowhere else."""

import datetime

import psutil
import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE_S

from slime.utils.machine.process_groups import limit_every_group, open_store


def listening() -> set[tuple[str, int]]:
    """(address, port) of everything this process listens on."""
    found = psutil.Process().net_connections(kind="inet")
    return {tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN}


def test_the_meeting_point_listens_at_its_address_alone():
    store = open_store("127.0.0.1", 2, datetime.timedelta(seconds=PATIENCE_S))
    assert [address for address, port in listening() if port == store.port] == ["127.0.0.1"]
    other = dist.TCPStore(
        "127.0.0.1", store.port, 2, False, datetime.timedelta(seconds=PATIENCE_S), wait_for_workers=False
    )
    other.set("a", "b")
    assert store.get("a") == b"b"


def test_an_address_that_is_not_this_machine_s_is_an_error_and_not_every_address():
    with pytest.raises(OSError):
        open_store("203.0.113.1", 1)


def test_groups_that_are_split_off_have_the_patience_of_the_run_and_not_torch_s_half_an_hour(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        groups = [dist.group.WORLD, dist.new_group([0])]
        limit_every_group(datetime.timedelta(seconds=77))
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        assert [backend.options._timeout.total_seconds() for backend in backends] == [77, 77]
    finally:
        dist.destroy_process_group()
