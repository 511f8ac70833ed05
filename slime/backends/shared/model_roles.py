"""Decides which models a run needs in addition to the actor, and builds the settings of the critic."""

import copy

from slime.arguments import Args, Flags
from slime.arguments.groups.objectives import SUPERVISED_LOSSES
from slime.backends.shared.weight_copies import OLD_POLICIES
from slime.catalog.estimators import ESTIMATORS
from slime.utils.files.torch_dist_folder import is_torch_dist


def needs_reference(args: Flags) -> bool:
    """Return whether some term of the run compares the policy with a reference."""
    if args.loss_type == "dpo_loss":
        return True
    return args.loss_type not in SUPERVISED_LOSSES and (args.use_kl_loss or args.kl_coef != 0)


def has_advantages(args: Flags) -> bool:
    """Return whether the run turns rewards into advantages."""
    return args.compute_advantages_and_returns and args.loss_type not in SUPERVISED_LOSSES


def needs_old_log_probs(args: Flags, num_steps: int) -> bool:
    """Return whether a pass before training must record the old policy's log-probs.

    It is not needed where the engine's log-probs replace them, nor for a single step on the policy's own
    samples, where the ratio is 1. A custom loss gets them in addition to its advantages.
    """
    if args.loss_type == "custom_loss":
        return has_advantages(args) and not args.use_rollout_logprobs
    if args.loss_type != "policy_loss":
        return False
    if args.use_rollout_entropy:
        return True
    if args.use_rollout_logprobs:
        return False
    return num_steps > 1 or args.kl_coef != 0 or args.keep_old_actor or args.use_opd


def needs_critic(args: Flags) -> bool:
    return has_advantages(args) and ESTIMATORS[args.advantage_estimator].needs_values


def critic_settings(args: Args) -> Args:
    """Return `args` with the settings of the critic's model, optimizer and schedule."""
    settings = copy.copy(args)
    own, model = args.critic_load, args.critic_overrides.get("hf_checkpoint")
    fields = {**args.megatron_config, **args.critic_overrides.get("megatron_config", {})}
    vars(settings).update(args.critic_overrides)
    vars(settings).update(
        # A checkpoint of Megatron contains only weights.
        hf_checkpoint=model or (args.hf_checkpoint if own is None or is_torch_dist(own) else own),
        start_from=own or model or args.start_from,
        megatron_config=fields,
        lr=args.lr if args.critic_lr is None else args.critic_lr,
        min_lr=args.critic_overrides.get("min_lr", 0.0),
        lr_decay_style=args.critic_overrides.get("lr_decay_style", "constant"),
        lr_warmup_iters=args.critic_lr_warmup_iters,
        lr_warmup_fraction=None,
        clip_grad=args.critic_overrides.get("clip_grad", 1.0),
        # Only the policy has copies of older weights.
        ref_update_interval=None,
        keep_old_actor=False,
    )
    return settings


def moving_copies(args: Args) -> tuple[str, ...]:
    """Return tags of copies that change during the run, which a checkpoint has to store."""
    reference = ("ref",) if args.ref_update_interval else ()
    return (*reference, *(OLD_POLICIES if args.keep_old_actor else ()))
