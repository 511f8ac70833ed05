"""TRL's GRPOTrainer on the task of benchmarks/real_task.py: same model, prompts, reward, samples and rate.

benchmarks/real_task.py starts it, with an interpreter that has TRL; the argument is a JSON object. TRL
generates by itself, with `model.generate` or with the continuous batching of transformers. The weights are
float32 and computing is in bfloat16, as in slime's trainer. A line per step goes to metrics.jsonl.
"""

import json
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[1]))
from real_task_data import score

try:
    import trl
    from datasets import Dataset
except ModuleNotFoundError as error:
    sys.exit(f"{error}: use an environment that benchmarks/peers/make_trl_env.sh makes")

asked = json.loads(sys.argv[1])
folder = Path(asked["folder"])
on_gpu = torch.cuda.is_available()
seen: list[tuple[float, int, int]] = []  # of the batch of a step: mean reward, tokens, truncated responses


def right(prompts, completions, completion_ids, label, **kwargs):
    """Score responses as slime's run does."""
    scores = [score(made[0]["content"], truth) for made, truth in zip(completions, label, strict=True)]
    lengths = [len(ids) for ids in completion_ids]
    cut = sum(length >= asked["max_tokens"] for length in lengths)
    seen.append((sum(scores) / len(scores), sum(lengths), cut))
    return scores


class Times(TrainerCallback):
    """Writes a line when a step has ended."""

    def on_step_begin(self, args, state, control, **kwargs):
        self.begun = time.time()

    def on_step_end(self, args, state, control, **kwargs):
        reward, tokens, cut = seen[-1]
        line = {
            "step": state.global_step - 1,
            "time": time.time(),
            "reward": reward,
            "tokens": tokens,
            "truncated": cut / (asked["prompts"] * asked["samples"]),
            "reward_calls": len(seen),
        }
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


rows = [json.loads(line) for line in Path(asked["data"]).read_text().splitlines()]
rows = [{"prompt": made["prompt"], "label": made["label"]} for made in rows]
responses = asked["prompts"] * asked["samples"]
tokenizer = AutoTokenizer.from_pretrained(asked["model"])
trainer = trl.GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32),
    processing_class=tokenizer,
    reward_funcs=right,
    train_dataset=Dataset.from_list(rows[: asked["steps"] * asked["prompts"]]),
    callbacks=[Times()],
    args=trl.GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=asked["micro_batch"],
        gradient_accumulation_steps=responses // asked["micro_batch"],
        num_generations=asked["samples"],
        max_completion_length=asked["max_tokens"],
        max_steps=asked["steps"],
        learning_rate=asked["lr"],
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        beta=0.0,
        temperature=1.0,
        loss_type="grpo",
        bf16=on_gpu,
        gradient_checkpointing=False,
        use_cpu=not on_gpu,
        use_transformers_continuous_batching=asked["continuous_batching"],
        seed=asked["seed"],
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    ),
)
(folder / "begun.json").write_text(json.dumps({"time": time.time()}))
trainer.train()
(folder / "ended.json").write_text(json.dumps({"time": time.time()}))
trainer.accelerator.unwrap_model(trainer.model).to(torch.bfloat16).save_pretrained(folder / "model")
tokenizer.save_pretrained(folder / "model")
version = f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
(folder / "version.json").write_text(json.dumps(version))
