"""Flags and rules of checkpoints: where a run and its kept models start from, and what it leaves behind."""

from dataclasses import dataclass
from pathlib import Path

from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import flag, needs
from slime.arguments.groups.objectives import REFERENCE
from slime.catalog.backends import BACKENDS
from slime.utils.step_folders import find_step, step_folders

_CHECKPOINT_FOLDERS = {
    "no_load_optim": "load",
    "no_load_rng": "load",
    "async_save": "save",
    "keep_last_n": "save",
}
# Flag that names the model -> flag that chooses among its checkpoints.
STEP_FLAGS = {"ref_load": "ref_ckpt_step", "opd_teacher_load": "opd_teacher_ckpt_step"}


# -- when flags have an effect
LOADS = needs("load", "no checkpoint is loaded; add --load")


@dataclass
class CheckpointFlags:
    """Checkpoint."""

    load: str | None = flag(
        None, "folder of checkpoints to resume from (may be empty if it is also --save)", metavar="DIR"
    )
    ckpt_step: int | None = flag(
        None, "which checkpoint of --load; default: the latest", ge=0, only_with=LOADS
    )
    finetune: bool = flag(False, "take only the weights of --load and start from rollout 0", only_with=LOADS)
    save: str | None = flag(None, "folder to save checkpoints in", metavar="DIR")
    save_interval: int | None = flag(None, "rollouts between checkpoints", ge=1)
    no_load_optim: bool = flag(False, "leave the optimizer's state in --load alone: moments start from zero")
    no_load_rng: bool = flag(False, "leave the random state in --load alone: it starts from --seed")
    no_load_verify: bool = flag(
        False,
        "do not read the files of --load to compare them with their checksums; sizes are compared all the "
        "same",
    )
    async_save: bool = flag(
        False, "checkpoints are written while training goes on; the next one and the end wait"
    )
    keep_last_n: int | None = flag(None, "how many checkpoints of --save stay; default: all", ge=1)
    no_save_optim: bool = flag(
        False, "leave the optimizer out of checkpoints; they then load with --finetune only"
    )
    save_hf: str | None = flag(None, "also write a Hugging Face folder: hf/{rollout_id}", metavar="TEMPLATE")
    ref_load: str | None = flag(
        None,
        "reference model for the KL, or a folder of checkpoints; default: --hf-checkpoint",
        metavar="MODEL",
        only_with=REFERENCE,
    )
    ref_ckpt_step: int | None = flag(None, "which checkpoint of --ref-load; default: the latest", ge=0)


def checkpoints(draft: Draft) -> None:
    if draft.save_interval is not None and draft.save is None:
        raise ValueError(
            f"--save-interval is {draft.save_interval}, but there is no folder to save in; add --save DIR."
        )
    for name, folder in _CHECKPOINT_FOLDERS.items():
        if draft.was_given(name) and getattr(draft, name) and getattr(draft, folder) is None:
            raise ValueError(
                f"--{name.replace('_', '-')} does nothing without --{folder}; add it or remove the flag."
            )
    if draft.no_load_verify and not (draft.load or draft.ref_load or draft.opd_teacher_load):
        raise ValueError("--no-load-verify does nothing without --load; add it or remove the flag.")
    for name in ("save_hf", "save_debug_rollout_data", "load_debug_rollout_data"):
        template = getattr(draft, name)
        if template is not None:
            _check_template(f"--{name.replace('_', '-')}", template)


def _check_template(flag: str, template: str) -> None:
    try:
        first, second = (template.format(rollout_id=i, rank=0, role="actor", step_id=0) for i in (0, 1))
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"{flag} is {template}: not a template ({error}); write {{rollout_id}} where the number goes."
        ) from None
    if first == second:
        raise ValueError(
            f"{flag} is {template}: every rollout would use the same path; put {{rollout_id}} in it."
        )


def kept_models(draft: Draft) -> None:
    """`--ref-load runs/a` becomes the trainer's folder of its latest checkpoint, or of --ref-ckpt-step."""
    for name, step_name in STEP_FLAGS.items():
        model, step = getattr(draft, name), getattr(draft, step_name)
        flag, step_flag = (f"--{n.replace('_', '-')}" for n in (name, step_name))
        if model is None:
            if step is not None:
                raise ValueError(
                    f"{step_flag} is {step}, but {flag} is not set: it chooses a checkpoint of that folder."
                )
            continue
        folders = step_folders(Path(model).expanduser())
        if not folders:
            if step is not None:
                raise ValueError(
                    f"{step_flag} is {step}, but {flag} {model} holds no checkpoints (step_*): give a folder "
                    f"written by --save, or leave {step_flag} out."
                )
            continue
        _check_trainer(draft, flag, model)
        if step is None and draft.save is not None and Path(model).resolve() == Path(draft.save).resolve():
            raise ValueError(
                f"{flag} {model} is also the folder of --save: its latest checkpoint changes as the run goes "
                f"on; choose one with {step_flag}."
            )
        chosen = find_step(Path(model).expanduser(), max(folders) if step is None else step, flag=step_flag)
        assert chosen is not None, f"{model} holds the checkpoints {sorted(folders)}"
        why = "its latest checkpoint" if step is None else step_name
        draft.derive(name, str(chosen.trainer), why)


def _check_trainer(draft: Draft, flag: str, model: str) -> None:
    if not BACKENDS[draft.train_backend].reads_kept_checkpoints:
        raise ValueError(
            f"{flag} {model} holds trainer checkpoints, which only --train-backend fsdp reads for a model "
            "beside the policy; give the Hugging Face folder that --save-hf wrote."
        )
