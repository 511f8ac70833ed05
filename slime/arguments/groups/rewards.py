"""Flags about rewards: which function scores a sample, and what happens when it fails to."""

from dataclasses import dataclass

from slime.arguments.core.flag import flag
from slime.catalog.rewards import BOXED, REWARDS

_RM_TYPES = "; ".join(f"{name}: {reward.help}" for name, reward in REWARDS.items())


@dataclass
class RewardFlags:
    """Rewards."""

    rm_type: str | None = flag(
        None,
        f"built-in reward. {_RM_TYPES}. {BOXED}<name> scores only the last \\boxed{{...}}",
        metavar="NAME",
    )
    custom_rm_path: str | None = flag(None, "your own reward function", metavar="PATH")
    group_rm: bool = flag(False, "the reward function scores a whole group at a time")
    rm_url: str | None = flag(None, "server of the remote_rm reward", metavar="URL")
    reward_key: str | None = flag(None, "which entry counts when a reward is a dict", metavar="KEY")
    eval_reward_key: str | None = flag(None, "the same for evaluation; default: --reward-key", metavar="KEY")
    reward_weights: dict | None = flag(
        None, "weights of the entries when a reward is a dict, as JSON; their sum counts", metavar="JSON"
    )
    overlong_buffer_len: int | None = flag(
        None, "last tokens before --rollout-max-response-len over which a penalty grows", ge=1
    )
    overlong_penalty_factor: float = flag(1.0, "that penalty at full length", ge=0)
    custom_reward_post_process_path: str | None = flag(
        None, "function in place of group normalisation", metavar="PATH"
    )
    reward_retries: int = flag(2, "further tries after a failed reward", ge=0)
    reward_failure_action: str = flag(
        "requeue", "what happens to a sample whose reward keeps failing", choices=("requeue", "drop", "stop")
    )
    reward_failure_limit: int = flag(32, "failed samples in a row that stop the run", ge=1)
    reward_timeout_s: float = flag(10.0, "longest time for one check; a hanging one is killed", gt=0)
    reward_num_workers: int = flag(1, "processes that check answers", ge=1)
