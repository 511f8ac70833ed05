"""Plays episodes; `generate` is the generate function of a run with --env.

The policy reads an observation and writes its turn, the environment steps, until the environment is done or a
budget of turns, tokens or time is used up. A weight push does not interrupt an episode. If a rollout ends
first, --partial-rollout keeps the episode: its environment waits in this process for the next rollout. After
a crash the environment is restored from what its `save` returned, or by replaying the recorded actions.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

from slime.agent.environments.guarded_calls import EnvironmentCalls
from slime.agent.environments.protocol import (
    EnvironmentFailure,
    Item,
    Observation,
    StepResult,
    as_observation,
    as_scores,
    as_step,
)
from slime.agent.environments.rows import ENV_KEY, HELD_OUT_KEY, SEED_KEY, seed_of
from slime.agent.environments.transcript import ObservationRenderer, Transcript, fingerprint
from slime.arguments import PluginArgs
from slime.batch.convert import ROLE_KEY
from slime.catalog.deadlines import timeout_s
from slime.catalog.environments import ENVIRONMENTS, Choice, read_choices
from slime.data.mix import mix64
from slime.observability.rollout_metrics import AGENT_KEY
from slime.rollout import episode_record
from slime.rollout.generation.generate_request import token_budget
from slime.rollout.generation.sample_images import pictures_of
from slime.rollout.prompt_groups import copy_sample, describe, without_response
from slime.rollout.sglang_rollout import GenerateState
from slime.rollout.sglang_rollout import generate as ask_engine
from slime.utils.reward_failure import infra_error
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

# In Sample.metadata: the progress of an interrupted episode; the row's prompt; how the episode ended.
PROGRESS_KEY, ROW_PROMPT_KEY, END_KEY = "episode_progress", "env_row_prompt", "episode_end"
MAX_WAITING = 512  # environments that are kept for the next rollout

_waiting: OrderedDict[str, tuple[EnvironmentCalls, Observation, Any, bool]] = OrderedDict()


class _Interrupted(Exception):
    """The rollout ended during the episode."""


@dataclass
class _Progress:
    """What is needed to return to this state, and the costs so far."""

    episode: str = field(default_factory=episode_record.new_episode)  # a restart has another name
    state: Any = None  # what `save` returned, in a tuple
    shown: dict[str, Any] | None = None  # the observation that the policy responds to
    called: bool = False  # the step of the current turn was called, and has not returned
    end: str | None = None
    actions: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)  # fingerprints of the observations, one more than actions
    turn_start: int = 0  # in the response
    counts: dict[str, float] = field(default_factory=dict)


async def generate(
    args: PluginArgs, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Play one episode: returns a sample with its reward, or one sample for each player."""
    choice = choice_of(args, sample)
    if not ENVIRONMENTS[choice.family].plays_itself:
        return await Episode(args, sample, sampling_params).play()
    module = import_module(ENVIRONMENTS[choice.family].module)
    try:
        made = await module.play(
            args,
            sample,
            sampling_params,
            task=choice.task,
            options=options_of(args, choice),
            item=item_of(args, sample),
        )
        if not made:
            raise EnvironmentFailure("the policy took no turn")
    except EnvironmentFailure as failure:
        return failed(sample, choice, failure)
    for one in made:
        give_reward(args, one, float(one.reward or 0.0))
    return made


def choice_of(args: PluginArgs, sample: Sample) -> Choice:
    """Return the environment of a sample: its own, else the run's."""
    name = sample.metadata.get(ENV_KEY) or args.env
    if name is None:
        raise ValueError(f"{describe(sample)} names no environment: set --env, or `env` in its metadata.")
    return read_choices(str(name))[0]


def options_of(args: PluginArgs, choice: Choice) -> dict[str, Any]:
    return {**args.env_args.get("*", {}), **args.env_args.get(choice.short, {})}


def give_reward(args: PluginArgs, sample: Sample, total: float) -> None:
    """Set the episode's reward, unless the run has a reward function."""
    sample.metadata["env_score"], sample.reward = total, None
    if args.custom_rm_path or sample.custom_rm_path or args.rm_type or sample.metadata.get("rm_type"):
        return
    sample.reward = {args.reward_key: total} if args.reward_key else total


