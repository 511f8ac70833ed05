"""Tasks other than RL: `slime sft`, `dpo`, `reward-model`, `distill` and `eval` are runs with preset flags.

The user's flags, in a file or on the command line, override presets. `TASKS` lists all tasks; the functions
of `slime.api` use it, too.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.arguments import Args
from slime.arguments.core.draft import Draft, Refused
from slime.arguments.core.flag import name_of, option_of
from slime.cli import train
from slime.data.prompt_sources import read_rows
from slime.utils.files.run_file import LAST_MODEL
from slime.utils.machine.own_command import as_typed
from slime.utils.models.model_config import context_of

_BATCH = 16  # rows of one optimizer step
_LORA_LR = 10  # adapters learn with a rate this many times that of the whole model
_SFT = "slime.rollout.sft_rollout.generate_rollout"
_PAIRS = "slime.rollout.preference_rollout.generate_rollout"
_TEACHER = "slime.rollout.on_policy_distillation"
_MESSAGES = ("messages",)
_COMPLETIONS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"))
_TEXT = ("text",)
_CHOICES = ("chosen", "rejected")
_PROMPTS = ("input", "prompt", "question", "problem", "query", "messages")
_LABELS = ("label", "answer", "solution", "target")
_TRAINS_ON_ROWS = {
    "debug_train_only": True,  # nothing is generated: no engine starts
    "num_epoch": 1,
    "rollout_shuffle": True,
    "lr_decay_style": "cosine",
    "lr_warmup_fraction": 0.03,
}
# Presets that a user's flag with another name replaces.
_REPLACED_BY = {
    "num_epoch": ("num_rollout",),
    "lr_warmup_fraction": ("lr_warmup_iters",),
    "eval_temperature": ("rollout_temperature", "n_samples_per_eval_prompt"),
}

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Option:
    """A short option of a task, and the flag of `slime train` that it stands for."""

    flag: str
    metavar: str
    help: str
    unless: str | None = None  # the name of a flag without which the option is required

    @property
    def name(self) -> str:
        return name_of(self.flag)


_MODEL = Option("--hf-checkpoint", "MODEL", "the model: a folder, a hub id, or the folder of an earlier run")
_OUT = Option("--run-dir", "RUN", "folder of the run; the trained model is in RUN/model [runs/MODEL-TASK]")


@dataclass(frozen=True, slots=True)
class Task:
    """One task. `flags`: preset values; `more`: presets that depend on what the user gave and on the rows."""

    command: str
    help: str
    data: Option
    flags: Mapping[str, Any]
    more: Callable[[Draft, Sequence[Row]], Mapping[str, Any]]
    extra: Mapping[str, Option]  # further short options
    saves: bool = True

    @property
    def options(self) -> dict[str, Option]:
        return {"--model": _MODEL, "--data": self.data, **self.extra, "--out": _OUT}

    def preset(self, draft: Draft) -> dict[str, Any]:
        """Return the preset values. Refused names an option that the user must give."""
        missing = [
            f"{option.flag} is required: {option.help}."
            for option in self.options.values()
            if option is not _OUT and not getattr(draft, option.name)
            if not (option.unless and getattr(draft, option.unless))
        ]
        if missing:
            raise Refused(missing)
        values = {**self.flags, **self.more(draft, _first_rows(self, draft))}
        if self.saves:
            folder = draft.run_dir or f"runs/{Path(draft.hf_checkpoint).name}-{self.command}"
            values["run_dir"] = folder
            values["save"] = f"{folder}/checkpoints"
            values["save_hf"] = f"{folder}/{LAST_MODEL}-{{rollout_id}}"
        given = {name for name, others in _REPLACED_BY.items() if any(map(draft.was_given, others))}
        return {name: value for name, value in values.items() if name not in given}

    def flags_of(self, words: Sequence[str]) -> list[str]:
        """Translate a command line of this task into one of `slime train`."""
        found: list[str] = []
        datasets: list[str] = []
        option = None
        for word in words:
            if word.startswith("--"):
                option, equals, value = word.partition("=")
                known = self.options.get(option)
                is_named = known is not None and known.name == "eval_prompt_data"
                if is_named and equals:
                    datasets += _named_dataset(value)
                elif not is_named:
                    found.append(f"{known.flag if known else option}{equals}{value}")
            elif option == "--data" and self.data.name == "eval_prompt_data":
                datasets += _named_dataset(word)
            else:
                found.append(model_folder(word) if option in ("--model", "--teacher") else word)
        return [*found, *([self.data.flag, *datasets] if datasets else [])]

    def speller(self, words: Sequence[str]) -> Callable[[str], str]:
        """Return a function that writes the short options into a message, except for flags in `words`."""
        typed = {word.partition("=")[0] for word in words}
        shorter = {o.flag: short for short, o in self.options.items() if o.flag not in typed}
        # These folders are below --out, unless the user named them.
        shorter |= {flag: "--out" for flag in ("--save", "--save-hf") if self.saves and flag not in typed}

        def spell(message: str) -> str:
            return re.sub(r"--[\w-]+", lambda match: shorter.get(match[0], match[0]), message)

        return spell

    def render_help(self) -> str:
        options = self.options.items()
        short = " ".join(f"{name} {o.metavar}" for name, o in options if o is not _OUT)
        lines = [f"usage: slime {self.command} {short} [--out RUN] [flags of slime train]", "", self.help, ""]
        lines += [f"  {f'{name} {o.metavar}':<24} {o.help} ({o.flag})" for name, o in options]
        lines += ["", "The command is `slime train` with these flags; your flags override them:"]
        lines += [f"  {option_of(name)}: {value}" for name, value in self.flags.items()]
        lines += ["", f"Every flag of `{as_typed('train', '--help')}` is accepted; --dry-run only checks,"]
        return "\n".join([*lines, "--print-config shows every value and where it came from."])

    def main(self, argv: Sequence[str] | None = None, *, then: Callable[[Args], None] | None = None) -> int:
        """Run the task from a command line; afterwards call `then` with the settings of the run."""
        words = list(sys.argv[1:] if argv is None else argv)
        if {"-h", "--help"} & set(words):
            print(self.render_help())
            raise SystemExit(0)
        ended: list[Args] = []

        def run(args: Args) -> None:
            train.run_loop(args)
            ended.append(args)

        code = train.main(
            self.flags_of(words),
            train=run,
            preset=self.preset,
            spell=self.speller(words),
            command=self.command,
        )
        if then is not None:
            for args in ended:
                then(args)
        return code


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def model_folder(model: str) -> str:
    """Return the last model of a run, given its folder; return anything else unchanged."""
    last = Path(model).expanduser() / LAST_MODEL
    is_run = (last / "config.json").is_file() and not (last.parent / "config.json").is_file()
    return str(last.resolve()) if is_run and model else model


def _named_dataset(word: str) -> list[str]:
    """Split `math=data/math.jsonl` into name and file; without a name it is that of the file."""
    name, equals, path = word.partition("=")
    if equals and "/" not in name:
        return [name, path]
    return [re.split("[#:]", Path(word).stem)[0], word]


def _first_rows(task: Task, draft: Draft) -> list[Row]:
    """Return the first rows of the data, up to one that cannot be read, which a later check reports."""
    data = getattr(draft, task.data.name)
    sources = data[1::2] if data and task.data.name == "eval_prompt_data" else data
    rows: list[Row] = []
    with contextlib.suppress(ValueError, OSError):
        rows.extend(row for _, row in itertools.islice(read_rows(sources or ()), _BATCH))
    return rows


def _fitting(draft: Draft, data: str, rows: Sequence[Row], *known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the first group of columns that the rows have; () without rows, or if the user named columns.

    ValueError: no group fits.
    """
    if not rows or any(map(draft.was_given, ("input_key", "label_key", "prompt_template"))):
        return ()
    found = next((names for names in known if rows[0].keys() >= set(names)), None)
    if found is None:
        file = (
            " ".join(getattr(draft, name_of(data))[1::2]) if "eval" in data else getattr(draft, name_of(data))
        )
        columns = f"the columns {', '.join(map(repr, rows[0]))}" if rows[0] else "a first row without columns"
        wanted = "; ".join(" and ".join(names) for names in known)
        raise ValueError(
            f"{data} {file} has {columns}, and none of these are there: "
            f"{wanted}. Rename a column, or name it with --input-key and --label-key."
        )
    return found


