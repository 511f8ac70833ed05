"""Which models stand beside the actor in a run, and the settings of the one that trains too."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime.algorithms.advantages import get_estimator

logger = logging.getLogger(__name__)


def needs_reference(args: Any) -> bool:
    """Whether some term of the run compares the policy with a reference."""
    if args.loss_type == "dpo_loss":
        return True
    return args.loss_type == "policy_loss" and (args.use_kl_loss or args.kl_coef != 0)


def needs_critic(args: Any) -> bool:
    return args.loss_type == "policy_loss" and get_estimator(args.advantage_estimator).needs_values


def critic_settings(args: Any) -> SimpleNamespace:
    """`args` as the critic's model, optimizer and schedule read them."""
    changes = {
        "hf_checkpoint": args.critic_load or args.hf_checkpoint,
        "lr": args.lr if args.critic_lr is None else args.critic_lr,
        "min_lr": args.critic_min_lr,
        "lr_decay_style": args.critic_lr_decay_style,
        "lr_warmup_iters": args.critic_lr_warmup_iters,
        "clip_grad": args.critic_clip_grad,
    }
    return SimpleNamespace(**(vars(args) | changes))


def load_critic(critic: Any, args: Any, path: Path) -> None:
    """The critic that was saved beside the actor in the folder `path`; only --finetune may do without."""
    if (path / "critic").is_dir():
        critic.load(path / "critic")
    elif args.finetune:
        logger.warning("checkpoint %s has no critic: it starts from %s.", path, critic.args.hf_checkpoint)
    else:
        raise ValueError(
            f"checkpoint {path} has no critic, but --advantage-estimator {args.advantage_estimator} trains one: resume with the "
            "estimator it was saved with, or take only its weights with --finetune."
        )
