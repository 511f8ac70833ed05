"""Builds the generate request of one sample, and checks it and its response."""

import functools
import os
from typing import Any

from slime.arguments import PluginArgs
from slime.arguments.groups.trained_sampling import (
    asking_for_nucleus,
    engines_report_nucleus,
    replays_nucleus,
    restricts_nucleus,
)
from slime.data.mix import mix64
from slime.rollout.generation.policy_requests import check_sampling, is_trained
from slime.rollout.generation.sample_images import encode_prompt_with_images, pictures_of, wire_form
from slime.rollout.generation.scope import current_scope
from slime.rollout.prompt_groups import attempt_of, describe
from slime.utils import top_p
from slime.utils.errors import EngineResponseError
from slime.utils.processing_utils import encode_text
from slime.utils.types import Sample
from slime.wire.protocol import (
    ADAPTER_NAME,
    GenerateRequest,
    Generation,
    SamplingParams,
    wrong_token_id,
)

_EVAL_PROMPTS = 16  # that travel as one request
_LOG_PROB_SLACK = 0.01  # rounding of a certain token's 0


class PromptError(ValueError):
    """A sample that no engine can serve: too long for the context, or with an unknown token id."""


def sampling_params_of(args: PluginArgs) -> dict[str, Any]:
    """Return the run's sampling parameters: a new dict at each call, which generate functions may change."""
    params = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    reported = replays_nucleus(args) and engines_report_nucleus(args)
    return asking_for_nucleus(args, params) if reported else params


def sampling_seed(args: PluginArgs, sample: Sample) -> int:
    """Return a positive 31-bit seed, made from the run's seed and the sample: a rerun draws the same tokens.

    The attempt is part of it: a group that is generated again should not repeat what could not be scored.
    """
    return (
        mix64(args.rollout_seed, sample.index or 0, sample.response_length, attempt_of(sample)) % (2**31 - 1)
        + 1
    )


def prepare_prompt(sample: Sample, tokenizer: Any, processor: Any = None) -> None:
    """Put the prompt's token ids into a sample that has none yet."""
    if sample.tokens:
        return
    if not isinstance(sample.prompt, str):
        raise PromptError(f"the prompt of {describe(sample)} is no text: set --apply-chat-template.")
    ids = _encode(tokenizer, sample.prompt)
    if not pictures_of(sample):
        sample.tokens = list(ids)
        return
    if processor is None:
        raise PromptError(f"{describe(sample)} has images, and no processor was loaded: --multimodal-keys.")
    try:
        encode_prompt_with_images(sample, ids, processor)
    except ValueError as error:
        raise PromptError(f"the images of {describe(sample)}: {error}") from error


@functools.lru_cache(maxsize=256)
def _encode(tokenizer: Any, prompt: str) -> tuple[int, ...]:
    """Encode a prompt; cached, since all samples of a group have the same one."""
    return tuple(encode_text(tokenizer, prompt))


def token_budget(
    args: PluginArgs, sample: Sample, max_new_tokens: int | None, context_limit: int | None
) -> int | None:
    """Return how many tokens may still be generated; 0: the sample is full; None: no limit is known here.

    `context_limit` is the run's own bound on prompt plus response; the engine's is args.max_context_len.
    """
    budgets = [] if max_new_tokens is None else [max_new_tokens - sample.response_length]
    limits = {"the model's context": args.max_context_len, "--rollout-max-context-len": context_limit}
    for name, limit in limits.items():
        if limit is None:
            continue
        room = limit - len(sample.tokens)
        if room <= 0 and sample.response_length == 0:
            found = f"the prompt of {describe(sample)} has {len(sample.tokens)} tokens, {name} is {limit}"
            raise PromptError(
                f"{found}: filter such prompts with --rollout-max-prompt-len {limit - 1} or less."
            )
        budgets.append(room)
    return max(0, min(budgets)) if budgets else None