def _step(
    draft: Draft, rows: Sequence[Row], lr: float, prompts: int = _BATCH, samples: int = 1
) -> dict[str, Any]:
    """Return learning rate and batch: one optimizer step per rollout, of at most all rows."""
    samples = draft.n_samples_per_prompt if draft.was_given("n_samples_per_prompt") else samples
    size = draft.global_batch_size // samples if draft.global_batch_size else prompts
    batch = min(size, len(rows)) if rows and not draft.global_batch_size else size
    return {"lr": lr * _LORA_LR if draft.lora_rank else lr, "rollout_batch_size": max(batch, 1)}


def _sft(draft: Draft, rows: Sequence[Row]) -> dict[str, Any]:
    names = _fitting(draft, "--prompt-data", rows, _MESSAGES, *_COMPLETIONS, _TEXT)
    found = dict(zip(("input_key", "label_key"), names, strict=False))
    plain = names == _TEXT or (len(names) == 2 and _is_text(rows, names) and _lacks_template(draft))
    return {**found, **({"loss_mask_type": "text"} if plain else {}), **_step(draft, rows, 1e-5)}


def _pairs(lr: float) -> Callable[[Draft, Sequence[Row]], dict[str, Any]]:
    def more(draft: Draft, rows: Sequence[Row]) -> dict[str, Any]:
        names = _fitting(draft, "--prompt-data", rows, _CHOICES)
        found: dict[str, Any] = dict(zip(("input_key", "label_key"), names, strict=False))
        if names and "prompt" in rows[0]:
            found["metadata_columns"] = ["prompt"]
        plain = names and _is_text(rows, ("prompt", *names)) and _lacks_template(draft)
        return {**found, **({"loss_mask_type": "text"} if plain else {}), **_step(draft, rows, lr)}

    return more


