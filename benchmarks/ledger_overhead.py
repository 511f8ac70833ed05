"""What do the ledger and the record of samples cost, of a training step?

    python benchmarks/ledger_overhead.py                # beside the step of the SmolLM2 quick start
    python benchmarks/ledger_overhead.py --shape tiny   # 576 answers of 6 tokens, the tiny quick start
    python benchmarks/ledger_overhead.py --shape large  # 512 answers of 950 tokens, a 4B step on an H200

All events of a step, whole samples and batches as they are kept until a checkpoint covers them, and the
samples as they are shown, until they lie in record.db, for each way of syncing. CPU seconds of the process,
and the seconds that the disk kept it waiting. Goals: 3% of a quick-start step, 1% of one with 4B parameters.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import torch
from record_overhead import STEP_S, _sample, cpu_seconds

from slime.record import RECORD_FILE, RecordWriter, group_entries
from slime.rollout.ledger import Ledger
from slime.utils.types import Sample, flatten_samples

# Prompts, answers of each, tokens; seconds of a step (tiny: CPU seconds of all processes); goal.
SHAPES = {
    "smollm2": ((6, 8, 30), STEP_S, 0.03),
    "tiny": ((36, 16, 6), 1.43, 0.03),
    "large": ((64, 8, 950), 47.8, 0.01),
}


def make_groups(step: int, prompts: int, copies: int, tokens: int) -> list:
    draw = random.Random(step)
    groups = [[_sample(draw, step * prompts + g, c) for c in range(copies)] for g in range(prompts)]
    for group in groups:
        for sample in group:
            sample.index = sample.group_index * copies + sample.index % copies
            if tokens != sample.response_length:
                prompt = sample.tokens[: min(45, tokens)]
                sample.tokens = prompt + [draw.randrange(150_000) for _ in range(tokens)]
                sample.rollout_log_probs = [-draw.random() for _ in range(tokens)]
                sample.loss_mask, sample.response_length = [1] * tokens, tokens
                sample.version_spans = [("run:1", 0, tokens)]
    return groups


def batch_of(groups: list) -> dict:
    samples = [sample for group in groups for sample in group]
    return {
        "tokens": [torch.tensor(s.tokens) for s in samples],
        "loss_masks": [torch.tensor(s.loss_mask, dtype=torch.int32) for s in samples],
        "rollout_log_probs": [torch.tensor(s.rollout_log_probs) for s in samples],
        "rewards": [s.reward for s in samples],
    }


def play(folder: Path, steps: list) -> None:
    """The events of all steps, as the rollout side reports them."""
    writer = RecordWriter(folder / RECORD_FILE, "run", 1 << 32, keeps_uncommitted=True)
    ledger = Ledger(writer, "settings")
    ledger.resumed(-1, -1)
    for number, (groups, batch) in enumerate(steps):
        ledger.begin(number, "run:1")
        ledger.issued(groups, from_buffer=False)
        for sample in flatten_samples(groups):
            ledger.finished(Sample(index=sample.index, group_index=sample.group_index), sample)
        ledger.consumed(groups, "trained")
        ledger.cut(number)
        writer.add("train", number, group_entries(groups, "trained"), version="run:1")
        ledger.made(number, {"batch": batch, "cursor": {}, "metrics": {}, "num_samples": 0})
        ledger.trained(number)
        if number % 5 == 4:
            ledger.committed(number)
    writer.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=tuple(SHAPES), default="smollm2")
    parser.add_argument("--steps", type=int, help="default: 50, or 4 large ones")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/ledger_overhead.json"))
    options = parser.parse_args()
    shape, whole, goal = SHAPES[options.shape]
    count = options.steps or (4 if options.shape == "large" else 50)
    steps = []
    for number in range(count):
        groups = make_groups(number, *shape)
        steps.append((groups, batch_of(groups)))
    print(f"of a step of {whole:.2f} s with {shape[0] * shape[1]} answers of {shape[2]} tokens")
    with tempfile.TemporaryDirectory(dir=".") as folder:  # a disk, where /tmp may be memory
        began = time.monotonic()
        cpu = cpu_seconds(lambda: play(Path(folder), steps)) / count
        wall = (time.monotonic() - began) / count
        size = sum(file.stat().st_size for file in Path(folder).iterdir()) / count
    share = cpu / whole
    print(f"  {1e3 * cpu:.2f} ms CPU {share:.3%}   {1e3 * wall:.2f} ms until written   {size / 1024:.0f} KiB")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"step": whole, "goal": goal, "share": share}, indent=1))
    return 0 if share <= goal else 1


if __name__ == "__main__":
    raise SystemExit(main())
