"""Flags and rules of checkpoints: where a run and its kept models start from, and what it leaves behind."""

import re
from dataclasses import dataclass
from pathlib import Path

from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import either, flag, needs, option_of
from slime.arguments.groups.objectives import REFERENCE
from slime.catalog.backends import BACKENDS
from slime.utils.files.step_folders import find_step, step_folders
from slime.utils.files.torch_dist_folder import UnreadFolder, find_iteration, is_megatron_folder, was_trained
from slime.utils.models.model_config import block_size_of, read_config

# Flag that names the model -> flag that chooses among its checkpoints.
STEP_FLAGS = {"ref_load": "ref_ckpt_step", "opd_teacher_load": "opd_teacher_ckpt_step"}

# Flag that may name a Megatron checkpoint -> flag that chooses among its iterations.
MEGATRON_FLAGS = {"load": "ckpt_step", "critic_load": None} | STEP_FLAGS


# -- when flags have an effect
LOADS = needs("load", harmless=True)
SAVES = needs("save", harmless=True)
KEEPS = either(needs("save"), needs("save_hf"))


@dataclass
class CheckpointFlags:
    """Checkpoint."""

    load: str | None = flag(
        None, "folder of checkpoints to resume from (may be empty if it is --save)", metavar="DIR"
    )
    ckpt_step: int | None = flag(None, "which checkpoint of --load; default: the last", ge=0, only_with=LOADS)
    finetune: bool = flag(False, "load only the weights of --load and start from rollout 0", only_with=LOADS)
    save: str | None = flag(None, "folder for checkpoints; {run_dir} stands for --run-dir", metavar="DIR")
    save_interval: int | None = flag(None, "rollouts between checkpoints", ge=1, only_with=KEEPS)
    no_load_optim: bool = flag(
        False, "do not load the optimizer's state from --load: moments start from zero", only_with=LOADS
    )
    no_load_rng: bool = flag(False, "do not load the random state from --load: use --seed", only_with=LOADS)
    async_save: bool = flag(
        False, "write checkpoints while training continues; the next one waits", only_with=SAVES
    )
    keep_last_n: int | None = flag(
        None, "number of checkpoints to keep in --save. Default: all", ge=1, only_with=SAVES
    )
    no_save_optim: bool = flag(False, "save no optimizer state; checkpoints then load with --finetune only")
    save_hf: str | None = flag(
        None,
        "write the trained model as a Hugging Face folder: DIR (the last one) or DIR/{rollout_id}",
        metavar="DIR",
    )
    push_to_hub: str | None = flag(
        None,
        "also upload each model of --save-hf to the Hugging Face hub",
        metavar="OWNER/NAME",
        only_with=needs("save_hf"),
    )
    ref_load: str | None = flag(
        None,
        "reference model, or a folder of checkpoints; default: --hf-checkpoint",
        metavar="MODEL",
        only_with=REFERENCE,
    )
    ref_ckpt_step: int | None = flag(None, "which checkpoint of --ref-load; default: the latest", ge=0)


def within_run_dir(draft: Draft) -> None:
    """Replace `{run_dir}` in the folders of checkpoints and models, so that another --run-dir moves them."""
    for name in ("save", "load", "save_hf"):
        value = getattr(draft, name)
        if value is not None and "{run_dir}" in value:
            if draft.run_dir is None:
                raise ValueError(f"{option_of(name)} is {value}, and --run-dir is missing: give it a folder.")
            draft.values[name] = value.replace("{run_dir}", draft.run_dir)


def megatron_checkpoints(draft: Draft) -> None:
    """Weights in Megatron's format (`DIR_torch_dist` of slime scripts), with the config of --hf-checkpoint.

    The policy starts from --load, else from --ref-load. A converted checkpoint that cannot be read is
    replaced by --hf-checkpoint, from which it was made.
    """
    had_reference = draft.ref_load is not None
    found = {name: _megatron_weights(draft, name, step) for name, step in MEGATRON_FLAGS.items()}
    found["load"] = found["load"] or (draft.load if _is_model(draft.load) else None)
    found["hf_checkpoint"] = draft.hf_checkpoint
    source = "load" if found["load"] else "ref_load" if found["ref_load"] else "hf_checkpoint"
    draft.set("start_from", found[source], f"derived: {source} has the first weights")
    if found["load"] is not None:
        kind = "this model" if _is_model(found["load"]) else "Megatron's checkpoint"
        draft.set("load", None, f"derived: the weights of {kind} are taken, nothing is resumed")
        draft.warn(
            f"--load {found['load']}: the weights of {kind} are read; optimizer, schedule and place in the "
            "data start anew."
        )
    if found["ref_load"] is not None and not REFERENCE.works(draft):
        draft.set("ref_load", None, "derived: no reference is used")
    elif draft.ref_load is not None and source == "hf_checkpoint":
        _start_from_reference(draft)
    load = draft.load
    if had_reference and load and load != draft.save and not Path(load).expanduser().is_dir():
        draft.derive("load", None, "there is no such folder")
        draft.warn(f"--load {load}: there is no such folder; the run starts from {draft.start_from}.")


