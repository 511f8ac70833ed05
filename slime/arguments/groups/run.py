"""Flags and rules of the run as a whole: where settings come from, what it needs, which half of it runs."""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.arguments.core.draft import Draft, Refused, is_given
from slime.arguments.core.flag import flag, needs
from slime.arguments.groups.data import DEFAULT_DATA_SOURCE
from slime.arguments.groups.rollout import DEFAULT_ROLLOUT_FUNCTION
from slime.catalog.datasets import ENDINGS, why_unreadable
from slime.catalog.deadlines import DEADLINES
from slime.catalog.limits import LIMITS
from slime.utils.files.run_file import choose_run_folder, has_finished, is_unfinished, read_run, resumption_of
from slime.utils.files.step_folders import same_folder

ROW_RANGE = re.compile(r"^(.*)@\[-?\d*:-?\d*\]$")
# A model id of a hub: `name` or `owner/name`. Anything else is a path.
HUB_ID = re.compile(r"^[\w-][\w.-]*(/[\w.-]+)?$")


# -- when flags have an effect
REPLAYS = needs("load_debug_rollout_data", harmless=True)
TESTED = needs("ci_test", harmless=True)


@dataclass
class RunFlags:
    """Run."""

    config: str | None = flag(None, "YAML file of flags (keys are flag names)", metavar="FILE")
    print_config: bool = flag(False, "print every value and where it came from, then exit")
    strict: bool = flag(False, "treat every flag without effect in this run as an error")
    dry_run: bool = flag(False, "check settings, model, data, reward and machine, and start nothing")
    skip_preflight: list[str] = flag(
        [],
        "checks before the start to skip: of the reward, of lengths, of the machine, or of other hosts",
        choices=("reward", "lengths", "machine", "hosts"),
    )
    run_dir: str | None = flag(
        None, "folder of this run only. Default: runs/<model>-<seed>, or the next free name"
    )
    auto_resume: bool = flag(
        True,
        "start a new run even if the folder holds an unfinished run of these settings",
        off="--no-auto-resume",
    )
    runtime: str = flag(
        "local",
        "child processes on this machine, or a Ray cluster, which is the default where RAY_ADDRESS is set",
        choices=("local", "ray"),
    )
    quiet: bool = flag(False, "no panels, live lines or samples: warnings and errors only")
    log_level: str | None = flag(
        None,
        "minimum level of displayed log lines; default: warning on a terminal, else info",
        choices=("debug", "info", "warning", "error"),
    )
    seed: int = flag(1234, "seed of the run; also --rollout-seed, if only this one is given", ge=0)
    deterministic_mode: bool = flag(False, "same bits in every run, as far as trainer and engines support it")
    timeouts: dict = flag({}, "deadlines in seconds:", metavar="NAME=SECONDS,...", rows=DEADLINES)
    limits: dict = flag({}, "limits on counts:", metavar="NAME=NUMBER,...", rows=LIMITS)
    custom_config_path: str | None = flag(
        None, "YAML of extra values for plug-ins; each key becomes an attribute of args", metavar="FILE"
    )


@dataclass
class DebugFlags:
    """Debug."""

    debug_rollout_only: bool = flag(False, "generate only; no trainer")
    debug_train_only: bool = flag(False, "train only; no engines (SFT, replayed dumps)")
    save_debug_rollout_data: str | None = flag(
        None, "dump samples: dumps/{rollout_id}.pt", metavar="TEMPLATE"
    )
    load_debug_rollout_data: str | None = flag(
        None, "train on dumped samples, without engines", metavar="TEMPLATE"
    )
    load_debug_rollout_data_subsample: float | None = flag(
        None, "replay only this share of a dump", gt=0, le=1, only_with=REPLAYS
    )

    save_debug_train_data: str | None = flag(
        None, "dump what each rank trained on: dumps/{rollout_id}_{rank}.pt", metavar="TEMPLATE"
    )
    dump_details: str | None = flag(
        None, "folder for both dumps: rollout_data/ and train_data/", metavar="DIR"
    )