def failed(sample: Sample, choice: Choice, failure: EnvironmentFailure) -> Sample:
    """Return a sample without a score, whose failure names the environment and the cause."""
    reason = f"environment {choice.name}: {str(failure).removeprefix(f'environment {choice.name}: ')}"
    logger.warning("%s gets no reward: %s", describe(sample), reason)
    sample.status, sample.reward = Sample.Status.COMPLETED, None
    sample.reward_failure = infra_error(reason)
    return sample


def item_of(args: PluginArgs, sample: Sample) -> Item:
    metadata = sample.metadata
    seed = metadata.get(SEED_KEY)
    if seed is None:  # a row of a file: one seed for all samples of its group
        seed = seed_of(int(sample.group_index or 0) + 1, held_out=False)
    return Item(
        seed=int(seed),
        held_out=bool(metadata.get(HELD_OUT_KEY, False)),
        prompt=metadata.get(ROW_PROMPT_KEY, sample.prompt),
        label=sample.label,
        metadata=metadata,
    )


class Episode:
    """One environment, its players, and the loop of turns."""

    def __init__(self, args: PluginArgs, sample: Sample, sampling_params: dict[str, Any]):
        self.args, self.sample, self.params = args, sample, sampling_params
        self.state = GenerateState(args)
        self.choice = choice_of(args, sample)
        self.renderer = ObservationRenderer(args, self.state.tokenizer)
        self.longest: int | None = sampling_params.get("max_new_tokens")
        module = import_module(ENVIRONMENTS[self.choice.family].module)
        make = functools.partial(module.make, self.choice.task, options_of(args, self.choice))
        self.calls = EnvironmentCalls(self.choice.name, make, timeout_s(args, "env"))
        self.transcripts: dict[int, Transcript] = {}
        self.progress = _Progress()
        self.players = 1
        self.record = episode_record.current()

    async def play(self) -> Sample | list[Sample]:
        keep = False
        try:
            return await self._play()
        except _Interrupted:
            args = self.args
            keep = args.partial_rollout and args.partial_episodes == "continue" and self.players == 1
            return self._interrupted(keep)
        except EnvironmentFailure as failure:
            if self.progress.called and self.record is not None:
                await self.record.replied(self._call_id, None, wait=False)
            return failed(self.sample, self.choice, failure)
        finally:
            if not keep:
                await asyncio.shield(self.calls.close())

    # -- the loop

    async def _play(self) -> Sample | list[Sample]:
        observation, in_turn = await self._begin()
        limit_s = timeout_s(self.args, "episode")
        deadline = time.monotonic() + limit_s if limit_s else None
        end = self.progress.end
        while end is None:
            transcript = self._transcript_of(observation.player)
            if not in_turn and not transcript.read(
                observation, self.longest, self.state.scope.max_context_len
            ):
                end = "max_tokens"
                break
            if not in_turn:
                self.progress.turn_start = transcript.sample.response_length
                await self._keep_turn(transcript, observation)
            in_turn = False
            self._observation = observation
            if not self.progress.called and not await self._write_turn(transcript, deadline):
                end = "deadline"
                break
            result = await self._step(transcript)
            if result.done or result.truncated:
                end = "done" if result.done else "truncated"
                for one in self.transcripts.values():
                    one.sample.metadata.update(result.info)
                break
            observation = as_observation(self.choice.name, "step", result.observation)
            self.progress.seen.append(fingerprint(observation))
            end = self._used_up(transcript)
        self.progress.end = end
        if self.progress.called:
            await self._keep_turn(transcript, observation)
        return await self._finish(end)

    async def _step(self, transcript: Transcript) -> StepResult:
        """Let the environment act on the turn that the policy has written."""
        start = self.progress.turn_start
        action = transcript.text_since(start)
        if self.record is not None:
            self.progress.called = True
            kept = None if self._is("deterministic") else self._with_progress(transcript)
            repeatable = self._is("deterministic") or self._is("repeatable")
            await self.record.called(self._call_id, kept, repeatable=repeatable)
        result = await self._call_step(action, self._call_id)
        transcript.end_turn(start, float(result.reward))
        self._count("turns", 1)
        self._count("tool_calls", result.tool_calls)
        self._count("tool_errors", result.tool_errors)
        self.progress.actions.append(action)
        return result

    async def _call_step(self, action: str, call_id: str) -> StepResult:
        values = (action, call_id) if self._takes_id else (action,)
        return as_step(self.choice.name, await self.calls.call("step", *values))

    # -- what a killed run continues from

    @property
    def _call_id(self) -> str:
        return f"{self.progress.episode}.{len(self.progress.actions)}"

    def _is(self, declared: str) -> bool:
        return bool(getattr(self.environment, declared, False))

    def _with_progress(self, transcript: Transcript) -> Sample | None:
        """Return the sample with what `_begin` needs; None: the episode could not be continued with it."""
        if self.players > 1 or not (self._is("deterministic") or self.progress.state is not None):
            return None
        kept = copy_sample(transcript.sample)
        kept.metadata[PROGRESS_KEY] = asdict(self.progress)
        kept.status = Sample.Status.ABORTED
        return kept

    async def _keep_turn(self, transcript: Transcript, observation: Observation) -> None:
        """Record that the last step has returned, with the state from which the episode continues."""
        if self.record is None:
            return
        progress, returned = self.progress, f"{self.progress.episode}.{len(self.progress.actions) - 1}"
        progress.called, exact = False, not self._is("deterministic")
        if exact and self.calls.has("save") and self.calls.has("restore"):
            progress.state = (await self.calls.call("save"),)
        progress.shown = None if observation.images else asdict(observation)
        is_worth_it = exact or (progress.actions and progress.end is None)
        kept = self._with_progress(transcript) if is_worth_it else None
        if progress.actions or kept is not None:
            await self.record.replied(returned, kept, wait=exact)

    async def _begin(self) -> tuple[Observation, bool]:
        """Return the first observation, and whether the policy's turn was started already."""
        saved = self.sample.metadata.pop(PROGRESS_KEY, None)
        if saved is not None and self.sample.tokens:
            before = _Progress(**saved)
            observation, how = await self._return_to(before)
            if observation is not None:
                self.progress = before
                self._transcript_of(observation.player).sample.status = Sample.Status.ABORTED
                if self.record is not None:
                    self.record.continued(self._call_id, how)
                return observation, True
            logger.warning("%s restarts: %s.", describe(self.sample), how)
        fresh = without_response(self.sample)
        fresh.tokens, fresh.session_id = [], self.sample.session_id
        fresh.multimodal_inputs = fresh.image_spans = None  # the first observation brings its own
        fresh.multimodal_train_inputs = fresh.multimodal_train_input_id = None
        self.sample = fresh
        observation = await self._reset()
        self.progress.seen.append(fingerprint(observation))
        return observation, False

    async def _reset(self) -> Observation:
        item = await self._start()
        if ENV_KEY not in self.sample.metadata:
            self.sample.metadata[ROW_PROMPT_KEY] = item.prompt
        return as_observation(self.choice.name, "reset", await self.calls.call("reset", item))

    async def _start(self) -> Item:
        self.environment = await self.calls.start()
        self.players = int(getattr(self.environment, "num_players", 1))
        self._takes_id = "call_id" in inspect.signature(self.environment.step).parameters
        return item_of(self.args, self.sample)

    async def _return_to(self, before: _Progress) -> tuple[Observation | None, str]:
        """Return the observation at which the episode was interrupted, and how or why not it was reached."""
        waiting = _waiting.pop(self.sample.session_id or "", None)
        if waiting is not None:
            await self.calls.close()
            self.calls, shown, self.environment, self._takes_id = waiting
            return shown, "waited"
        if len(pictures_of(self.sample)) != len(self.sample.image_spans or ()):
            return None, "a restart does not keep the images that were shown"
        item, observation, how = await self._start(), None, ""
        if self._is("deterministic"):
            observation, how = await self._replay(before, item), "replayed"
            why = "replaying its actions led its environment to another state"
        elif before.called and not self._is("repeatable"):
            why = "its run ended in a step of its environment, which is not `repeatable`"
        elif before.state is None or before.shown is None or not self.calls.has("restore"):
            why = "its environment has no `save` and `restore`, and is not `deterministic`"
        else:
            await self.calls.call("restore", item, before.state[0])
            observation, how = Observation(**before.shown), "restored"
        if observation is not None:
            return observation, how
        await self.calls.close()
        self.calls = self.calls.restarted()
        return None, why

    async def _replay(self, before: _Progress, item: Item) -> Observation | None:
        observation = as_observation(self.choice.name, "reset", await self.calls.call("reset", item))
        for step, action in enumerate(before.actions):
            if fingerprint(observation) != before.seen[step]:
                break
            result = await self._call_step(action, f"{before.episode}.{step}")
            if result.observation is None:
                break
            observation = as_observation(self.choice.name, "step", result.observation)
        is_there = self.players == 1 and fingerprint(observation) == before.seen[-1]
        return observation if is_there else None

    async def _write_turn(self, transcript: Transcript, deadline: float | None) -> bool:
        """Let the policy write until it stops or reaches a limit; False: the episode's time is over."""
        sample, params = transcript.sample, dict(self.params)
        if sample.status is not Sample.Status.ABORTED:
            sample.status = Sample.Status.PENDING
        if self.state.aborted:
            raise _Interrupted
        longest, of_turn = self.longest, self.args.turn_max_response_len
        if of_turn is not None:
            ends = self.progress.turn_start + of_turn
            longest = ends if longest is None else min(longest, ends)
        params["max_new_tokens"] = longest
        if self.players > 1:
            seed = mix64(self.args.rollout_seed, sample.index or 0, len(self.progress.actions), 5)
            params.setdefault("sampling_seed", seed % (2**31 - 1) + 1)
        started = time.monotonic()
        limit = asyncio.timeout(None if deadline is None else max(0.0, deadline - started))
        try:
            async with limit:
                await ask_engine(self.args, sample, params)
        except TimeoutError:
            if not limit.expired():
                raise
            return False
        finally:
            self._count("engine_seconds", time.monotonic() - started)
        if sample.status is Sample.Status.ABORTED:
            raise _Interrupted
        return True

    def _used_up(self, transcript: Transcript) -> str | None:
        if self.args.max_turns is not None and self.progress.counts["turns"] >= self.args.max_turns:
            return "max_turns"
        context = self.state.scope.max_context_len
        if token_budget(self.args, transcript.sample, self.longest, context) == 0:
            return "max_tokens"
        return None

    def _transcript_of(self, player: int) -> Transcript:
        if not 0 <= player < max(1, self.players):
            raise EnvironmentFailure(
                f"environment {self.choice.name}: player {player} is next, but there are {self.players}"
            )
        if player not in self.transcripts:
            own = self.sample if self.players == 1 else copy_sample(self.sample)
            self.transcripts[player] = Transcript(self.args, own, self.renderer)
        return self.transcripts[player]

    # -- its ends

    async def _finish(self, end: str) -> Sample | list[Sample]:
        scores = as_scores(self.choice.name, await self.calls.call("score"), max(1, self.players))
        acted = {
            player: transcript for player, transcript in sorted(self.transcripts.items()) if transcript.turns
        }
        if not acted:
            raise EnvironmentFailure(
                f"environment {self.choice.name}: no turn was finished within --timeouts "
                f"episode={timeout_s(self.args, 'episode'):g}"
            )
        for player, transcript in acted.items():
            transcript.add_to_last_turn(scores[player])
            sample = transcript.sample
            sample.status = Sample.Status.COMPLETED if end == "done" else Sample.Status.TRUNCATED
            sample.metadata.pop(PROGRESS_KEY, None)
            sample.metadata[END_KEY] = end
            if self.players > 1:
                sample.metadata[ROLE_KEY] = f"player {player}"
                sample.rollout_id = self.sample.index if sample.rollout_id is None else sample.rollout_id
            give_reward(self.args, sample, transcript.total)
        made = [transcript.sample for transcript in acted.values()]
        self._count("env_seconds", self.calls.seconds)
        counts = self.progress.counts
        for sample in made:  # the costs of the episode, in equal shares
            sample.metadata[AGENT_KEY] = {name: value / len(made) for name, value in counts.items()}
            sample.non_generation_time = counts["env_seconds"] / len(made)
        return made if self.players > 1 else made[0]

    def _count(self, name: str, number: float) -> None:
        self.progress.counts[name] = self.progress.counts.get(name, 0) + number

    def _interrupted(self, keep: bool) -> Sample:
        if not keep:
            sample = without_response(self.sample)
            sample.tokens, sample.status = [], Sample.Status.ABORTED
            sample.metadata.pop(PROGRESS_KEY, None)
            return sample
        sample = self.transcripts[0].sample
        sample.metadata[PROGRESS_KEY] = asdict(self.progress)
        sample.status = Sample.Status.ABORTED
        if sample.session_id:
            _waiting[sample.session_id] = (self.calls, self._observation, self.environment, self._takes_id)
            if len(_waiting) > MAX_WAITING:
                _waiting.popitem(last=False)[1][0].forget()
        return sample
