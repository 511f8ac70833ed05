"""Copies in the memory of several machines, with real processes and folders that stand for the machines."""

import shutil

import torch.distributed as dist
import torch.multiprocessing as mp
from patience import PATIENCE_S

from slime.utils.files.checksums import files_below
from slime.utils.files.machine_copies import CopyPlace, complete, make_room, spread
from slime.utils.machine.ports import hold_port

MACHINES = (0, 0, 1, 2)  # of four ranks


def write_and_lose(rank, folder, port, answers):
    """All ranks write; machine 1 is lost, and one file of machine 2 is cut short; then all is there again."""
    meeting = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=len(MACHINES))
    place = CopyPlace(folder / "state", MACHINES)
    make_room(place, rank)
    (place.of(rank) / "sub").mkdir(exist_ok=True)
    (place.of(rank) / "sub" / f"{rank}.distcp").write_bytes(bytes([rank]) * (1000 + rank))
    every = [None] * len(MACHINES)
    dist.all_gather_object(every, spread(place, rank))
    files = {name: record for of_machine in every for name, record in of_machine.items()}
    held = files_below(place.of(rank))
    dist.barrier()
    if rank == 2:
        shutil.rmtree(place.of(rank))
    if rank == 3:
        (place.of(rank) / "sub" / "3.distcp").write_bytes(b"cut")
    dist.barrier()
    lost = complete(place, rank, files)
    whole = all(
        (place.of(rank) / "sub" / f"{r}.distcp").read_bytes() == bytes([r]) * (1000 + r) for r in range(4)
    )
    dist.barrier()
    if rank in (0, 2, 3):
        (place.of(rank) / "sub" / "1.distcp").unlink()
    dist.barrier()
    answers.put((rank, held, lost, whole, complete(place, rank, files)))
    dist.destroy_process_group()


def test_a_lost_machine_and_a_damaged_file_are_made_good_by_the_others(tmp_path):
    context = mp.get_context("spawn")
    answers = context.Queue()
    with hold_port("127.0.0.1") as held:
        port = held.getsockname()[1]
        ranks = [context.Process(target=write_and_lose, args=(r, tmp_path, port, answers)) for r in range(4)]
        for rank in ranks:
            rank.start()
        found = sorted(answers.get(timeout=PATIENCE_S) for _ in ranks)
    for rank in ranks:
        rank.join(PATIENCE_S)
    names = [f"sub/{rank}.distcp" for rank in range(4)]
    held = [answer[1] for answer in found]
    assert held == [[names[0], names[1], names[3]]] * 2 + [names[:3], names[2:]], (
        "its own and its neighbour's"
    )
    assert all(lost == [] and whole for _, _, lost, whole, _ in found)
    assert {tuple(nowhere) for *_, nowhere in found} == {(f"{names[1]}: the file is missing",)}
