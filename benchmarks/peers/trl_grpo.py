"""Run by trl_quickstart.py in TRL's environment: GRPO on the quick start's prompts, step times as JSON."""

import json
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

try:
    import trl
    from datasets import Dataset
except ModuleNotFoundError as error:
    sys.exit(f"{error}: use an environment that benchmarks/peers/make_trl_env.sh makes")

asked = json.loads(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(asked["model"])
model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=getattr(torch, asked["dtype"]))
rewards: list[float] = []


def last_number(text: str) -> str:
    digits = "".join(c if c.isdigit() else " " for c in text).split()
    return digits[-1] if digits else ""


def reward(prompts, completions, completion_ids, label, **kwargs):
    """As slime.cli.quickstart.rewards has it: right, and ended by itself."""
    scores = []
    for answer, ids, right in zip(completions, completion_ids, label, strict=True):
        text = answer if isinstance(answer, str) else answer[0]["content"]
        ended = len(ids) > 0 and int(ids[-1]) == tokenizer.eos_token_id
        found = text.strip() if asked["exact"] else last_number(text)
        scores.append(float(ended and found == right))
    rewards.append(sum(scores) / len(scores))
    return scores


class Times(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter())


rows = [json.loads(line) for line in Path(asked["prompts"]).read_text().splitlines()]
if asked["chat"]:
    rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
times = Times()
trainer = trl.GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=reward,
    train_dataset=Dataset.from_list(rows),
    callbacks=[times],
    args=trl.GRPOConfig(
        output_dir=str(Path(asked["out"]).with_suffix("")),
        per_device_train_batch_size=asked["num_prompts"] * asked["num_samples"],
        num_generations=asked["num_samples"],
        max_completion_length=asked["max_tokens"],
        max_steps=asked["steps"],
        learning_rate=asked["lr"],
        lr_scheduler_type="linear",
        warmup_steps=asked["warmup"],
        adam_beta1=asked["betas"][0],
        adam_beta2=asked["betas"][1],
        weight_decay=0.0,
        beta=0.0,
        epsilon=0.2,
        temperature=1.0,
        loss_type="grpo",
        bf16=asked["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=asked["seed"],
    ),
)
times.ends = [time.perf_counter()]
trainer.train()
version = f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
steps = [b - a for a, b in zip(times.ends, times.ends[1:], strict=False)]
Path(asked["out"]).write_text(json.dumps({"steps_s": steps, "rewards": rewards, "version": version}))
