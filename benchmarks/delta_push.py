"""What does a push of deltas to an engine cost, against a full push of the same weights?

One engine, and the trainer's weights on the same device. Between two pushes a share of all elements changes
its lowest bit, as small learning rates do to bf16 weights. Each way (transports that the engine takes, and
deltas) makes the same pushes from the same start. Medians of wall seconds over the pushes after the first:

- send: the trainer writes the version; deltas: copies it to the host, compares, packs.
- prepare: what happens on the engine's machine while it still generates.
- pause: from pause to continue; the engine generates nothing.
- push: all of it, which the trainer waits for. Goal of deltas: at most half of the fastest full push.

After the last push of each way the engine's own checksums must be the same, or the benchmark fails.

    python benchmarks/delta_push.py --shape tiny                   # embedded engine on a CPU
    python benchmarks/delta_push.py --shape 4b                     # embedded engine on a GPU
    python benchmarks/delta_push.py --shape 4b --engine sglang --sglang-python PATH
"""

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from delta_sync import push as send_all
from safetensors.torch import load_file
from shapes import SHAPES, write_model
from weight_push import MIB, Stand, read_flags

from slime.arguments.groups.engine import ENCODINGS
from slime.catalog.transports import TRANSPORTS
from slime.liveness.stacks import watch_exit
from slime.utils.async_utils import run
from slime.utils.machine.accelerator import device_count
from slime.weight_sync.base import DeltaOptions, NamedTensors, SenderOptions, Target, check_receipt
from slime.weight_sync.transports import live_sender_of, transport_of
from slime.wire.control import EngineControl
from slime.wire.protocol import EngineInfo

GOAL = 0.5
PARTS = ("send", "prepare", "pause", "push")
FULL = {"cpu": ("shared_memory", "http_tensor", "disk"), "cuda": ("shared_memory", "cuda_ipc", "disk")}


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", default="tiny", choices=tuple(SHAPES))
    parser.add_argument("--engine", default="embedded", choices=("embedded", "sglang"))
    parser.add_argument("--model-path", type=Path, help="model folder (default: random weights of --shape)")
    parser.add_argument("--density", type=float, default=0.01, help="share of the elements that change")
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--pushes", type=int, default=4, help="of each way; the first is not counted")
    parser.add_argument("--folder", type=Path, help="where versions are written (default: a temporary one)")
    parser.add_argument("--run-dir", type=Path, help="where logs go (default: a temporary folder)")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/delta_push.json"))
    return parser.parse_known_args()


def load(model: Path) -> NamedTensors:
    device = "cuda" if device_count() else "cpu"
    files = sorted(model.glob("*.safetensors"))
    return [item for file in files for item in load_file(file, device).items()]


