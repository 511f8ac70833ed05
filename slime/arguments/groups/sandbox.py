"""Flags of sandboxes, and of the rewards that need one or ask a model: programs and a judge."""

from dataclasses import dataclass

from slime.arguments.core.flag import OnlyWith, flag
from slime.catalog.rewards import REWARDS, find_reward
from slime.catalog.sandboxes import SANDBOXES

_SANDBOXES = "; ".join(f"{name}: {row.help}" for name, row in SANDBOXES.items())

# -- when flags have an effect
VENDOR = OnlyWith(
    "with --sandbox e2b or daytona",
    lambda d: not SANDBOXES[d.sandbox].is_local,
    "a local box shows the system of this machine; choose --sandbox e2b or daytona",
)
LOCAL = OnlyWith(
    "with --sandbox local or plain",
    lambda d: SANDBOXES[d.sandbox].is_local,
    "boxes of a vendor are counted by the vendor; remove it",
)
JUDGE = OnlyWith(
    "with --rm-type judge",
    # Without --rm-type a row of the prompt data may name the judge.
    lambda d: d.rm_type is None or (find_reward(d.rm_type) or REWARDS["judge"]).asks_judge,
    "no judge is asked; use --rm-type judge",
)


@dataclass
class SandboxFlags:
    """Sandbox and judge."""

    sandbox: str = flag("local", f"where programs of the model run. {_SANDBOXES}", choices=tuple(SANDBOXES))
    sandbox_image: str | None = flag(
        None, "image or template of a vendor's box; default: the vendor's", metavar="NAME", only_with=VENDOR
    )
    sandbox_num_boxes: int = flag(32, "most boxes of this machine in use at a time", ge=1, only_with=LOCAL)
    judge_url: str | None = flag(
        None,
        "OpenAI-style address of the judge, http://host:port/v1; default: --judge-model of this run",
        metavar="URL",
        only_with=JUDGE,
    )
    judge_model: str | None = flag(
        None,
        "name of the judge at --judge-url, or of a model of --sglang-config; default: the policy",
        metavar="NAME",
        only_with=JUDGE,
    )
    judge_rubric: str | None = flag(
        None,
        "text file of what the judge is asked, with {prompt}, {response} and {label}; default: a general one",
        metavar="FILE",
        only_with=JUDGE,
    )
    judge_max_score: float = flag(
        10.0, "the judge's best score, which becomes reward 1", gt=0, only_with=JUDGE
    )
    judge_max_tokens: int = flag(512, "longest answer of the judge", ge=1, only_with=JUDGE)
    judge_timeout_s: float = flag(
        120.0, "longest time for one judgement, all tries together", gt=0, only_with=JUDGE
    )
    judge_num_requests: int = flag(16, "most judgements under way at a time", ge=1, only_with=JUDGE)
