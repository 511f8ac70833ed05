"""Flags of sandboxes, and of the rewards that need one or ask a model: programs and a judge."""

from dataclasses import dataclass

from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import flag, having, needs
from slime.catalog.rewards import REWARDS, find_reward
from slime.catalog.sandboxes import SANDBOXES

_SANDBOXES = "; ".join(f"{name}: {row.help}" for name, row in SANDBOXES.items())


def _may_ask_judge(draft: Draft) -> bool:
    """Return whether the judge may be used: without --rm-type, rows of the prompt data may name it."""
    reward = find_reward(draft.rm_type)
    return draft.rm_type is None or reward is None or reward.asks_judge


# -- when flags have an effect
VENDOR = needs("sandbox", *(name for name, row in SANDBOXES.items() if not row.is_local))
JUDGE = needs("rm_type", *having(REWARDS, "asks_judge"), or_if=_may_ask_judge)


@dataclass
class SandboxFlags:
    """Sandbox and judge."""

    sandbox: str = flag("local", f"where programs of the model run. {_SANDBOXES}", choices=tuple(SANDBOXES))
    sandbox_image: str | None = flag(
        None, "image or template of a vendor's sandbox", metavar="NAME", only_with=VENDOR
    )
    judge_url: str | None = flag(
        None,
        "OpenAI-style address, http://host:port/v1; default: --judge-model of this run",
        metavar="URL",
        only_with=JUDGE,
    )
    judge_model: str | None = flag(
        None,
        "judge at --judge-url, or model of --sglang-config; default: the policy",
        metavar="NAME",
        only_with=JUDGE,
    )
    judge_rubric: str | None = flag(
        None,
        "text file with {prompt}, {response} and {label}; default: a general one",
        metavar="FILE",
        only_with=JUDGE,
    )
    judge_max_score: float = flag(10.0, "the best score; it becomes reward 1", gt=0, only_with=JUDGE)
