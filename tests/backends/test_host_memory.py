"""A trainer's tensors in host memory: the same place every time, and never two in one."""

import itertools

import torch
from torch import nn

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


def test_reserved_blocks_are_taken_first_and_a_refused_one_is_asked_for_again(monkeypatch):
    monkeypatch.setattr(host_memory, "BLOCK_BYTES", 4096)
    made = []

    def counting(nbytes):
        made.append(nbytes)
        if len(made) == 2:
            raise RuntimeError("no room")
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(host_memory, "_locked", counting)
    host = HostMemory()
    host.reserve([4096, 4096, 100, 9000])  # three blocks; what is larger than one is no block
    kept = [host.keep(i, torch.full((512,), float(i), dtype=torch.float64)) for i in range(4)]
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(kept))
    assert len(made) == 5  # three reserved, the refused one again, and the fourth


def test_memory_locked_ahead_comes_in_whole_blocks_and_only_where_there_is_room(monkeypatch):
    made = []
    monkeypatch.setattr(host_memory, "_locked", made.append)
    for nbytes in (2500, 1 << 62):
        host_memory.lock_ahead(nbytes, 1000, lambda: made.append("a turn of others"))
    assert made == [1000, "a turn of others"] * 3