def check_response(args: PluginArgs, request: GenerateRequest, answer: Generation) -> None:
    """Raise EngineResponseError for an invalid response, so that it never becomes training data."""
    wrong = _wrong_with(args, request.sampling.max_new_tokens, answer) or wrong_images(request, answer)
    if not wrong and request.sampling.return_top_p_token_ids:
        found = top_p.from_meta(answer.meta)
        if found is None:
            wrong = "it does not report the ids that its tokens were drawn from, which the request asked for"
            wrong += " (SGLang does from 0.5.23 on)"
        else:
            wrong = top_p.wrong_with(*found, answer.ids, args.vocab_size)
    if wrong:
        raise EngineResponseError(f"the engine's answer to request {request.rid} cannot be right: {wrong}")


def _wrong_with(args: PluginArgs, budget: int | None, answer: Generation) -> str | None:
    ids, log_probs = answer.ids, answer.log_probs
    if not ids:
        return f"no token, although it says {answer.finish!r}" if answer.finish != "abort" else None
    if budget is not None and len(ids) > budget:
        return f"{len(ids)} tokens where {budget} were asked for"
    # None is below 0: an answer with such an id could not be read.
    if args.vocab_size is not None and max(ids) >= args.vocab_size:
        return f"token id {max(ids)} in a vocabulary of {args.vocab_size}"
    if log_probs is not None and max(log_probs) > _LOG_PROB_SLACK:
        return f"a log-prob of {max(log_probs)}"
    return None


def wrong_images(request: GenerateRequest, answer: Generation) -> str | None:
    """Return a complaint if the engine counts other image tokens than we do, or generated one."""
    expected = request.num_prompt_tokens
    if expected is not None and answer.prompt_tokens and answer.prompt_tokens != expected:
        found = f"it read {answer.prompt_tokens} tokens where our processor makes {expected}"
        return f"{found} of text and images: their processors differ"
    forbidden = request.forbidden_ids.intersection(answer.ids)
    return f"it holds the image token {min(forbidden)}, for which there is no image" if forbidden else None


def build_request(
    args: PluginArgs,
    sample: Sample,
    sampling_params: dict[str, Any],
    budget: int | None,
) -> GenerateRequest:
    """Return the request that continues the sample. A `sampling_seed` that the caller set is kept."""
    if not sample.tokens:
        raise PromptError(f"the prompt of {describe(sample)} is empty: there is nothing to continue.")
    wrong = wrong_token_id(sample.tokens, args.vocab_size)
    if wrong is not None:  # it would crash some engines
        found = f"{describe(sample)} has token id {wrong}, the model's vocabulary has {args.vocab_size} ids"
        raise PromptError(f"{found}: the tokenizer of --hf-checkpoint and the model do not belong together.")
    can_report = is_trained() and not args.allow_sampling_mismatch and engines_report_nucleus(args)
    is_restricted = (
        restricts_nucleus(sampling_params, args.vocab_size) or sample.rollout_top_p_token_offsets is not None
    )
    if can_report and is_restricted:
        sampling_params = asking_for_nucleus(args, sampling_params)
    check_sampling(args, sampling_params)
    params = {"sampling_seed": sampling_seed(args, sample), **sampling_params, "max_new_tokens": budget}
    if budget is not None and params.get("min_new_tokens"):
        params["min_new_tokens"] = min(params["min_new_tokens"], budget)
    replays = args.use_rollout_routing_replay and is_trained()
    extra: dict[str, Any] = {"return_routed_experts": True} if replays else {}
    if args.lora_sync == "adapter":
        extra["lora_path"] = ADAPTER_NAME
    input_ids, image_data, forbidden = wire_form(args, sample)
    scope, index, group = current_scope(), sample.group_index, None
    if index is not None and not args.router_middleware_paths:
        # Middlewares of the router see one sample's request and response at a time.
        group = f"train {index}" if is_trained() else f"eval {index // _EVAL_PROMPTS}"
    return GenerateRequest(
        input_ids=input_ids,
        image_data=image_data,
        num_prompt_tokens=len(sample.tokens) if image_data else None,
        forbidden_ids=forbidden,
        sampling=SamplingParams.from_json(params),
        rid=f"{scope.name if scope is not None else ''}{sample.index}-{os.urandom(16).hex()}",
        session=sample.session_id,
        extra=extra,
        group=group,
    )
