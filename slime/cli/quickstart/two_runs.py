"""The flags of the two training runs of a quick start: the SFT warm-up and the RL run."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from slime.arguments import Args
from slime.arguments.core.draft import COMMAND_LINE
from slime.cli.quickstart.tasks import ADDITION, SORT_DIGITS, DataFiles, Task
from slime.utils.machine.own_command import as_typed

# The user's flags that describe the machine. The warm-up gets only these; the RL run gets all flags.
MACHINE_FLAGS = (
    "--actor-num-gpus-per-node",
    "--actor-num-nodes",
    "--backend",
    "--dtype",
    "--runtime",
    "--train-backend",
    "--trainer-threads",
)


_DEFAULT_CONCURRENCY = 512  # the default of --sglang-server-concurrency

# The first lines of the run.yaml that a user continues with, and what to put there.
_CHANGE_THESE = {
    "hf_checkpoint": "your model: a Hugging Face folder, or a name on the hub",
    "prompt_data": "your prompts: jsonl, json, csv, parquet, or hf:openai/gsm8k#main:train",
    "input_key": "the column of the prompt",
    "label_key": "the column of the label",
    "custom_rm_path": "your reward: my_file.py:my_function",
    "eval_config": "your held-out questions; or remove this and eval-interval",
}
_MAX_PROMPTS = 50_000  # written within seconds, and far more than a quick start needs


@dataclass(frozen=True, slots=True)
class WarmUp:
    """SFT: each chunk is one rollout of the data source, trained on in `steps_per_chunk` optimizer steps."""

    num_chunks: int
    steps_per_chunk: int
    batch_size: int
    lr: float

    @property
    def num_steps(self) -> int:
        return self.num_chunks * self.steps_per_chunk

    @property
    def num_samples(self) -> int:
        return self.num_steps * self.batch_size


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings that differ between the quick-start models."""

    model: str
    task: Task
    warm_up: WarmUp | None  # None: the model is already trained
    flags: dict[str, float]  # of the RL run
    precision: tuple[str, ...]  # flags of both runs
    saves_model: bool  # False for a large model: a checkpoint is three times its size

    @property
    def num_rl_prompts(self) -> int:
        """Return how many prompts give every rollout fresh ones; a very long run sees prompts again."""
        needed = self.flags["num-rollout"] * self.flags["over-sampling-batch-size"]
        return min(int(needed), _MAX_PROMPTS)

    def shortened_to(self, num_rollout: int) -> "Recipe":
        """Return the recipe with another number of RL steps; warm-up and evaluations shrink with it."""
        warm_up = min(self.flags["lr-warmup-iters"], num_rollout // 2)
        interval = _even_interval(num_rollout, int(self.flags["eval-interval"]))
        own = {"num-rollout": num_rollout, "lr-warmup-iters": warm_up, "eval-interval": interval}
        return replace(self, flags=self.flags | own)


RECIPES = {
    "tiny": Recipe(
        model="tiny",
        task=SORT_DIGITS,
        warm_up=WarmUp(num_chunks=20, steps_per_chunk=20, batch_size=64, lr=4e-3),
        flags={
            "num-rollout": 50,
            "rollout-batch-size": 32,
            # The filter may drop four groups whose responses are all correct or all wrong.
            "over-sampling-batch-size": 36,
            "n-samples-per-prompt": 16,
            "lr": 6e-4,
            "min-lr": 6e-5,
            "lr-warmup-iters": 5,
            "eval-interval": 25,
            "max-tokens-per-gpu": 8192,
        },
        precision=("--dtype", "float32"),
        saves_model=True,
    ),
    "smollm2": Recipe(
        model="smollm2",
        task=ADDITION,
        warm_up=None,
        flags={
            "num-rollout": 18,
            "rollout-batch-size": 6,
            "over-sampling-batch-size": 6,
            "n-samples-per-prompt": 8,
            "lr": 2e-5,
            "min-lr": 2e-5,
            "lr-warmup-iters": 2,
            "eval-interval": 9,
            "max-tokens-per-gpu": 4096,  # a whole step is one micro-batch, in which prompts are shared
        },
        precision=("--dtype", "auto"),  # the model is in bfloat16, which is slow on some CPUs
        saves_model=False,
    ),
}


def build_sft_argv(
    recipe: Recipe,
    *,
    checkpoint: Path | str,
    files: DataFiles,
    run_dir: Path,
    seed: int,
    extra: Iterable[str] = (),
) -> list[str]:
    """Return the flags of the warm-up, which saves a Hugging Face folder after each chunk."""
    warm_up = recipe.warm_up
    assert warm_up is not None and files.sft is not None, f"{recipe.model} has no warm-up"
    settings = {
        "hf-checkpoint": checkpoint,
        "run-dir": run_dir,
        "seed": seed,
        "rollout-seed": seed,
        "prompt-data": files.sft,
        "input-key": "messages",
        "loss-mask-type": "qwen",
        "rollout-function-path": "slime.rollout.sft_rollout.generate_rollout",
        "num-rollout": warm_up.num_chunks,
        "rollout-batch-size": warm_up.steps_per_chunk * warm_up.batch_size,
        "global-batch-size": warm_up.batch_size,
        "loss-type": "sft_loss",
        "lr": warm_up.lr,
        "min-lr": warm_up.lr / 20,
        "lr-decay-style": "cosine",
        "lr-warmup-iters": warm_up.num_steps // 20,
        "weight-decay": 0.0,
        "adam-beta2": 0.99,
        "max-tokens-per-gpu": recipe.flags["max-tokens-per-gpu"],
        "trainer-threads": 1,  # steps are small, and the next chunk is tokenised meanwhile
    } | _saving(run_dir, warm_up.num_chunks)
    switches = ["debug-train-only", "calculate-per-token-loss", "use-dynamic-batch-size"]
    switches.append("disable-compute-advantages-and-returns")
    return [*_as_argv(settings, switches), *recipe.precision, *machine_flags(extra)]


def build_rl_argv(
    recipe: Recipe,
    *,
    checkpoint: Path | str,
    files: DataFiles,
    run_dir: Path,
    seed: int,
    control: bool = False,
    estimator: str = "grpo",
    extra: Iterable[str] = (),
) -> list[str]:
    """Return the flags of the RL run: recipe, estimator's preset, then `extra`, so that the user wins."""
    task = recipe.task
    settings: dict[str, object] = {
        "hf-checkpoint": checkpoint,
        "run-dir": run_dir,
        "seed": seed,
        "rollout-seed": seed,
        "prompt-data": files.rl,
        "input-key": "prompt",
        "label-key": "label",
        "custom-rm-path": task.control_path if control else task.reward_path,
        "dynamic-sampling-filter-path": (
            "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback"
        ),
        "rollout-max-response-len": task.max_response_len,
        "rollout-temperature": 1.0,
        "advantage-estimator": estimator,
        "eps-clip": 0.2,
        "lr-decay-style": "linear",
        "weight-decay": 0.0,
        "adam-beta1": 0.9,
        "adam-beta2": 0.99,
        "eval-config": files.eval_config,
        **recipe.flags,
    }
    in_flight = recipe.flags["over-sampling-batch-size"] * recipe.flags["n-samples-per-prompt"]
    if in_flight > _DEFAULT_CONCURRENCY:  # a few queued requests would take as long as all others
        settings["sglang-server-concurrency"] = in_flight
    if recipe.saves_model:
        settings |= _saving(run_dir, int(recipe.flags["num-rollout"]))
    switches = ["use-dynamic-batch-size", "rollout-skip-special-tokens", "rollout-shuffle"]
    if task.chat:
        switches.append("apply-chat-template")
    return [
        *_as_argv(settings, switches),
        *recipe.precision,
        *preset(estimator, recipe.model).split(),
        *extra,
    ]


def write_run_file(args: Args, path: Path) -> None:
    """Write the RL run as a file for `slime train --config`, with its own run folder, which it resumes."""
    values = args.to_dict(hide_secrets=True)
    given = {name: value for name, value in values.items() if args.sources.get(name) == COMMAND_LINE}
    for name in ("config", "print_config"):
        given.pop(name, None)
    own = path.parent.absolute() / "mine"
    given |= {"run_dir": own, "save": own / "checkpoints", "load": own / "checkpoints"}
    given["save_hf"] = own / "hf-{rollout_id}"
    lines = [
        f"# The RL run of this quick start. Change it, then:  {as_typed('train', '--config', path)}",
        f"# You can set every flag of `{as_typed('train', '--help')}` here.",
    ]
    for name in sorted(given, key=lambda name: (*_CHANGE_THESE, name).index(name)):
        value = given[name]
        if isinstance(value, Path) or (isinstance(value, str) and Path(value).exists()):
            value = str(Path(value).absolute())
        text = yaml.safe_dump(value, width=1000, default_flow_style=True, allow_unicode=True)
        hint = f"    # {_CHANGE_THESE[name]}" if name in _CHANGE_THESE else ""
        lines.append(f"{name.replace('_', '-')}: {text.strip().removesuffix('...').strip()}{hint}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _saving(run_dir: Path, last: int) -> dict[str, object]:
    """Return flags that save a checkpoint at the end, and the model as a Hugging Face folder."""
    return {"save": run_dir / "checkpoints", "save-interval": last, "save-hf": run_dir / "hf-{rollout_id}"}


def machine_flags(extra: Iterable[str]) -> list[str]:
    """Return the user's flags about the machine: `--runtime ray --lr 1e-4` -> `--runtime ray`."""
    kept: list[str] = []
    keep = False
    for word in extra:
        keep = word.partition("=")[0] in MACHINE_FLAGS if word.startswith("--") else keep
        kept += [word] if keep else []
    return kept


def _even_interval(num_steps: int, longest: int) -> int:
    """Return the largest interval from `longest` down to half of it that divides the run, else the run."""
    fits = (interval for interval in range(longest, longest // 2, -1) if num_steps % interval == 0)
    return next(fits, num_steps)


def _as_argv(settings: dict[str, object], switches: Iterable[str]) -> list[str]:
    pairs = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return pairs + [f"--{name}" for name in switches]


# Flags of an estimator that differ from GRPO's.
PRESETS = {
    "grpo": "",
    "gspo": "",
    "cispo": "--eps-clip 1.0 --eps-clip-high 4.0",
    "dr_grpo": "",
    "rloo": "",
    "reinforce_plus_plus": "--normalize-advantages",
    "reinforce_plus_plus_baseline": "--normalize-advantages",
    "ppo": "--critic-lr 1e-3",
}
_FOR_TINY = ("cispo", "ppo")  # presets for the tiny model only


def preset(estimator: str, model: str) -> str:
    """Return the flags of the estimator's preset; empty if it needs none beyond GRPO's recipe."""
    return "" if estimator in _FOR_TINY and model != "tiny" else PRESETS.get(estimator, "")


def describe(estimator: str, model: str) -> str:
    """Return one line for the screen: `Preset of ppo: --critic-lr 1e-3`."""
    if estimator not in PRESETS:
        return f"Preset of {estimator}: none; the recipe of grpo is used."
    return f"Preset of {estimator}: {preset(estimator, model) or 'the recipe of grpo, unchanged'}."
