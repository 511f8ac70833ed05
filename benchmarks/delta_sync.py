"""How much smaller and faster is a push of what changed than a push of everything?

AdamW on fp32 master weights at lr 1e-6, gradients of a language-model loss on random tokens; weights go out
in bfloat16. Two moments of a run: the first step from a bf16 checkpoint (every master weight lies exactly on
a bf16 value, so that only small weights move), and a step late in a run (master weights lie anywhere between
two bf16 values: they are placed so at random). For each encoding: bytes, seconds to encode and write, seconds
to bring the copy beside the engine to the new version, against a full checkpoint in the same call. The copy
must end up with the trainer's bits, or the benchmark fails.

Seconds are CPU seconds of all threads of this process, because the machine may
be shared; wall seconds are in the JSON.

    python benchmarks/delta_sync.py --model-path DIR    # for example SmolLM2 of the quick start
    python benchmarks/delta_sync.py                           (random weights in the shape of SmolLM2-135M)
    python benchmarks/delta_sync.py --shape tiny              (does the script work?)
"""

import argparse
import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from slime.arguments.groups.engine import ENCODINGS
from slime.liveness.stacks import watch_exit
from slime.weight_sync.base import DeltaOptions, SenderOptions
from slime.weight_sync.delta.local_copy import LocalCopy
from slime.weight_sync.delta.publication import FolderSource
from slime.weight_sync.delta.transport import DeltaSender
from slime.weight_sync.disk import DiskSender

