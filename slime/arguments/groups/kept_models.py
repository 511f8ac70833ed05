"""Models beside the policy that come from a checkpoint of an earlier
run: which folder of it they are read from.
"""

from pathlib import Path

from slime.arguments.core.draft import Draft
from slime.catalog.backends import BACKENDS
from slime.utils.step_folders import find_step, step_folders

# Flag that names the model -> flag that chooses among its checkpoints.
STEP_FLAGS = {"ref_load": "ref_ckpt_step", "opd_teacher_load": "opd_teacher_ckpt_step"}


def kept_models(draft: Draft) -> None:
    """`--ref-load runs/a/checkpoints` becomes the trainer's folder of its
    latest checkpoint, or of --ref-ckpt-step.
    """
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
                    f"{step_flag} is {step}, but {flag} {model} holds no checkpoints (step_*): give a "
                    f"folder written by --save, or leave {step_flag} out."
                )
            continue
        _check_trainer(draft, flag, model)
        if step is None and draft.save is not None and Path(model).resolve() == Path(draft.save).resolve():
            raise ValueError(
                f"{flag} {model} is also the folder of --save: its latest checkpoint changes as the run "
                f"goes on; choose one with {step_flag}."
            )
        chosen = find_step(Path(model).expanduser(), max(folders) if step is None else step, flag=step_flag)
        why = "its latest checkpoint" if step is None else step_name
        draft.derive(name, str(chosen.trainer), why)


def _check_trainer(draft: Draft, flag: str, model: str) -> None:
    if not BACKENDS[draft.train_backend].reads_kept_checkpoints:
        raise ValueError(
            f"{flag} {model} holds trainer checkpoints, which only --train-backend fsdp reads for a model "
            "beside the policy; give the Hugging Face folder that --save-hf wrote."
        )