def _distill(draft: Draft, rows: Sequence[Row]) -> dict[str, Any]:
    found = {**_asked(draft, "--prompt-data", rows), **_step(draft, rows, 1e-5, prompts=8, samples=4)}
    if draft.opd_teacher_load is None:  # the teacher runs on a server
        return found | {"opd_type": "engine", "custom_rm_path": f"{_TEACHER}.reward_func"}
    if draft.rm_url is not None and not (draft.custom_rm_path or draft.rm_type or draft.opd_type):
        raise ValueError(
            f"--opd-teacher-load {draft.opd_teacher_load} and --rm-url {draft.rm_url} both name a teacher: "
            "give one of them."
        )
    teacher = {"opd_type": "trainer", "custom_rm_path": f"{_TEACHER}.zero_reward"}
    return found | teacher | ({} if draft.opd_type == "engine" else {"opd_kl": "full"})


def _eval(draft: Draft, rows: Sequence[Row]) -> dict[str, Any]:
    rewards = ("rm_type", "custom_rm_path", "eval_config", "env", "eval_function_path")
    in_rows = any(isinstance(row.get("metadata"), dict) and "rm_type" in row["metadata"] for row in rows)
    if not in_rows and not any(getattr(draft, name) for name in rewards):
        reward = "--rm-type NAME (math, f1, ...), or --custom-rm-path file.py:function"
        raise ValueError(f"no reward is given, so responses cannot be scored: {reward}.")
    return _asked(draft, "--eval-prompt-data", rows)


