"""The default rollout function: generate groups through the engines, score them, and fill a training batch.

Read it bottom up: `generate_rollout` -> `generate_and_rm_group` -> `generate_and_rm` -> `generate`. Plug-ins
call and replace these names, so each is looked up in this module when it is used.
"""

import asyncio
import copy
import inspect
import logging
import os
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

from slime.arguments import PluginArgs, with_defaults
from slime.arguments.groups.topology import EVALUATION_ENGINES
from slime.catalog.deadlines import timeout_s
from slime.catalog.engines import ENGINES
from slime.catalog.estimators import ESTIMATORS
from slime.catalog.limits import limit
from slime.liveness import waits
from slime.observability.tracer import trace_span
from slime.rollout import episode_record, ledger
from slime.rollout import eval_rollout as evaluation_run
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.collection.batch_collector import BatchCollector
from slime.rollout.collection.collector import GroupFailed, is_permanent
from slime.rollout.collection.greedy_baseline import with_greedy_baseline
from slime.rollout.collection.versions import name_versions
from slime.rollout.generation.generate_request import (
    PromptError,
    build_request,
    check_response,
    prepare_prompt,
    token_budget,
)
from slime.rollout.generation.policy_requests import PolicyRequests, not_trained
from slime.rollout.generation.returned import CUSTOM_GENERATE, check_returned, without_a_score
from slime.rollout.generation.scope import RequestScope
from slime.rollout.generation.state import GenerateState, get_model_url
from slime.rollout.generation.turn_gate import call_or_wait, can_be_kept
from slime.rollout.prompt_groups import (
    FINISHED,
    Entry,
    Group,
    copy_group,
    copy_sample,
    describe,
    describe_fully,
    is_finished,
    mask_earlier_tokens,
)
from slime.rollout.rm_hub.hub import waits_for_group
from slime.rollout.rm_hub.outcomes import RewardConfigError
from slime.rollout.rm_hub.scoring import score_samples
from slime.rollout.sample_hooks import apply_rollout_sample_hooks, set_current_rollout_id
from slime.rollout.workers import current
from slime.utils import http_utils
from slime.utils.async_utils import all_or_none, run
from slime.utils.errors import EpisodeEnded, RunStopped
from slime.utils.misc import load_function
from slime.utils.packed_samples import store_experts
from slime.utils.plugin_errors import plugin_call
from slime.utils.types import Sample, flatten_samples

__all__ = ["GenerateState", "abort", "eval_rollout", "generate", "generate_and_rm", "generate_and_rm_group"]
__all__ += ["generate_rollout", "get_model_url"]

logger = logging.getLogger(__name__)

ABORT_DEADLINE_S = 20.0
MAX_IDLE_RESUBMITS = 60  # responses without a token from a paused engine, a second apart