@dataclass
class AssertionFlags:
    """Assertions of a run, for tests."""

    ci_test: bool = flag(False, "check in the first step that KL terms are 0 and log-probs agree")
    ci_disable_kl_checker: bool = flag(False, "skip the check of KL terms", only_with=TESTED)
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1, "--logprob-diff-threshold of --ci-test", ge=0, only_with=TESTED
    )
    ci_save_grad_norm: str | None = flag(
        None, "write each gradient norm: norms/{role}_{rollout_id}_{step_id}.pt", metavar="TEMPLATE"
    )
    ci_load_grad_norm: str | None = flag(
        None, "stop if a gradient norm differs by 1% from that in these files", metavar="TEMPLATE"
    )


def dumps_and_assertions(draft: Draft) -> None:
    names = {"save_debug_rollout_data": "rollout_data/{rollout_id}.pt"}
    names |= {"save_debug_train_data": "train_data/{rollout_id}_{rank}.pt"}
    for name, file in names.items():
        if draft.dump_details and getattr(draft, name) is None:
            draft.derive(name, f"{draft.dump_details.rstrip('/')}/{file}", "dump_details")
    if draft.ci_test and draft.logprob_diff_threshold is None:
        limit = draft.ci_train_rollout_logprob_abs_diff_threshold
        draft.derive("logprob_diff_threshold", limit, "ci_train_rollout_logprob_abs_diff_threshold")


def debug_modes(draft: Draft) -> None:
    if draft.load_debug_rollout_data and not draft.debug_train_only:
        draft.derive("debug_train_only", True, "replayed dumps (load_debug_rollout_data) need no engines")
    if draft.debug_rollout_only and draft.debug_train_only:
        raise ValueError(
            "--debug-rollout-only and --debug-train-only leave nothing to do; keep one of them "
            "(--load-debug-rollout-data implies --debug-train-only)."
        )


def needed_flags(draft: Draft) -> None:
    own_rollout = draft.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION
    own_data = draft.data_source_path != DEFAULT_DATA_SOURCE or not draft.rollout_global_dataset
    asks_engines = not own_rollout and draft.custom_generate_function_path is None
    replays, trains_only = draft.load_debug_rollout_data, draft.debug_train_only
    missing: dict[str, object] = {
        "--rollout-batch-size is required: how many prompts make one rollout, for example 32.": (
            draft.rollout_batch_size is None
        ),
        "--hf-checkpoint is required: the folder or hub id of the model, for example Qwen/Qwen3-0.6B.": (
            draft.hf_checkpoint is None and not (draft.debug_rollout_only and own_rollout)
        ),
        "--debug-train-only starts no engines, but the default rollout function needs them; "
        "replay a dump with --load-debug-rollout-data, or use --rollout-function-path "
        "slime.rollout.sft_rollout.generate_rollout.": asks_engines and trains_only and not replays,
        f"--prompt-data is required: a {ENDINGS} file of prompts. If your rollout function brings its "
        "own prompts, say --disable-rollout-global-dataset.": (
            draft.prompt_data is None and not own_data and not replays
        ),
        "--rollout-max-response-len is required: the longest response in tokens.": (
            asks_engines and not trains_only and draft.rollout_max_response_len is None
        ),
    }
    if any(missing.values()):
        raise Refused([text for text, is_missing in missing.items() if is_missing])


def seeds(draft: Draft) -> None:
    """Derive --rollout-seed from --seed, unless a run is resumed that did not (an earlier version)."""
    if not draft.was_given("seed") or draft.was_given("rollout_seed"):
        return
    known = resumed_settings(draft).get("rollout_seed")
    if known is None or is_given(known["source"]):
        draft.derive("rollout_seed", draft.seed, "same as seed")
    else:
        draft.derive("rollout_seed", known["value"], "the run that is resumed had it")


def resumed_settings(draft: Draft) -> dict[str, dict[str, Any]]:
    """Return the settings of the run that these flags resume, with their sources; empty: they resume none."""
    resumption = resumption_of(draft.load, draft.ckpt_step, draft.finetune)
    by_itself = draft.auto_resume and draft.load is None and not draft.finetune
    for record in filter(None, map(read_run, own_folders(draft))):
        saves_there = by_itself and same_folder(record.last.checkpoints, draft.save)
        if saves_there or (resumption is not None and resumption.continues(record)):
            return record.last.settings
    return {}


