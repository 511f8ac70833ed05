"""TRL's GRPO on the task of benchmarks/colocated_grpo.py, with its own generation: seconds of each step.

Run it with an interpreter that has TRL, beside colocated_grpo.py with the same shape, prompts and tokens:

    python benchmarks/peers/trl_colocated.py --shape 0.6b --output-tokens 512 [--continuous-batching]
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[1]))
from colocated_grpo import LEARNING_RATES, VOCAB
from shapes import write_model

from slime.cli.quickstart.tiny import CHARACTERS

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--shape", default="tiny", choices=tuple(LEARNING_RATES))
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--prompts", type=int, default=32, help="per step, 8 answers each")
parser.add_argument("--output-tokens", type=int, default=128)
parser.add_argument("--micro-batch", type=int, default=32, help="answers in one forward pass of training")
parser.add_argument("--continuous-batching", action="store_true")
parser.add_argument("--json", type=Path, default=Path("benchmarks/results/trl_colocated.json"))
options = parser.parse_args()
try:
    import trl
    from datasets import Dataset
except ModuleNotFoundError as error:
    sys.exit(f"{error}: use an environment that benchmarks/peers/make_trl_env.sh makes")
rewards: list[float] = []
tokens: list[int] = []


def even_ids(prompts, completions, completion_ids, **kwargs):
    """The share of even token ids in the answer."""
    scores = [sum(int(token) % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]
    rewards.append(sum(scores) / len(scores))
    tokens.append(sum(map(len, completion_ids)))
    return scores


class Times(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter())
        print(f"step {len(self.ends)} after {self.ends[-1] - begun:.1f} s", flush=True)


folder = Path(tempfile.mkdtemp())
on_gpu = torch.cuda.is_available()
model_path = write_model(
    options.shape, folder / "model", device="cuda" if on_gpu else "cpu", vocab_size=VOCAB
)
rng = random.Random(0)
count = options.steps * options.prompts
rows = [{"prompt": "".join(rng.choices(CHARACTERS, k=32))} for _ in range(count)]
answers = options.prompts * 8
times = Times()
trainer = trl.GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16 if on_gpu else torch.float32),
    processing_class=AutoTokenizer.from_pretrained(model_path),
    reward_funcs=even_ids,
    train_dataset=Dataset.from_list(rows),
    callbacks=[times],
    args=trl.GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=answers // options.micro_batch,
        num_generations=8,
        max_completion_length=options.output_tokens,
        max_steps=options.steps,
        learning_rate=LEARNING_RATES[options.shape],
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        loss_type="grpo",
        bf16=on_gpu,
        gradient_checkpointing=False,
        use_cpu=not on_gpu,
        use_transformers_continuous_batching=options.continuous_batching,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    ),
)
begun = time.perf_counter()
trainer.train()
ends = [begun, *times.ends]
steps = [b - a for a, b in itertools.pairwise(ends)]
version = f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
report = {"steps_s": steps, "rewards": rewards, "tokens": tokens, "version": version}
print(json.dumps(report))
options.json.parent.mkdir(parents=True, exist_ok=True)
options.json.write_text(json.dumps(report, indent=1) + "\n")