async def generate(args: PluginArgs, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Continue the sample until it stops, is full, or the rollout is aborted; keep what was generated."""
    state = GenerateState(args)
    if sample.status not in (Sample.Status.PENDING, Sample.Status.ABORTED):
        raise ValueError(f"{describe(sample)} is {sample.status.value}, not pending or aborted.")
    prepare_prompt(sample, state.tokenizer, state.processor)
    idle = 0
    while True:
        budget = token_budget(
            args, sample, sampling_params.get("max_new_tokens"), state.scope.max_context_len
        )
        if budget == 0:
            sample.status = Sample.Status.TRUNCATED
            return sample
        request = build_request(args, sample, sampling_params, budget)
        with trace_span(sample, "generate") as span:
            async with state.sending(request) as note_tokens:
                answer = await state.client.generate(request)
                note_tokens(len(answer.ids))
            span.update({"tokens": len(answer.ids), **state.engine_of(answer)})
        check_response(args, request, answer)
        sample.append_response_tokens(
            args,
            tokens=answer.ids,
            log_probs=answer.log_probs or [],
            meta_info=dict(answer.meta),
            text=answer.text,
        )
        if answer.finish != "abort" or state.aborted:
            return sample
        # Not our abort: the engine ended its requests, for example for a weight push. Continue from there.
        idle = 0 if answer.ids else idle + 1
        if idle > MAX_IDLE_RESUBMITS:
            cause = f"{idle} times without a token: {answer.finish_detail}"
            raise GroupFailed(f"the engine aborted {describe(sample)} {cause}")
        if idle:
            await asyncio.sleep(min(1.0, 0.05 * 2**idle))


generate_streaming = generate  # its name in other releases, where only a stream kept aborted responses


async def generate_and_rm(
    args: PluginArgs, sample: Entry, sampling_params: dict[str, Any], evaluation: bool = False
) -> Entry:
    """Generate one sample and score it. A custom generate function may turn it into several (fan-out)."""
    with_defaults(args)
    if not evaluation and args.partial_rollout and args.mask_offpolicy_in_partial_rollout:
        mask_earlier_tokens(sample)
    if isinstance(sample, Sample) and (record := episode_record.current()) is not None:
        sample = record.restored(sample)
    if not is_finished(sample):
        assert isinstance(sample, Sample), "a fan-out that was aborted starts again from its prompt"
        state = GenerateState(args)
        async with state.semaphore:
            if state.aborted:
                sample.status = Sample.Status.ABORTED
                return sample
            if evaluation:
                with not_trained():
                    made = await _call_until_ended(args, sample, sampling_params)
            else:
                made = await _generate_call(args, sample, sampling_params, evaluation=False)
        sample = await apply_rollout_sample_hooks(args, made, evaluation=evaluation)
    if not waits_for_group(args):
        with not_trained():  # a reward may send requests to the policy itself
            await score_samples(args, [sample], evaluation=evaluation)
    return sample


async def _call_until_ended(args: PluginArgs, sample: Sample, sampling_params: dict[str, Any]) -> Entry:
    """Evaluate a sample; start again from its prompt if a generate function aborted it in a weight push."""
    origin = copy_sample(sample)
    for attempt in range(1, MAX_IDLE_RESUBMITS + 1):
        made = await _generate_call(args, sample, dict(sampling_params), evaluation=True)
        was_aborted = any(s.status is Sample.Status.ABORTED for s in flatten_samples([made]))
        if not was_aborted or GenerateState(args).aborted:
            return made
        sample = copy_sample(origin)
        await asyncio.sleep(min(1.0, 0.05 * 2**attempt))
    raise GroupFailed(f"evaluation: {describe(origin)} was aborted {attempt} times by its generate function.")


def _generate_call(
    args: PluginArgs, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Coroutine[Any, Any, Entry]:
    """Return the call of the sample's generate function: `generate`, or one that the user brings."""
    path = sample.generate_function_path or args.custom_generate_function_path
    if path is None:
        return generate(args, sample, sampling_params)
    call = _call_function(args, path, sample, sampling_params, evaluation)
    return call if evaluation or not can_be_kept(args) else call_or_wait(sample, call)


async def _call_function(
    args: PluginArgs, path: str, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Entry:
    function, kept = load_function(path), (PromptError, EpisodeEnded)
    source = copy.copy(sample)  # the function may change its numbers
    options = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
    try:
        with (
            trace_span(sample, "generate_function"),
            PolicyRequests(args).entered() as requests,
            plugin_call(CUSTOM_GENERATE, path, lambda: describe_fully(sample), keep=kept),
        ):
            result = await _within_deadline(args, path, function(args, sample, sampling_params, **options))
    except EpisodeEnded as ended:
        return without_a_score(path, sample, ended)
    made = check_returned(path, source, result, args.vocab_size)
    for one in flatten_samples([made]):
        name_versions(one, requests.versions)
        requests.check_nucleus(one)
    return made


async def _within_deadline(args: PluginArgs, path: str, call: Awaitable[Any]) -> Any:
    """Return the result of a user's generate function; a timeout fails the group."""
    name, limit_s = f"{CUSTOM_GENERATE} {path}", timeout_s(args, "custom-generate")
    try:
        with waits.waiting(name, owner="rollout", deadline_s=limit_s):
            async with asyncio.timeout(limit_s) as deadline:
                return await call
    except TimeoutError:
        if not deadline.expired():
            raise  # a timeout of the function's own
        late = f"did not return within --timeouts custom-generate={limit_s:g}"
        raise GroupFailed(f"{name} {late}: give what it waits for a timeout, or raise the limit.") from None


async def generate_and_rm_group(
    args: PluginArgs, group: Group, sampling_params: dict[str, Any], evaluation: bool = False
) -> Group:
    """Generate and score all samples of a group; with --group-rm their rewards are computed together."""
    if GenerateState(args).aborted:
        return group
    if (workers := current.current()) is not None:
        return await workers.run(group, sampling_params, evaluation)
    for sample in flatten_samples(group):
        sample.session_id = sample.session_id or os.urandom(16).hex()
    tasks = [
        asyncio.create_task(_generate_with_retries(args, entry, sampling_params, evaluation))
        for entry in group
    ]
    group = await all_or_none(tasks)
    samples = flatten_samples(group)
    if waits_for_group(args) and not any(s.status is Sample.Status.ABORTED for s in samples):
        with not_trained():
            await score_samples(args, samples, evaluation=evaluation)
        if not evaluation and (durable := ledger.current()) is not None:
            durable.scored(group)
    return group


async def _generate_with_retries(
    args: PluginArgs, entry: Entry, sampling_params: dict[str, Any], evaluation: bool
) -> Entry:
    """Generate one entry; retry temporary failures from its original state, with the same seed."""
    origin, allowed = copy_group([entry]), limit(args, "group-attempts")
    durable = None if evaluation else ledger.current()
    if durable is not None and (found := durable.recall(entry)) is not None:
        return found  # finished before a crash; only a reward of its group may be missing
    for attempt in range(1, allowed + 1):
        try:
            with episode_record.entered(durable, origin[0]):
                made = await generate_and_rm(args, entry, dict(sampling_params), evaluation=evaluation)
            _store_experts(args, made)
            if durable is not None:
                durable.finished(origin[0], made)
            return made
        except Exception as error:
            if is_permanent(error) or isinstance(error, (RunStopped, RewardConfigError)):
                raise
            cause = f"generating {describe(origin)} failed ({type(error).__name__}: {error})"
            if attempt == allowed:
                made_all = f"{attempt} attempts were made (--limits group-attempts)"
                raise GroupFailed(f"{cause}; {made_all}.") from error
            logger.warning("Attempt %d of %d to generate failed: %s", attempt, allowed, cause)
            entry = copy_group(origin)[0]
    raise AssertionError("the last attempt either returns or raises")


def _store_experts(args: PluginArgs, made: Entry) -> None:
    """Replace recorded experts of finished samples by references: they are larger than all else together."""
    if args.use_rollout_routing_replay and args.run_dir:
        for sample in flatten_samples([made]):
            if sample.status in FINISHED:
                store_experts(sample, args.run_dir)


async def abort(args: PluginArgs, rollout_id: int) -> None:
    """Abort the requests of the current rollout, by their ids, at every worker. Evaluation has another scope.

    Each request then returns the tokens generated so far. A worker that cannot be reached is only logged: it
    holds nothing the batch needs.
    """
    scope = GenerateState(args).scope
    if scope.rids:
        logger.info("Rollout %s: aborting %d requests", rollout_id, len(scope.rids))
    await abort_scope(args, scope)


async def abort_scope(args: PluginArgs, scope: RequestScope) -> None:
    """Abort the requests of one scope: by its prefix where engines can, and one by one all other ids.

    Ids without the prefix were chosen by a generate function, or belong to calls of an earlier scope.
    """
    scope.abort()
    if (workers := current.current()) is not None:
        await workers.abort(scope.name)
    rids = scope.own_rids
    if not rids:
        return
    try:  # restarted workers may have new addresses
        answer = await http_utils.get(get_model_url(args, "default", "/workers"), timeout_s=5.0)
        urls = [worker["url"] for worker in answer["workers"]]
    except (http_utils.HttpError, KeyError, TypeError):
        urls = list(args.engine_urls)
    client, named = GenerateState(args).client, rids
    # The kind of external engines is not known here.
    if ENGINES[args.rollout_engine].dialect.aborts_by_prefix and not args.rollout_external_engine_addrs:
        named = [rid for rid in rids if not rid.startswith(scope.name)]
    try:
        async with waits.limited("abort of surplus requests", ABORT_DEADLINE_S):
            if len(named) < len(rids):
                await client.cancel_scope(urls, scope.name)
            await client.cancel(urls, named)
    except (http_utils.HttpError, waits.WaitTimeout) as error:
        logger.warning("Aborting %d requests failed: %s", len(rids), error)


def start_group(
    args: PluginArgs, group: Group, sampling_params: dict[str, Any]
) -> Coroutine[Any, Any, Group]:
    """Return the work on one training group: its samples, and a greedy response if the estimator needs it."""
    if not ESTIMATORS[args.advantage_estimator].needs_greedy_response:
        return generate_and_rm_group(args, group, sampling_params)
    return with_greedy_baseline(args, group, sampling_params, generate_and_rm_group)


def call_batch_hooks(
    args: PluginArgs, kept: Sequence[Group | Sample], decided: Sequence[Group], data_source: Any
) -> None:
    """Call the plug-ins that see the whole rollout; fan-out siblings appear as single samples."""
    path = args.rollout_sample_filter_path
    if path is not None:
        with plugin_call("--rollout-sample-filter-path", path):
            load_function(path)(args, [flatten_samples([group]) for group in kept])
    path = args.rollout_all_samples_process_path
    if path is not None:
        with plugin_call("--rollout-all-samples-process-path", path):
            load_function(path)(args, [flatten_samples(group) for group in decided], data_source)


async def eval_rollout(args: PluginArgs, rollout_id: int) -> RolloutFnEvalOutput:
    """Evaluate all datasets at once, each with its own reward, sampling and generate function."""
    set_current_rollout_id(rollout_id)
    engines = EVALUATION_ENGINES if EVALUATION_ENGINES in args.sglang_model_routers else "default"
    with RequestScope(args.eval_max_context_len or args.rollout_max_context_len, engines).entered():
        return await evaluation_run.evaluate(args, generate_and_rm_group)


def generate_rollout(
    args: PluginArgs, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Make one training batch, or evaluate; this is the default of --rollout-function-path."""
    if evaluation:
        return run(eval_rollout(args, rollout_id))
    state = GenerateState(args)
    set_current_rollout_id(rollout_id)
    with RequestScope(args.rollout_max_context_len).entered():
        collector = BatchCollector(
            args,
            rollout_id,
            data_source,
            start_group=lambda group: start_group(args, group, state.sampling_params),
            abort_requests=lambda: abort(args, rollout_id),
        )
        run(collector.collect())
    call_batch_hooks(args, collector.kept, collector.decided, data_source)
    return RolloutFnTrainOutput(samples=collector.kept, metrics=collector.metrics())
