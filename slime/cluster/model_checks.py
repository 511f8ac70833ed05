"""The models that a run names, looked at before any process starts: a worker would tell of them late."""

from slime.arguments import Args
from slime.utils.model_files import check_model


def check_models(args: Args) -> None:
    """ValueError for the first that cannot be loaded. All but --hf-checkpoint may be checkpoints of a run."""
    if args.hf_checkpoint is not None:
        check_model("--hf-checkpoint", args.hf_checkpoint, tokenizer=_makes_prompts(args))
    others = {
        "--ref-load": args.ref_load,
        "--critic-load": args.critic_load,
        "--opd-teacher-load": args.opd_teacher_load,
    }
    others |= {f"model_path of {model.name}": model.model_path for model in args.engine_topology.models}
    for flag, model in others.items():
        if model is not None and model != args.hf_checkpoint:
            check_model(flag, model, whole=False)


def _makes_prompts(args: Args) -> bool:
    """Whether a tokenizer is loaded: for engines always, else by the rollout functions of slime."""
    if args.load_debug_rollout_data:
        return False
    return not args.debug_train_only or args.rollout_function_path.startswith("slime.")