def _asked(draft: Draft, data: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the columns of the prompts, and the response length limit."""
    context = context_of(draft.hf_checkpoint) or 2048
    found: dict[str, Any] = {"rollout_max_response_len": min(1024, context // 2)}
    if draft.eval_config is not None or draft.eval_input_key is not None:
        return found
    names = _fitting(draft, data, rows, *((name,) for name in _PROMPTS))
    label = next((name for name in _LABELS if names and name in rows[0]), None)
    if names:
        found["input_key"] = names[0]
        found["apply_chat_template"] = isinstance(rows[0][names[0]], list)
    return found | ({"label_key": label} if label else {})


def _is_text(rows: Sequence[Row], names: Sequence[str]) -> bool:
    return all(isinstance(rows[0].get(name), str) for name in names)


def _lacks_template(draft: Draft) -> bool:
    """Return whether a local model has no chat template; False for a hub id, which is not looked up."""
    folder = Path(draft.hf_checkpoint).expanduser()
    config = folder / "tokenizer_config.json"
    templates = [*folder.glob("chat_template*"), *folder.glob("additional_chat_templates")]
    return config.is_file() and not templates and '"chat_template"' not in config.read_text(encoding="utf-8")


_LIST = (
    Task(
        "sft",
        "Supervised fine-tuning on conversations, or on prompts with their completions.",
        Option(
            "--prompt-data",
            "FILE",
            "rows with messages; prompt and completion; or text (.jsonl, .csv, .parquet, hf:OWNER/NAME)",
        ),
        {
            "rollout_function_path": _SFT,
            "loss_type": "sft_loss",
            "calculate_per_token_loss": True,
            "compute_advantages_and_returns": False,
            **_TRAINS_ON_ROWS,
        },
        _sft,
        {},
    ),
    Task(
        "dpo",
        "Direct preference optimisation on pairs of a preferred and a rejected response.",
        Option(
            "--prompt-data",
            "FILE",
            "rows with chosen and rejected, and prompt where both are responses alone",
        ),
        {"rollout_function_path": _PAIRS, "loss_type": "dpo_loss", **_TRAINS_ON_ROWS},
        _pairs(1e-6),
        {},
    ),
    Task(
        "reward-model",
        "A Bradley-Terry reward model, trained on pairs of a preferred and a rejected response.",
        Option(
            "--prompt-data",
            "FILE",
            "rows with chosen and rejected, and prompt where both are responses alone",
        ),
        {"rollout_function_path": _PAIRS, "loss_type": "rm_loss", **_TRAINS_ON_ROWS},
        _pairs(1e-5),
        {},
    ),
    Task(
        "distill",
        "On-policy distillation: the model responds to prompts and learns from a teacher's probabilities.",
        Option(
            "--prompt-data", "FILE", "rows with prompts: input, prompt, question, problem, query or messages"
        ),
        {"use_opd": True, "num_epoch": 1, "n_samples_per_prompt": 4, "rollout_shuffle": True},
        _distill,
        {
            "--teacher": Option(
                "--opd-teacher-load",
                "MODEL",
                "the model to learn from, of the same tokenizer (or --rm-url, the address of a server)",
                unless="rm_url",
            )
        },
    ),
    Task(
        "eval",
        "Evaluate a model on one or several data sets, without training.",
        Option(
            "--eval-prompt-data",
            "NAME=FILE ...",
            "data sets with their names; each row has a prompt and the label for its reward",
            unless="eval_config",
        ),
        {
            "debug_rollout_only": True,  # no trainer
            "num_rollout": 0,
            "eval_interval": 1,
            "rollout_global_dataset": False,
            "rollout_batch_size": 1,
            "log_passrate": True,
            "eval_temperature": 0.0,
        },
        _eval,
        {},
        saves=False,
    ),
)
TASKS = {task.command: task for task in _LIST}