def auto_resume(draft: Draft) -> None:
    """Resume the unfinished run of the folder when the same command starts again: --load becomes --save."""
    if not draft.auto_resume or draft.load is not None or draft.save is None or draft.finetune:
        return
    for folder in own_folders(draft):
        if is_unfinished(folder, draft.values, draft.save):
            draft.derive("load", draft.save, f"{folder} holds this run, unfinished (--no-auto-resume)")
            draft.derive("ckpt_step", None, "chose a checkpoint of --load, but --load was not given")
            if draft.run_dir is None:
                draft.derive("run_dir", str(folder.absolute()), "it holds this run, unfinished")
            return
        if draft.run_dir is None and has_finished(folder, draft.values, draft.save):
            draft.derive("run_dir", str(folder.absolute()), "it holds this run, finished (--no-auto-resume)")
            return


def own_folders(draft: Draft) -> list[Path]:
    """Return the folders that may contain an earlier start of this run."""
    if draft.run_dir is not None:
        return [Path(draft.run_dir)]
    base = base_folder(draft.hf_checkpoint, draft.seed)
    names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
    return list(itertools.takewhile(Path.exists, map(Path, names)))


def base_folder(hf_checkpoint: str | None, seed: int) -> str:
    """Return the default folder of a run, if it is free: Qwen/Qwen3-0.6B -> runs/Qwen3-0.6B-1234."""
    model = Path(hf_checkpoint).name if hf_checkpoint else "run"
    return f"runs/{model or 'run'}-{seed}"


def run_folder(draft: Draft) -> None:
    if draft.run_dir is None:
        base = base_folder(draft.hf_checkpoint, draft.seed)
        folder = choose_run_folder(base, resumption_of(draft.load, draft.ckpt_step, draft.finetune))
        why = "runs/<model>-<seed>" if folder == base else f"{base} belongs to another run"
        draft.derive("run_dir", str(Path(folder).absolute()), why)
    elif not draft.run_dir:
        raise ValueError("--run-dir is empty: name a folder.")


def check_paths_exist(draft: Draft) -> None:
    if draft.prompt_data is not None and not draft.load_debug_rollout_data:
        files = files_of_words(draft.prompt_data)
        if draft.env is not None and not draft.was_given("prompt_data"):
            _check_data_file("--env", files[0], draft.env)
        for path in files:
            _check_data_file("--prompt-data", path)
    for dataset in draft.eval_datasets:
        _check_data_file(f"evaluation dataset {dataset.name!r}", dataset.path)
    for option, path in (
        ("--hf-checkpoint", draft.hf_checkpoint),
        ("--ref-load", draft.ref_load),
        ("--critic-load", draft.critic_load),
        ("--opd-teacher-load", draft.opd_teacher_load),
        ("hf_checkpoint of the critic", draft.critic_overrides.get("hf_checkpoint")),
    ):
        _check_model(option, path)
    # A run that resumes itself has one folder for both flags, which does not exist at its first start.
    if draft.load is not None and draft.load != draft.save and not Path(draft.load).expanduser().is_dir():
        raise ValueError(f"--load is {draft.load}: there is no such folder, and --save names another.")


def files_of_words(words: str | list[str] | None) -> list[str]:
    """Return the files of --prompt-data, each with its range of rows if it has one."""
    return [
        path for word in ([words] if isinstance(words, str) else words or []) for path in split_files(word)
    ]


def split_files(word: str) -> list[str]:
    """Split one value at its commas into several files, unless a file of that exact name exists."""
    if Path(without_rows(word)).expanduser().exists():
        return [word]
    return [part.strip() for part in word.split(",") if part.strip()]


def without_rows(path: str) -> str:
    match = ROW_RANGE.match(path)
    return match.group(1) if match else path


def _check_data_file(flag: str, path: str, shown: str | None = None) -> None:
    """Refuse a source of prompts that cannot be read; `shown`: what the user wrote instead of it."""
    reason = why_unreadable(without_rows(path))
    if reason is not None:
        raise ValueError(f"{flag} is {shown or path}: {reason}.")


def _check_model(flag: str, model: str | None) -> None:
    path = Path(model).expanduser() if model is not None else None
    if path is not None and path.is_dir() and not any(path.iterdir()):
        raise ValueError(f"{flag} is {model}: the folder is empty; it should hold config.json and weights.")
    if path is not None and not path.exists() and not HUB_ID.match(str(model)):
        raise ValueError(f"{flag} is {model}: there is no such folder (and a hub id looks like owner/name).")