SHAPES = {
    "smollm2-135m": dict(hidden_size=576, num_hidden_layers=30, intermediate_size=1536, vocab_size=49152),
    "tiny": dict(hidden_size=72, num_hidden_layers=2, intermediate_size=128, vocab_size=512),
}
MOMENTS = ("first step", "late step")
NamedTensors = list[tuple[str, torch.Tensor]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="smollm2-135m", choices=tuple(SHAPES))
    parser.add_argument("--model-path", help="a checkpoint; default: random weights of --shape")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--tokens", type=int, default=128, help="of the batch that gives the gradients")
    parser.add_argument("--bucket-mib", type=int, default=64, help="bytes of one bucket")
    parser.add_argument(
        "--folder", type=Path, help="where versions are written (default: a temporary folder)"
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/delta_sync.json"))
    return parser.parse_args()


# -- the trainer ---------------------------------------------------------------------------------------------


def build_model(options: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(0)
    if options.model_path:
        return AutoModelForCausalLM.from_pretrained(options.model_path, dtype=torch.float32)
    heads = dict(num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
    model = LlamaForCausalLM(LlamaConfig(**SHAPES[options.shape], **heads))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())  # as a checkpoint would have them
    return model


def spread_masters(model: torch.nn.Module) -> None:
    """Each master weight anywhere in the interval that rounds to its bf16 value."""
    with torch.no_grad():
        for parameter in model.parameters():
            # The upper 16 bits are the bf16 value; the lower ones say where between it and the next.
            bits = parameter.data.bfloat16().float().view(torch.int32)
            lower = torch.randint(-(2**15) + 1, 2**15, bits.shape, dtype=torch.int32)
            parameter.copy_((bits + lower).view(torch.float32).where(bits << 1 != 0, parameter.data))


def optimizer_step(model: torch.nn.Module, options: argparse.Namespace, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.98), weight_decay=0.0)
    tokens = torch.randint(0, model.config.vocab_size, (2, options.tokens // 2))
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def export(model: torch.nn.Module) -> NamedTensors:
    seen: set[int] = set()
    named = []
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:  # tied weights go once
            seen.add(tensor.data_ptr())
            named.append((name, tensor.detach().bfloat16()))
    return named


# -- measuring -----------------------------------------------------------------------------------------------


def timed(function: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    cpu, wall = time.process_time(), time.perf_counter()
    result = function()
    return result, {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}


def push(sender: Any, weights: NamedTensors, version: str, bucket_bytes: int) -> Any:
    bucket: NamedTensors = []
    size = 0
    for name, tensor in weights:
        nbytes = tensor.numel() * tensor.element_size()
        if bucket and size + nbytes > bucket_bytes:
            sender.send(bucket)
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += nbytes
    sender.send(bucket)
    return sender.finish(version)


def check_equal(folder: Path, weights: NamedTensors) -> None:
    held = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    wrong = [n for n, t in weights if not torch.equal(held[n].view(torch.uint8), t.view(torch.uint8))]
    if wrong or len(held) != len(weights):
        raise SystemExit(f"the copy differs from the trainer in {wrong or 'the number of tensors'}")


def measure_delta(
    before: NamedTensors, after: NamedTensors, encoding: str, folder: Path, bucket: int
) -> dict:
    options = SenderOptions(
        "none", folder / "published", "hub/name", delta=DeltaOptions(folder / "local", True, encoding)
    )
    sender, copy = DeltaSender(options), LocalCopy(folder / "local")
    source = FolderSource(folder / "published")
    push(sender, before, "bench:1", bucket)
    copy.bring_to(source)
    bundle, encoded = timed(lambda: push(sender, after, "bench:2", bucket))
    arrival, applied = timed(lambda: copy.bring_to(source))
    check_equal(arrival.folder, after)
    files = sum(file.stat().st_size for file in (folder / "published" / "delta-bench-2").glob("*.bin"))
    sender.close()
    return {
        "way": f"delta, {encoding}",
        "bytes": int(bundle.metrics["perf/update_weights_wire_bytes"]),
        "payload_bytes": files,
        "changed": bundle.metrics["perf/update_weights_density"],
        "send": encoded,
        "take": applied,
    }


def measure_full(after: NamedTensors, folder: Path, bucket: int) -> dict:
    """A full checkpoint, and a copy of it beside the engine."""
    sender = DiskSender(SenderOptions("none", folder / "full", "hub/name"))
    bundle, written = timed(lambda: push(sender, after, "bench:2", bucket))
    size = sum(file.stat().st_size for file in bundle.payload.iterdir())
    _, copied = timed(lambda: shutil.copytree(bundle.payload, folder / "full-copy"))
    shutil.rmtree(folder / "full-copy")
    sender.close()
    return {
        "way": "full",
        "bytes": size,
        "payload_bytes": size,
        "changed": None,
        "send": written,
        "take": copied,
    }


def measure(model: torch.nn.Module, moment: str, options: argparse.Namespace, folder: Path) -> list[dict]:
    if moment == "late step":
        spread_masters(model)
    before = export(model)
    optimizer_step(model, options, seed=1)
    after = export(model)
    bucket = options.bucket_mib << 20
    rows = [measure_full(after, folder, bucket)]
    rows += [measure_delta(before, after, encoding, folder / encoding, bucket) for encoding in ENCODINGS]
    return [{"moment": moment, **row} for row in rows]


def show(rows: list[dict], num_elements: int, lr: float) -> None:
    print(f"\n{num_elements:,} weights in bfloat16, lr {lr:g}; CPU seconds\n")
    print(f"{'':12s} {'':18s} {'changed':>9s} {'bytes':>13s} {'of full':>8s} {'send s':>8s} {'take s':>8s}")
    full = rows[0]["bytes"]
    for row in rows:
        changed = "" if row["changed"] is None else f"{row['changed']:.3%}"
        print(
            f"{row['moment']:12s} {row['way']:18s} {changed:>9s} {row['bytes']:>13,} "
            f"{row['bytes'] / full:>8.2%} {row['send']['cpu_s']:>8.2f} {row['take']['cpu_s']:>8.2f}"
        )


def main() -> None:
    options = parse()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    model = build_model(options)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = [
            row for moment in MOMENTS for row in measure(model, moment, options, Path(folder) / moment[:4])
        ]
    num_elements = sum(p.numel() for p in model.parameters())
    show(rows, num_elements, options.lr)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    name = options.model_path and Path(options.model_path).name
    facts = {"model": name or options.shape, "weights": num_elements, "lr": options.lr, "dtype": "bfloat16"}
    options.json.write_text(
        json.dumps({**facts, "threads": torch.get_num_threads(), "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
    watch_exit()
