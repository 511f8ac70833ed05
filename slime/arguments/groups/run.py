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
# What a model hub calls a model: `name` or `owner/name`. Anything else is meant as a path.
HUB_ID = re.compile(r"^[\w-][\w.-]*(/[\w.-]+)?$")


# -- when flags have an effect
REPLAYS = needs("load_debug_rollout_data", harmless=True)
TESTED = needs("ci_test", harmless=True)


@dataclass
class RunFlags:
    """Run."""

    config: str | None = flag(
        None, "YAML file of flags (keys are flag names); the command line wins", metavar="FILE"
    )
    print_config: bool = flag(False, "print every value and where it came from, then exit")
    strict: bool = flag(False, "treat every flag without effect in this run as an error")
    dry_run: bool = flag(
        False, "check settings, model, data, reward and machine, report every problem, and start nothing"
    )
    skip_preflight: list[str] = flag(
        [],
        "leave these checks before the start out: reward (the function is not called), lengths (of "
        "prompts), machine (devices, port, memory, disk)",
        choices=("reward", "lengths", "machine"),
    )
    run_dir: str | None = flag(
        None,
        "folder for metrics, logs and plots of this run alone. Default: runs/<model>-<seed>, or the next "
        "free name",
        metavar="DIR",
    )
    auto_resume: bool = flag(
        True,
        "start anew even if the folder holds an unfinished run with the same settings, which is otherwise"
        " resumed",
        off="--no-auto-resume",
    )
    runtime: str = flag(
        "local", "local: child processes on this machine; ray: a Ray cluster", choices=("local", "ray")
    )
    quiet: bool = flag(False, "no panels, live lines or samples: warnings and errors only")
    log_level: str | None = flag(
        None,
        "lowest level of shown log lines; RUN/logs has all of them. Default: warning on a terminal, info "
        "elsewhere",
        choices=("debug", "info", "warning", "error"),
    )
    seed: int = flag(
        1234, "seed of the run; where it is given, --rollout-seed has its value unless given too", ge=0
    )
    deterministic_mode: bool = flag(
        False,
        "give the same bits in every run: reproducible kernels, one request at a time (embedded engine), "
        "or SGLang's deterministic inference on GPUs",
    )
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
        None,
        "dump samples: dumps/{rollout_id}.pt; without {rollout_id}, only those of the last rollout",
        metavar="TEMPLATE",
    )
    load_debug_rollout_data: str | None = flag(
        None,
        "train on dumped samples; no engines; without {rollout_id} every rollout is that file",
        metavar="TEMPLATE",
    )
    load_debug_rollout_data_subsample: float | None = flag(
        None, "replay only this share of a dump", gt=0, le=1, only_with=REPLAYS
    )

    save_debug_train_data: str | None = flag(
        None, "dump what each rank trained on: dumps/{rollout_id}_{rank}.pt", metavar="TEMPLATE"
    )
    dump_details: str | None = flag(
        None, "folder for both dumps: rollout_data/ and train_data/ in it", metavar="DIR"
    )


