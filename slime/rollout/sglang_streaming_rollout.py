"""A generate function that streams the response, so that a broken stream loses only what was not yet read.

    --custom-generate-function-path slime.rollout.sglang_streaming_rollout.generate_streaming

Each event carries all that the request has made so far. The last one read is written onto the sample however
the stream ends.
"""

import asyncio
import logging
from typing import Any

from slime.arguments import PluginArgs
from slime.rollout.collection.collector import GroupFailed
from slime.rollout.generation.generate_request import (
    build_request,
    check_answer,
    prepare_prompt,
    token_budget,
)
from slime.rollout.prompt_groups import describe
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.errors import EngineAnswerError
from slime.utils.http_utils import HttpError
from slime.utils.types import Sample
from slime.wire.protocol import GenerateRequest, Generation

logger = logging.getLogger(__name__)

MAX_BREAKS = 60  # streams that end without a token, one after another


async def generate_streaming(args: PluginArgs, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Like the default `generate`, over a stream."""
    state = GenerateState(args)
    prepare_prompt(sample, state.tokenizer, state.processor)
    idle = 0
    while True:
        budget = token_budget(
            args, sample, sampling_params.get("max_new_tokens"), state.scope.max_context_len
        )
        if budget == 0:
            sample.status = Sample.Status.TRUNCATED
            return sample
        before = sample.response_length
        request = build_request(args, sample, sampling_params, budget, stream=True)
        error = await _read_onto(args, sample, request)
        if state.aborted or sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
            return sample
        idle = 0 if sample.response_length > before else idle + 1
        if idle > MAX_BREAKS:
            raise error or GroupFailed(f"the engine aborted {describe(sample)} {idle} times without a token")
        logger.info(
            "%s continues at token %d: %s", describe(sample), sample.response_length, error or "paused"
        )
        if idle:
            await asyncio.sleep(min(5.0, 0.05 * 2 ** min(idle, 10)))


async def _read_onto(args: PluginArgs, sample: Sample, request: GenerateRequest) -> HttpError | None:
    """Read one stream and write its last event onto the sample; return a temporary error, if any."""
    state = GenerateState(args)
    last: dict[str, Any] | None = None
    try:
        async with state.sending(request) as note_tokens:
            try:
                async for event in state.client.stream(request):
                    last = event
            finally:
                note_tokens(len(_read(last).ids) if last is not None else 0)
        if last is not None:
            check_answer(args, request, _read(last))
        return None
    except HttpError as error:
        if 400 <= error.status < 500:
            raise
        return error
    finally:
        sample.status = Sample.Status.ABORTED  # unless the event has a finish reason
        if last is not None:
            made = _read(last)
            sample.append_response_tokens(
                args,
                tokens=made.ids,
                log_probs=made.log_probs or [],
                meta_info=dict(made.meta),
                text=made.text,
            )


def _read(event: dict[str, Any]) -> Generation:
    try:
        meta = dict(event["meta_info"])
        ended_early = {"type": "abort", "message": "the stream ended early"}
        meta["finish_reason"] = meta.get("finish_reason") or ended_early
        return Generation.from_json({**event, "meta_info": meta})
    except (KeyError, TypeError, ValueError) as error:
        raise EngineAnswerError(f"an event of the engine's stream cannot be right: {error}") from error
