"""How much host memory does a rank need to load a mixture of experts, by model and number of ranks?

A checkpoint of random weights in many small files is made for each number of layers, in the shape of a
Qwen3 mixture with 64 experts. Ranks of the FSDP trainer load it on the CPU, where their shards are in host
memory too: the rest of the peak is what loading needs. For comparison the first rank reads the whole model
with transformers and broadcasts it, as for families whose tensors are no parts of the files'. Counted is
anonymous memory (RssAnon); pages of files that are mapped can be taken back by the system at any time.

    python benchmarks/loading_memory.py [--layers 3 6] [--ranks 1 2 4] [--file-mb 32]
"""

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slime.arguments import default_args
from slime.backends.fsdp import create_backend, loading
from slime.backends.fsdp.hf_export import hub_shapes, in_buckets
from slime.backends.shared.placed_adam import local
from slime.utils.files.safetensors_files import write_index, write_tensors
from slime.utils.models.hub_names import saved_tensors

GIB = 2**30
WAYS = ("its part", "rank 0 reads all")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 6])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--file-mb", type=int, default=32, help="size of a file of the checkpoint")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/loading_memory.json"))
    return parser.parse_args()


def make_checkpoint(folder: Path, layers: int, width: int, file_bytes: int) -> tuple[int, int]:
    """Write a model in bf16; return the number of its parameters and of its files."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=32 * width,
        hidden_size=width,
        intermediate_size=2 * width,
        moe_intermediate_size=width // 2,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=width // 16,
        num_experts=64,
        num_experts_per_tok=8,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    shapes = hub_shapes(config)
    tensors = ((name, torch.randn(shape).mul_(0.02).bfloat16()) for name, shape in shapes.items())
    weight_map: dict[str, str] = {}
    for i, bucket in enumerate(in_buckets(tensors, file_bytes, None)):
        write_tensors(folder / f"part-{i:05d}.safetensors", dict(bucket))
        weight_map.update({name: f"part-{i:05d}.safetensors" for name, _ in bucket})
    count = sum(shape.numel() for shape in shapes.values())
    write_index(folder, weight_map, 2 * count)
    return count, len(set(weight_map.values()))


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class Peak:
    """Watches the anonymous memory of this process from a thread."""

    def __init__(self) -> None:
        self.start = self.most = anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, anonymous_bytes())

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.most - self.start


def load(rank: int, world_size: int, meeting: str, model: str, way: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    if way != WAYS[0]:
        loading._parts = lambda *_: None
    from transformers import AutoModelForCausalLM  # noqa: F401 - its memory is not that of loading

    args = default_args(hf_checkpoint=model, dtype="float32", run_dir=out)
    dist.barrier()
    started, peak = time.monotonic(), Peak()
    backend = create_backend(args, rank=rank, world_size=world_size, device="cpu")
    most, took = peak.end(), time.monotonic() - started
    shard = sum(local(tensor).nbytes for _, tensor in saved_tensors(backend.model.lm))
    Path(out, f"{rank}.json").write_text(json.dumps({"peak": most, "shard": shard, "seconds": took}))
    dist.barrier()
    dist.destroy_process_group()


def measure(model: Path, ranks: int, way: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as out:
        mp.spawn(load, (ranks, f"{out}/meeting", str(model), way, out), nprocs=ranks, join=True)
        found = [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(ranks)]
    worst = max(found, key=lambda one: one["peak"])
    return {"ranks": ranks, "way": way, **worst}


def main() -> None:
    options, records = parse(), []
    print("| parameters | files | ranks | each rank reads | shard | peak | beyond the shard | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for layers in options.layers:
        with tempfile.TemporaryDirectory() as folder:
            count, files = make_checkpoint(Path(folder), layers, options.width, options.file_mb << 20)
            for ranks in options.ranks:
                for way in WAYS:
                    record = measure(Path(folder), ranks, way) | {"parameters": count, "files": files}
                    records.append(record)
                    sizes = [record["shard"], record["peak"], record["peak"] - record["shard"]]
                    cells = [f"{size / GIB:.2f} GiB" for size in sizes]
                    row = [f"{count / 1e9:.2f}B", files, ranks, way, *cells, f"{record['seconds']:.0f}"]
                    print(f"| {' | '.join(map(str, row))} |", flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(records, indent=2))


if __name__ == "__main__":
    main()
