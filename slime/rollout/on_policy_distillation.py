"""On-policy distillation from teachers behind HTTP: a reward function asks for their log-probs.

`--use-opd --opd-type engine --rm-url http://teacher/generate --custom-rm-path
slime.rollout.on_policy_distillation.reward_func`. The teacher is any server that answers SGLang's /generate
with `input_token_logprobs`. The reward itself is 0: the policy learns from the teacher alone. With
`--opd-kl reverse_top_k` or `forward_top_k` the teacher also reports its --opd-top-k most likely ids.

Several teachers: `--rm-url math=http://one/generate,code=http://two/generate`; `metadata["teacher"]` of a
sample names its teacher. The policy as its own teacher: `self_reward_func` in place of `reward_func`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from slime.arguments import PluginArgs
from slime.arguments.groups.objectives import TOP_KLS
from slime.catalog.deadlines import timeout_s
from slime.data.prompt_rows import render_prompt
from slime.rollout.generation.state import get_model_url
from slime.rollout.rm_hub.outcomes import RewardConfigError
from slime.utils.http_utils import HttpError, post
from slime.utils.processing_utils import load_tokenizer
from slime.utils.reward_failure import RewardFailure, infra_error, invalid
from slime.utils.types import Sample

# Keys of Sample.metadata, that is columns of the metadata of a prompt.
TEACHER_KEY = "teacher"  # which of several teachers scores the sample
TEACHER_PROMPT_KEY = "teacher_prompt"  # what the policy reads as its own teacher


async def reward_func(args: PluginArgs, sample: Sample, **kwargs: Any) -> float | RewardFailure:
    """Asks the sample's teacher at --rm-url once per sample and keeps its log-probs on the sample."""
    if not args.rm_url:
        raise ValueError("--opd-type engine needs --rm-url: the /generate address of the teacher.")
    return await _ask(args, sample, teacher_url(args.rm_url, sample), list(sample.tokens))


async def self_reward_func(args: PluginArgs, sample: Sample, **kwargs: Any) -> float | RewardFailure:
    """Scores a response by the run's own engines, behind a prompt that knows more (self-distillation).

    `metadata["teacher_prompt"]` is that prompt: text or messages, for example the task with its solution.
    """
    if TEACHER_PROMPT_KEY not in sample.metadata:
        raise RewardConfigError(
            f"sample {sample.index} has no metadata[{TEACHER_PROMPT_KEY!r}]: self-distillation scores the "
            "response behind that prompt; add the column to the metadata of --prompt-data (--metadata-key)."
        )
    prompt, tokenizer = sample.metadata[TEACHER_PROMPT_KEY], load_tokenizer(args.hf_checkpoint)
    if args.apply_chat_template and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, str):
        kwargs = sample.apply_chat_template_kwargs
        prompt = render_prompt(prompt, tokenizer, kwargs=kwargs, where=f"{TEACHER_PROMPT_KEY} of the sample")
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    tokens = [*tokenizer.encode(prompt, add_special_tokens=False), *response]
    return await _ask(args, sample, get_model_url(args), tokens)


def teacher_url(addresses: str, sample: Sample) -> str:
    """Return the address of the sample's teacher: the only one, or that of its `metadata["teacher"]`.

    Example: "math=http://a/generate,code=http://b/generate" and metadata {"teacher": "code"}: the second.
    """
    pairs = [entry.partition("=") for entry in addresses.split(",")]
    if any("://" in name or not url for name, _, url in pairs):
        return addresses  # one address, whose query may have an equals sign
    urls = {name.strip(): url.strip() for name, _, url in pairs}
    name = sample.metadata.get(TEACHER_KEY)
    if name not in urls:
        raise RewardConfigError(
            f"--rm-url names the teachers {', '.join(urls)}, and metadata[{TEACHER_KEY!r}] of sample "
            f"{sample.index} is {name!r}: name one of them in the metadata of each prompt (--metadata-key)."
        )
    return urls[name]


async def _ask(args: PluginArgs, sample: Sample, url: str, tokens: list[int]) -> float | RewardFailure:
    top_k = args.opd_top_k if args.opd_kl in TOP_KLS else 0
    payload = {
        "input_ids": tokens,
        # Servers score an input at temperature 1 whatever is asked.
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": top_k,
    }
    try:
        answer = await post(url, payload, max_retries=9, timeout_s=timeout_s(args, "generate"))
    except HttpError as error:
        return infra_error(f"teacher at {url}: {error}")
    try:
        sample.teacher_log_probs = response_log_probs(answer, sample, tokens)
        if top_k:
            add_top_log_probs(answer, sample, top_k)
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


def response_log_probs(answer: dict[str, Any], sample: Sample, tokens: Sequence[int]) -> list[float]:
    """The log-prob of each response token at the end of `tokens`, which the teacher has read.

    `input_token_logprobs` is [[log-prob, token id], ...].
    """
    entries = answer.get("meta_info", {}).get("input_token_logprobs") or []
    if len(entries) != len(tokens):
        found = f"{len(entries)} input_token_logprobs for {len(tokens)} tokens"
        raise ValueError(f"the teacher returned {found}: it must score the whole input.")
    # The first token has nothing before it, so its entry is empty; the response is the tail in any case.
    tail = entries[len(entries) - sample.response_length :]
    wanted = tokens[len(entries) - sample.response_length :]
    for position, (entry, token) in enumerate(zip(tail, wanted, strict=True)):
        if entry[1] != token or entry[0] is None:
            found = f"the teacher scored token {entry[1]} where response token {position} is {token}"
            raise ValueError(f"{found}: it must share the policy's tokenizer.")
    return [float(entry[0]) for entry in tail]


def add_top_log_probs(answer: dict[str, Any], sample: Sample, top_k: int) -> None:
    """Set the teacher's `top_k` most likely ids of each response token, and their log-probs, on the sample.

    `input_top_logprobs` is [[[log-prob, token id], ...], ...].
    """
    rows = answer["meta_info"].get("input_top_logprobs") or []
    tail = rows[len(rows) - sample.response_length :]
    lengths = {len(row or ()) for row in tail}
    if len(tail) != sample.response_length or lengths - {top_k}:
        raise ValueError(
            f"the teacher returned {len(tail)} rows of {sorted(lengths)} top log-probs for "
            f"{sample.response_length} response tokens, not {top_k} for each: its server must support "
            "top_logprobs_num, and --opd-top-k be at most its vocabulary."
        )
    sample.teacher_top_ids = np.array([[entry[1] for entry in row] for row in tail], np.int32)
    sample.teacher_top_log_probs = np.array([[entry[0] for entry in row] for row in tail], np.float32)