def _is_model(path: str | None) -> bool:
    """Return whether `path` holds a Hugging Face model, as opposed to a checkpoint of a run."""
    folder = Path(path).expanduser() if path else None
    return folder is not None and (folder / "config.json").is_file() and not step_folders(folder)


def _start_from_reference(draft: Draft) -> None:
    """Start the policy from --ref-load if it is a Hugging Face folder, as slime scripts expect. This applies
    if no reference is used, or if --hf-checkpoint holds FP8 weights, with which only engines start. Otherwise
    the policy is --hf-checkpoint, and the reference another model.
    """
    reference, model = draft.ref_load, draft.hf_checkpoint
    if not _is_model(reference) or draft.ref_ckpt_step is not None:
        return
    same = model and Path(reference).expanduser().resolve() == Path(model).expanduser().resolve()
    unused = not REFERENCE.works(draft)
    if same and unused:
        draft.idle.append(f"--ref-load is {reference}, but there is no KL to a reference.")
    elif unused or (not same and model and block_size_of(model)):
        draft.set("start_from", reference, "derived: ref_load has the first weights")
        draft.warn(f"--ref-load {reference}: the policy starts from these weights (--load is not given).")
    if unused:
        draft.set("ref_load", None, "derived: no reference is used")


def _megatron_weights(draft: Draft, name: str, step_name: str | None) -> str | None:
    """Return the Megatron iteration that a flag names, and set the flag to it; None: it names none."""
    path, option = getattr(draft, name), option_of(name)
    if path is None or not is_megatron_folder(path) or step_folders(Path(path).expanduser()):
        return None
    step = getattr(draft, step_name) if step_name else None
    if step_name and step is not None:
        draft.set(step_name, None, f"derived: {name} is that iteration")
    try:
        chosen = str(find_iteration(path, step))
        kind = read_config(draft.hf_checkpoint).get("model_type") if draft.hf_checkpoint else None
        known = BACKENDS["megatron"].families or ()
        if kind is not None and kind not in known:
            raise UnreadFolder(f"can be read for {', '.join(known)}, but this is a {kind}")
    except UnreadFolder as error:
        what = f"{path}, a checkpoint in Megatron's format, which {error}"
        if name == "opd_teacher_load" or step is not None or was_trained(path):
            advice = "export it to a Hugging Face folder, and give that"
            raise ValueError(f"{option} is {what}; {advice}.") from None
        draft.derive(name, None, "hf_checkpoint has these weights")
        draft.warn(f"{option} {what}: the weights of --hf-checkpoint {draft.hf_checkpoint} are used instead.")
        return None
    draft.set(name, chosen, f"derived: the iteration of {path}")
    return chosen


def checkpoints(draft: Draft) -> None:
    if draft.push_to_hub is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", draft.push_to_hub):
        raise ValueError(f"--push-to-hub is {draft.push_to_hub}: write OWNER/NAME, e.g. me/my-model.")
    rollouts = draft.save_debug_rollout_data
    if rollouts is not None and "{" not in rollouts:
        draft.warn(
            f"--save-debug-rollout-data is {rollouts}: each rollout overwrites the one before; put "
            "{rollout_id} in it to keep all of them."
        )
    elif rollouts is not None:
        _check_template("--save-debug-rollout-data", rollouts)
    if draft.save_hf is not None and "{" in draft.save_hf:
        _check_template("--save-hf", draft.save_hf)
    if draft.save_debug_train_data is not None:
        _check_template("--save-debug-train-data", draft.save_debug_train_data)


def _check_template(flag: str, template: str) -> None:
    try:
        first, second = (template.format(rollout_id=i, rank=0, role="actor", step_id=0) for i in (0, 1))
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{flag} is {template}: not a template ({error}); write {{rollout_id}}.") from None
    if first == second:
        raise ValueError(
            f"{flag} is {template}: every rollout would use the same path; put {{rollout_id}} in it."
        )


def kept_models(draft: Draft) -> None:
    """Resolve `--ref-load runs/a` to the trainer folder of its latest checkpoint, or of --ref-ckpt-step."""
    for name, step_name in STEP_FLAGS.items():
        model, step = getattr(draft, name), getattr(draft, step_name)
        flag, step_flag = option_of(name), option_of(step_name)
        folders = step_folders(Path(model).expanduser()) if model is not None else {}
        if not folders:
            if step is not None:
                why = (
                    f"{flag} is not set" if model is None else f"{flag} {model} holds no checkpoints (step_*)"
                )
                raise ValueError(
                    f"{step_flag} is {step}, but {why}; leave it out, or give a folder of --save."
                )
            continue
        if not BACKENDS[draft.train_backend].reads_kept_checkpoints:
            raise ValueError(
                f"{flag} {model} holds trainer checkpoints, which --train-backend {draft.train_backend} does "
                "not read for a second model; give the Hugging Face folder that --save-hf wrote."
            )
        if step is None and draft.save is not None and Path(model).resolve() == Path(draft.save).resolve():
            raise ValueError(f"{flag} {model} is also --save, and changes; choose one with {step_flag}.")
        chosen = find_step(Path(model).expanduser(), max(folders) if step is None else step, flag=step_flag)
        assert chosen is not None, f"{model} contains the checkpoints {sorted(folders)}"
        why = "its latest checkpoint" if step is None else step_name
        draft.derive(name, str(chosen.trainer), why)
