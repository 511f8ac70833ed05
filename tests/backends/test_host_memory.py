"""A trainer's tensors in host memory: the same place every time, and never two in one."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from trainer_helpers import meeting_point

from slime.backends.shared import host_memory
from slime.backends.shared.host_memory import HostMemory


def test_a_key_keeps_its_place_and_holds_what_came_last():
    host = HostMemory()
    first = host.keep("a", torch.ones(3, 5))
    again = host.keep("a", torch.full((3, 5), 2.0))
    assert again.data_ptr() == first.data_ptr() and torch.equal(again, torch.full((3, 5), 2.0))
    assert host.keep("a", torch.ones(7)).shape == (7,)


def test_tensors_share_blocks_and_do_not_overlap(monkeypatch):
    monkeypatch.setattr(host_memory, "BLOCK_BYTES", 4096)
    host = HostMemory()
    sizes = [3, 700, 1, 65, 5000, 900, 2]  # some fill a block, one needs more than one
    kept = [host.keep(i, torch.full((size,), float(i), dtype=torch.float64)) for i, size in enumerate(sizes)]
    for i, (tensor, size) in enumerate(zip(kept, sizes, strict=True)):
        assert tensor.shape == (size,) and bool((tensor == i).all())
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in kept)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_model_that_comes_from_elsewhere_has_its_values_here_and_its_ties():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    host, values = HostMemory(), {name: p.clone() for name, p in model.named_parameters()}
    moved = {}

    def pretend_it_was_on_a_device(key, tensor, place):
        moved[id(tensor)] = key
        return host.keep(key, tensor) if key is not None and key not in host._places else tensor

    host.move = pretend_it_was_on_a_device
    host.move_model(model, torch.device("cpu"))
    assert len(moved) == 3 and model[1].weight is model[0].weight
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())
    assert model[0].weight.data_ptr() == host._places[model[0].weight].data_ptr()


def test_memory_locked_ahead_comes_in_whole_blocks_and_only_where_there_is_room(monkeypatch):
    made = []
    monkeypatch.setattr(host_memory, "_locked", made.append)
    for nbytes in (2500, 1 << 62):
        host_memory.lock_ahead(nbytes, 1000, lambda: made.append("a turn of others"))
    assert made == [1000, "a turn of others"] * 3


def test_the_bytes_of_a_storage_leave_and_return_in_pieces(monkeypatch):
    monkeypatch.setattr(host_memory, "BLOCK_BYTES", 4096)
    host = HostMemory()
    whole = torch.arange(5000, dtype=torch.float32)
    view, values, storage = whole[7:], whole.clone(), whole.untyped_storage()
    nbytes = storage.nbytes()
    host.keep_storage("flat", storage)
    storage.resize_(0)
    assert [place.numel() for place in host._places.values()] == [4096] * 4 + [nbytes - 4 * 4096]
    storage.resize_(nbytes)
    whole.zero_()
    host.give_back_storage("flat", storage)
    assert torch.equal(whole, values) and torch.equal(view, values[7:])


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", init_method=meeting_point(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_of_a_sharded_tensor_this_rank_s_part_is_kept(one_rank):
    mesh = init_device_mesh("cpu", (1,))
    shard = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)])
    host = HostMemory()
    # As from a device: on a CPU there is nothing to do.
    kept = host.move("a", shard, torch.device("cpu"))
    assert kept is shard
    meta = DTensor(torch.empty(4, 3, device="meta"), shard._spec, requires_grad=True)
    host.keep = lambda key, tensor: torch.full(tensor.shape, 5.0)
    moved = host.move("a", meta, torch.device("cpu"))
    assert isinstance(moved, DTensor) and moved.requires_grad and moved.placements == shard.placements
    assert torch.equal(moved.full_tensor(), torch.full((4, 3), 5.0))


@pytest.mark.gpu
def test_shards_on_a_gpu_leave_for_locked_pages_and_train_on_as_if_they_had_stayed():
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=meeting_point(), rank=0, world_size=1)
    try:
        mesh, results = init_device_mesh("cuda", (1,)), {}
        for leaves in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).cuda()
            fully_shard(model, mesh=mesh)
            optimizer, host = torch.optim.AdamW(model.parameters(), lr=1e-2), HostMemory()
            for step in range(3):
                inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).cuda()
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if leaves:
                    awake = torch.cuda.memory_allocated()
                    for place in ("cpu", "cuda"):
                        host.move_model(model, torch.device(place))
                        host.move_state(optimizer, torch.device(place))
                        torch.cuda.synchronize()
                        local = next(model.parameters())._local_tensor
                        assert isinstance(next(model.parameters()), DTensor) and local.device.type == place
                        if place == "cpu":
                            freed = awake - torch.cuda.memory_allocated()
                            assert local.is_pinned()
                            assert freed >= 3 * sum(p._local_tensor.nbytes for p in model.parameters())
            results[leaves] = [p.full_tensor() for p in model.parameters()]
        for stayed, left in zip(results[False], results[True], strict=True):
            assert torch.equal(stayed, left)
    finally:
        dist.destroy_process_group()
