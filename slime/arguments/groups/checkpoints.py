"""Flags and rules of checkpoints: where a run and its kept models start from, and what it leaves behind."""

import re
from dataclasses import dataclass
from pathlib import Path

from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import OnlyWith, flag, needs
from slime.arguments.groups.objectives import REFERENCE
from slime.catalog.backends import BACKENDS
from slime.utils.step_folders import find_step, step_folders

# Flag that names the model -> flag that chooses among its checkpoints.
STEP_FLAGS = {"ref_load": "ref_ckpt_step", "opd_teacher_load": "opd_teacher_ckpt_step"}


# -- when flags have an effect
LOADS = needs("load", "no checkpoint is loaded; add --load", harmless=True)
CHOOSES = needs("load", "no checkpoint is loaded; add --load")
SAVES = needs("save", "no checkpoint is saved; add --save", harmless=True)
READS_CHECKPOINTS = OnlyWith(
    "with a checkpoint to read",
    lambda d: d.load or d.ref_load or d.opd_teacher_load,
    "no checkpoint is loaded; add --load",
    harmless=True,
)


@dataclass
class CheckpointFlags:
    """Checkpoint."""

    load: str | None = flag(
        None, "folder of checkpoints to resume from (may be empty if it is also --save)", metavar="DIR"
    )
    ckpt_step: int | None = flag(
        None, "which checkpoint of --load; default: the latest", ge=0, only_with=CHOOSES
    )
    finetune: bool = flag(False, "take only the weights of --load and start from rollout 0", only_with=LOADS)
    save: str | None = flag(None, "folder to save checkpoints in", metavar="DIR")
    save_interval: int | None = flag(None, "rollouts between checkpoints", ge=1)
    no_load_optim: bool = flag(
        False, "leave the optimizer's state in --load alone: moments start from zero", only_with=LOADS
    )
    no_load_rng: bool = flag(
        False, "leave the random state in --load alone: it starts from --seed", only_with=LOADS
    )
    no_load_verify: bool = flag(
        False,
        "do not read the files of --load to compare them with their checksums; sizes are compared all the "
        "same",
        only_with=READS_CHECKPOINTS,
    )
    async_save: bool = flag(
        False,
        "checkpoints are written while training goes on; the next one and the end wait",
        only_with=SAVES,
    )
    keep_last_n: int | None = flag(
        None, "how many checkpoints of --save stay; default: all", ge=1, only_with=SAVES
    )
    no_save_optim: bool = flag(
        False, "leave the optimizer out of checkpoints; they then load with --finetune only"
    )
    save_hf: str | None = flag(None, "also write a Hugging Face folder: hf/{rollout_id}", metavar="TEMPLATE")
    push_to_hub: str | None = flag(
        None,
        "also upload each model of --save-hf, with a model card, to this place on the Hugging Face hub",
        metavar="OWNER/NAME",
        only_with=needs("save_hf", "no model is written; add --save and --save-hf"),
    )
    hub_public: bool = flag(
        False,
        "everybody may see what --push-to-hub uploads; default: only you",
        only_with=needs("push_to_hub", "nothing is uploaded; add --push-to-hub"),
    )
    ref_load: str | None = flag(
        None,
        "reference model for the KL, or a folder of checkpoints; default: --hf-checkpoint",
        metavar="MODEL",
        only_with=REFERENCE,
    )
    ref_ckpt_step: int | None = flag(None, "which checkpoint of --ref-load; default: the latest", ge=0)


def megatron_checkpoints(draft: Draft) -> None:
    """Starting weights in Megatron's format (`DIR_torch_dist` of slime scripts): --hf-checkpoint has them.

    One that was trained (its tracker names an iteration) is refused: nothing else has those weights.
    """
    had_reference = draft.ref_load is not None
    for name in ("ref_load", "load", "critic_load", "opd_teacher_load"):
        path, option = getattr(draft, name), f"--{name.replace('_', '-')}"
        tracker = Path(path or ".").expanduser() / "latest_checkpointed_iteration.txt"
        if path is None or not (tracker.is_file() or path.rstrip("/").endswith("_torch_dist")):
            continue
        iteration = tracker.read_text().strip() if tracker.is_file() else "release"
        if name == "opd_teacher_load" or iteration != "release":
            raise ValueError(
                f"{option} is {path}, a checkpoint in Megatron's format, which this version does not read; "
                "export it to a Hugging Face folder with the tool that wrote it, and give that."
            )
        draft.derive(name, None, "hf_checkpoint has these weights")
        draft.warn(
            f"{option} {path} is a checkpoint in Megatron's format, which this version does not read: the "
            f"weights of --hf-checkpoint {draft.hf_checkpoint} are taken instead."
        )
    load = draft.load
    if had_reference and load and load != draft.save and not Path(load).expanduser().is_dir():
        draft.derive("load", None, "there is no such folder")
        draft.warn(f"--load {load}: there is no such folder; the run starts from --hf-checkpoint.")


def checkpoints(draft: Draft) -> None:
    if draft.save_interval is not None and draft.save is None:
        raise ValueError(
            f"--save-interval is {draft.save_interval}, but there is no folder to save in; add --save DIR."
        )
    if draft.push_to_hub is not None and draft.save is None:
        raise ValueError(f"--push-to-hub is {draft.push_to_hub}, but nothing is saved; add --save DIR.")
    if draft.push_to_hub is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", draft.push_to_hub):
        raise ValueError(f"--push-to-hub is {draft.push_to_hub}: write OWNER/NAME, e.g. me/my-model.")
    for name in ("save_hf", "save_debug_rollout_data", "save_debug_train_data"):
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