def move(weights: NamedTensors, density: float, seed: int) -> None:
    """Flip the lowest bit of some elements of every tensor."""
    for number, (_, tensor) in enumerate(weights):
        generator = torch.Generator(tensor.device).manual_seed(1000 * seed + number)
        flat = tensor.view(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        count = max(1, int(density * flat.numel()))
        where = torch.randint(flat.numel(), (count,), device=tensor.device, generator=generator).unique()
        flat[where] ^= 1


class Way:
    """One way of pushing to the engine: a transport, with its sender."""

    def __init__(self, name: str, control: EngineControl, info: EngineInfo, options: SenderOptions):
        self.name, self._control, self._info = name, control, info
        self.is_live = TRANSPORTS[name].live
        make = live_sender_of(name) if self.is_live else transport_of(name).make_sender
        self.sender: Any = make(options)

    def push(self, weights: NamedTensors, version: str, bucket_bytes: int) -> dict[str, float]:
        started = time.perf_counter()
        bundle = None if self.is_live else send_all(self.sender, weights, version, bucket_bytes)
        sent = time.perf_counter()
        if bundle is not None:
            run(transport_of(self.name).prepare(bundle, self._control, self._info))
        prepared = time.perf_counter()
        run(self._control.pause("abort"))
        run(self._control.flush())
        if bundle is not None:
            receipt = run(transport_of(self.name).deliver(bundle, self._control, self._info))
            check_receipt(bundle, receipt, self._control.url)
        else:
            self._send_live(weights, version, bucket_bytes)
        run(self._control.resume())
        ended = time.perf_counter()
        wire = None if bundle is None else bundle.metrics.get("perf/update_weights_wire_bytes")
        times = (sent - started, prepared - sent, ended - prepared, ended - started)
        return {**dict(zip(PARTS, times, strict=True)), "bytes": wire or sum(t.nbytes for _, t in weights)}

    def _send_live(self, weights: NamedTensors, version: str, bucket_bytes: int) -> None:
        if self._info.dialect.has_begin_end:
            run(self._control.begin_update())
        self.sender.open(version, (Target(self._control.url, 0, self._info.num_ranks, (0,)),))
        bucket: NamedTensors = []
        for item in weights:
            bucket.append(item)
            if sum(t.nbytes for _, t in bucket) >= bucket_bytes:
                self.sender.send(bucket)
                bucket = []
        if bucket:
            self.sender.send(bucket)
        failures = self.sender.finish().failures
        if self._info.dialect.has_begin_end:
            run(self._control.end_update())
        if failures:
            raise RuntimeError(f"the engine did not take the weights: {failures}")


def ways_of(info: EngineInfo) -> list[tuple[str, str]]:
    """(transport, encoding of deltas): what this engine takes from a trainer on its own device."""
    full = FULL["cuda" if device_count() else "cpu"]
    found = [(name, "") for name in full if TRANSPORTS[name].engine_needs in info.transports]
    return [*found, *(("delta", encoding) for encoding in ENCODINGS)]


def measure(options: argparse.Namespace, stand: Stand, model: Path, folder: Path) -> list[dict[str, Any]]:
    control, rows, reference = stand.engine, [], None
    info = run(control.info())
    for name, encoding in ways_of(info):
        label = f"{name} {encoding}".strip()
        place = folder / label.replace(" ", "-")
        delta = DeltaOptions(place / "local", True, encoding) if encoding else None
        settings = SenderOptions(
            stand.shm_prefix, place / "published", str(model), deadline_s=600.0, delta=delta
        )
        weights, way = load(model), Way(name, control, info, settings)
        pushes = []
        for number in range(1, options.pushes + 1):
            move(weights, options.density, number)
            version = f"{label.replace(' ', '-')}:{number}"
            pushes.append(way.push(weights, version, options.bucket_mib * MIB))
        sums = run(control.checksums())
        way.sender.close()
        reference = reference or sums
        if sums != reference:
            raise SystemExit(f"after pushes by {label} the engine holds other weights than by the others")
        later = pushes[1:] or pushes
        medians = {part: statistics.median(push[part] for push in later) for part in (*PARTS, "bytes")}
        rows.append({"way": label, **medians, "pushes": pushes})
        parts = ", ".join(f"{part} {medians[part]:.3f}" for part in PARTS)
        print(f"{label:18s} {medians['bytes'] / MIB:10.1f} MiB, seconds: {parts}", flush=True)
    return rows


def main() -> int:
    options, extra = parse()
    logging.getLogger("slime").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        device = "cuda" if device_count() else "cpu"
        model = options.model_path or write_model(options.shape, folder / "model", device=device)
        stand = Stand(read_flags(options, extra, folder, model, options.bucket_mib))
        try:
            rows = measure(options, stand, model, folder)
        finally:
            stand.close()
    full = min(row["push"] for row in rows if not row["way"].startswith("delta"))
    delta = min(row["push"] for row in rows if row["way"].startswith("delta"))
    print(f"{options.shape}, {options.engine}: delta / fastest full push {delta / full:.2f} (goal {GOAL})")
    facts = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({**facts, "flags": extra, "rows": rows}, indent=1) + "\n")
    return 0 if delta <= GOAL * full else 1


if __name__ == "__main__":
    code = main()
    watch_exit()
    sys.exit(code)
