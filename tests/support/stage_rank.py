"""One trainer rank of pushes by groups: `python stage_rank.py RANK STAGES WORLD PORT DEADLINE_S`.

Rank r is the first rank of pipeline stage r; ranks beyond share the last stage and send nothing. Each line of
input is a push: `version`, `targets` ([url, life, parallel_updates, token] each), `model` (a folder whose
tensors are dealt to the stages in blocks), and optionally `stop_at` ([stage, bucket]: say so before that
bucket, and wait for a line) or `die_at` ([stage, bucket]: end when engines wait in the middle of it). Each
line of output is what came of it.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from devices import DEVICE
from safetensors.torch import load_file

from slime.utils.http_utils import authorize
from slime.weight_sync import distributed
from slime.weight_sync.base import NamedTensors, SenderOptions, Target
from slime.weight_sync.stage_turns import StageTurns

DEADLINE_S = 30
BUCKET = 4  # tensors


def say(**what) -> None:
    print(json.dumps(what), flush=True)


def stage_tensors(model: str, stage: int, num_stages: int) -> NamedTensors:
    items = [
        item for file in sorted(Path(model).glob("*.safetensors")) for item in load_file(file, DEVICE).items()
    ]
    share = -(-len(items) // num_stages)
    return items[stage * share : (stage + 1) * share]


class StagePlace(NamedTuple):
    """Where a rank stands in the pipeline; the first rank of a stage sends."""

    stage: int = 0
    num_stages: int = 1
    is_first: bool = True


def buckets(job: dict, place: StagePlace) -> Iterator[NamedTensors]:
    own = stage_tensors(job["model"], place.stage, place.num_stages)
    for number, start in enumerate(range(0, len(own), BUCKET)):
        if place.is_first and job.get("stop_at") == [place.stage, number]:
            say(stopped=True)
            sys.stdin.readline()
        if place.is_first and job.get("die_at") == [place.stage, number]:
            distributed.dist.broadcast = die_in_broadcast
        yield own[start : start + BUCKET]


def die_in_broadcast(*args, **kwargs):
    time.sleep(0.5)  # the engines have been told, and wait
    os._exit(9)


def main(rank: int, num_stages: int, world: int, port: int, deadline_s: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    place = StagePlace(min(rank, num_stages - 1), num_stages, is_first=rank < num_stages)
    options = SenderOptions(
        "slime-x", Path("unused"), "model", rank, deadline_s=deadline_s, stage=place.stage
    )
    sender = distributed.DistributedSender(options) if place.is_first else None
    turns = StageTurns(place.stage, place.num_stages, sender, 3.0 * deadline_s)
    say(ready=True)
    for line in sys.stdin:
        job = json.loads(line)
        for url, _, _, token in job["targets"]:
            authorize(url, token)
        targets = tuple(Target(url, life, 1, (), parallel) for url, life, parallel, _ in job["targets"])
        started = time.monotonic()
        try:
            report = turns.send(job["version"], targets, buckets(job, place))
        except RuntimeError as error:
            say(error=str(error)[:300], seconds=time.monotonic() - started)
            os._exit(1)
        if report is None:
            say(silent=True)
        else:
            seconds = time.monotonic() - started
            say(**dataclasses.asdict(report), seconds=seconds)
    if sender is not None:
        sender.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:6]))
