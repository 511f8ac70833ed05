"""On-policy distillation from a teacher behind HTTP: a reward function asks for its log-probs.

`--use-opd --opd-type engine --rm-url http://teacher/generate --custom-rm-path
slime.rollout.on_policy_distillation.reward_func`. The teacher is any server that answers SGLang's /generate
with `input_token_logprobs`. The reward itself is 0: the policy learns from the teacher alone.
"""

from collections.abc import Sequence
from typing import Any

from slime.arguments import PluginArgs
from slime.catalog.deadlines import timeout_s
from slime.utils.http_utils import HttpError, post
from slime.utils.reward_failure import RewardFailure, infra_error, invalid
from slime.utils.types import Sample


async def reward_func(args: PluginArgs, sample: Sample, **kwargs: Any) -> float | RewardFailure:
    """Asks the teacher at --rm-url once per sample and keeps its log-probs on the sample."""
    if not args.rm_url:
        raise ValueError("--opd-type engine needs --rm-url: the /generate address of the teacher.")
    payload = {
        "input_ids": list(sample.tokens),
        # Servers score an input at temperature 1 whatever is asked.
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    try:
        answer = await post(args.rm_url, payload, max_retries=9, timeout_s=timeout_s(args, "generate"))
    except HttpError as error:
        return infra_error(f"teacher at --rm-url: {error}")
    try:
        sample.teacher_log_probs = response_log_probs(answer, sample)
    except ValueError as error:
        return invalid(str(error))
    return 0.0


async def zero_reward(args: PluginArgs, sample: Sample, **kwargs: Any) -> float:
    """The reward where the trainer holds the teacher: none of its own, only the distance to the teacher."""
    return 0.0


def post_process_rewards(
    args: PluginArgs, samples: Sequence[Sample], **kwargs: Any
) -> tuple[list[float], list[float]]:
    """(raw, trained) rewards of 0 for each sample, for --custom-reward-post-process-path."""
    return [0.0] * len(samples), [0.0] * len(samples)


def response_log_probs(answer: dict[str, Any], sample: Sample) -> list[float]:
    """The log-prob of each response token; `input_token_logprobs` is [[log-prob, token id], ...]."""
    entries = answer.get("meta_info", {}).get("input_token_logprobs") or []
    if len(entries) != len(sample.tokens):
        found = f"{len(entries)} input_token_logprobs for {len(sample.tokens)} tokens"
        raise ValueError(f"the teacher returned {found}: it must score the whole input.")
    # The first token has nothing before it, so its entry is empty; the response is the tail in any case.
    tail = entries[len(entries) - sample.response_length :]
    wanted = sample.tokens[len(entries) - sample.response_length :]
    for position, (entry, token) in enumerate(zip(tail, wanted, strict=True)):
        if entry[1] != token or entry[0] is None:
            found = f"the teacher scored token {entry[1]} where response token {position} is {token}"
            raise ValueError(f"{found}: it must share the policy's tokenizer.")
    return [float(entry[0]) for entry in tail]