@dataclass
class AssertionFlags:
    """Assertions of a run, for tests."""

    ci_test: bool = flag(
        False,
        "check in the first step of a new run that KL terms are 0 and that engine and trainer log-probs "
        "agree",
    )
    ci_disable_kl_checker: bool = flag(False, "leave out the check of KL terms", only_with=TESTED)
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1,
        "largest allowed log-prob difference; --logprob-diff-threshold takes precedence",
        ge=0,
        only_with=TESTED,
    )
    ci_save_grad_norm: str | None = flag(
        None,
        "write the gradient norm of each step: norms/{role}_{rollout_id}_{step_id}.pt",
        metavar="TEMPLATE",
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
        why = (
            "--load-debug-rollout-data implies --debug-train-only"
            if draft.load_debug_rollout_data
            else "both are set"
        )
        raise ValueError(
            f"--debug-rollout-only and --debug-train-only leave nothing to run ({why}); keep one of them."
        )


def needed_flags(draft: Draft) -> None:
    missing: list[str] = []
    if draft.rollout_batch_size is None:
        missing.append("--rollout-batch-size is required: how many prompts make one rollout, for example 32.")
    own_rollout = draft.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION
    if draft.hf_checkpoint is None and not (draft.debug_rollout_only and own_rollout):
        missing.append(
            "--hf-checkpoint is required: the folder or hub id of the model, for example Qwen/Qwen3-0.6B."
        )
    asks_engines = not own_rollout and draft.custom_generate_function_path is None
    if asks_engines and draft.debug_train_only and not draft.load_debug_rollout_data:
        missing.append(
            "--debug-train-only starts no engines, but the default rollout function asks them for samples; "
            "replay a dump with --load-debug-rollout-data, or use --rollout-function-path "
            "slime.rollout.sft_rollout.generate_rollout."
        )
    own_data = draft.data_source_path != DEFAULT_DATA_SOURCE or not draft.rollout_global_dataset
    if draft.prompt_data is None and not own_data and not draft.load_debug_rollout_data:
        missing.append(
            f"--prompt-data is required: a {ENDINGS} file of prompts. If your rollout function brings its "
            "own prompts, say --disable-rollout-global-dataset."
        )
    if asks_engines and not draft.debug_train_only and draft.rollout_max_response_len is None:
        missing.append(
            "--rollout-max-response-len is required: without it an engine cuts responses at a default of "
            "its own; give the longest response in tokens."
        )
    if missing:
        raise Refused(missing)


def seeds(draft: Draft) -> None:
    """Sampling and data order follow --seed, where --rollout-seed is not given.

    A run that is resumed keeps the rollout seed it had: an earlier version did not derive it from --seed.
    """
    if not draft.was_given("seed") or draft.was_given("rollout_seed"):
        return
    known = _setting_of_resumed_run(draft, "rollout_seed")
    if known is None:
        draft.derive("rollout_seed", draft.seed, "same as seed")
    else:
        draft.derive("rollout_seed", known, "the run that is resumed had it")


def _setting_of_resumed_run(draft: Draft, name: str) -> Any:
    """The value of a setting that nobody gave in the run that these flags resume; None: they resume none."""
    resumption = resumption_of(draft.load, draft.ckpt_step, draft.finetune)
    by_itself = draft.auto_resume and draft.load is None and not draft.finetune
    for record in filter(None, map(read_run, own_folders(draft))):
        found = record.last.settings.get(name)
        if found is None or is_given(found["source"]):
            continue
        saves_there = by_itself and same_folder(record.last.checkpoints, draft.save)
        if saves_there or (resumption is not None and resumption.continues(record)):
            return found["value"]
    return None


def auto_resume(draft: Draft) -> None:
    """Resume the unfinished run of the folder when the same command starts again: --load becomes --save."""
    if not draft.auto_resume or draft.load is not None or draft.save is None or draft.finetune:
        return
    for folder in own_folders(draft):
        if is_unfinished(folder, draft.values, draft.save):
            draft.derive("load", draft.save, f"{folder} holds this run, unfinished (--no-auto-resume)")
            draft.derive("ckpt_step", None, "it chose a checkpoint of --load, which was not given")
            if draft.run_dir is None:
                draft.derive("run_dir", str(folder.absolute()), "it holds this run, unfinished")
            return
        if draft.run_dir is None and has_finished(folder, draft.values, draft.save):
            draft.derive("run_dir", str(folder.absolute()), "it holds this run, finished (--no-auto-resume)")
            return


def own_folders(draft: Draft) -> list[Path]:
    """The folders that may hold an earlier start of this run."""
    return (
        [Path(draft.run_dir)]
        if draft.run_dir is not None
        else _folders(base_folder(draft.hf_checkpoint, draft.seed))
    )


def _folders(base: str) -> list[Path]:
    names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
    return list(itertools.takewhile(Path.exists, map(Path, names)))


def base_folder(hf_checkpoint: str | None, seed: int) -> str:
    """The folder of a run that names none, where it is free: Qwen/Qwen3-0.6B -> runs/Qwen3-0.6B-1234."""
    model = Path(hf_checkpoint).name if hf_checkpoint else "run"
    return f"runs/{model or 'run'}-{seed}"


def run_folder(draft: Draft) -> None:
    if draft.run_dir is None:
        base = base_folder(draft.hf_checkpoint, draft.seed)
        folder = choose_run_folder(base, resumption_of(draft.load, draft.ckpt_step, draft.finetune))
        why = "runs/<model>-<seed>" if folder == base else f"{base} is that of another run"
        draft.derive("run_dir", str(Path(folder).absolute()), why)


def check_paths_exist(draft: Draft) -> None:
    if draft.prompt_data is not None and not draft.load_debug_rollout_data:
        files = files_of_words(draft.prompt_data)
        if draft.env is not None and not draft.was_given("prompt_data"):
            _check_items(draft.env, files[0])
        for path in files:
            _check_data_file("--prompt-data", path)
    for dataset in draft.eval_datasets:
        _check_data_file(f"evaluation dataset {dataset.name!r}", dataset.path)
    _check_model("--hf-checkpoint", draft.hf_checkpoint)
    for option, path in (
        ("--ref-load", draft.ref_load),
        ("--critic-load", draft.critic_load),
        ("--opd-teacher-load", draft.opd_teacher_load),
        ("hf_checkpoint of the critic", draft.critic_overrides.get("hf_checkpoint")),
    ):
        _check_model(option, path)
    # A run that resumes itself names the same folder twice, and its first start finds nothing there.
    if draft.load is not None and draft.load != draft.save and not Path(draft.load).expanduser().is_dir():
        raise ValueError(
            f"--load is {draft.load}: there is no such folder. (A folder that may not exist yet is allowed "
            "only where --save names the same one.)"
        )


def files_of_words(words: str | list[str] | None) -> list[str]:
    """The files of --prompt-data, each with its range of rows if it has one."""
    return [
        path for word in ([words] if isinstance(words, str) else words or []) for path in split_files(word)
    ]


def split_files(word: str) -> list[str]:
    """Several files may be one word with commas, unless a file of that very name exists."""
    if Path(without_rows(word)).expanduser().exists():
        return [word]
    return [part.strip() for part in word.split(",") if part.strip()]


def without_rows(path: str) -> str:
    match = ROW_RANGE.match(path)
    return match.group(1) if match else path


def _check_data_file(what: str, path: str) -> None:
    reason = why_unreadable(without_rows(path))
    if reason is not None:
        raise ValueError(f"{what} is {path}: {reason}.")


def _check_items(env: str, source: str) -> None:
    """Items that --env makes: nobody wrote the source that stands for them."""
    reason = why_unreadable(source)
    if reason is not None:
        raise ValueError(f"--env is {env}: {reason}.")


def _check_model(flag: str, model: str | None) -> None:
    if model is None:
        return
    path = Path(model).expanduser()
    if path.exists():
        if path.is_dir() and not any(path.iterdir()):
            raise ValueError(
                f"{flag} is {model}: the folder is empty; it should hold config.json and weights."
            )
        return
    if not HUB_ID.match(model):
        raise ValueError(f"{flag} is {model}: there is no such folder (and a hub id looks like owner/name).")
