"""Runs one part of an SGLang server that spans two hosts; the first part also pushes weights to the server.

`python part_of_engine.py NODE HOST MEETING_POINT FOLDER`: models are in `FOLDER/old` and `FOLDER/new`. The
first part writes what it saw to `FOLDER/seen.json`; both end when their stdin does.
"""

import dataclasses
import json
import sys
from pathlib import Path

from engine_under_test import small_sglang_plan

from slime.engines.engine_process import EngineServer
from slime.utils.async_utils import run

PROMPT = [10, 20, 30, 40, 50]


def start(node: int, host: str, meeting_point: str, folder: Path) -> EngineServer:
    changes = {"tensor_parallel": 2, "host": host, "node": node, "num_nodes": 2}
    plan = small_sglang_plan("engine", folder / "old", folder / f"part-{node}.log", **changes)
    env = {**plan.env, "SGLANG_HOST_IP": host}
    server = EngineServer(dataclasses.replace(plan, env=env, start_timeout_s=1800.0))
    server.launch(meeting_point)
    return server


def push_by_every_way(url: str, host: str, folder: Path) -> dict[str, float]:
    """Return, by transport, how far log-probs are from those of the model that was pushed."""
    from engine_under_test import EngineUnderTest, largest_difference, load_model, plain_log_probs

    from slime.weight_sync.base import SenderOptions, Target
    from slime.weight_sync.distributed import DistributedSender
    from slime.weight_sync.transports import transport_of

    engine = EngineUnderTest(url, folder / "old", None, "")
    models = {name: load_model(folder / name) for name in ("old", "new")}
    options = SenderOptions("slime-none", folder / "weights", str(folder / "old"), host=host)

    def difference(model: str) -> float:
        made = engine.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
        return largest_difference(made.log_probs, plain_log_probs(models[model], PROMPT, made.ids))

    seen = {"ranks": engine.can.num_ranks, "as loaded": difference("old")}
    for name, model in (("http_tensor", "new"), ("disk", "old"), ("distributed", "new")):
        run(engine.control.pause("retract"))
        run(engine.control.flush())
        items = list(models[model].state_dict().items())
        if name == "distributed":
            live = DistributedSender(options)
            run(engine.control.begin_update())
            live.open(name, (Target(url, 0, engine.can.num_ranks, ()),))
            live.send(items[: len(items) // 2])
            live.send(items[len(items) // 2 :])
            assert live.finish().failures == {}
            run(engine.control.end_update())
            live.close()
        else:
            sender = transport_of(name).make_sender(options)
            sender.send(items)
            run(transport_of(name).deliver(sender.finish(name), engine.control, engine.can))
            sender.close()
        run(engine.control.resume())
        assert run(engine.control.version()) == name
        seen[name] = difference(model)
    sums = run(engine.control.checksums())
    return {**seen, "ranks with checksums": len({key.partition(":")[0] for key in sums})}


def main() -> None:
    node, host, meeting_point, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
    server = start(node, host, meeting_point, folder)
    url = server.wait_ready()
    if node == 0:
        part = folder / "seen.part"
        part.write_text(json.dumps(push_by_every_way(url, host, folder)))
        part.rename(folder / "seen.json")
    print(sys.stdin.read(), server.wait_end())


if __name__ == "__main__":
    main()
