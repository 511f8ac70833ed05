"""One episode of an agent: samples turn by turn from the policy, and keeps the engine's exact tokens.

`Session.turn` takes the whole conversation, as chat clients send it, and finds the new messages by
comparison. A program may shorten or edit its history: such turns become samples of their own.
Example: docs/agents.md.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

from slime.agent.engine_access import Made, Policy, policy_of
from slime.agent.history import THOUGHTS, conversation, find_continued, remember
from slime.agent.parsing import ParsedModelOutput, Parser, parser_for, plain_parser
from slime.agent.recorded_turns import Asked, RecordedTurns
from slime.agent.rendering import Renderer
from slime.agent.shown_pictures import Placed, images_of
from slime.agent.trajectory import Message, TurnNode, TurnRecord, TurnTree, samples_of
from slime.arguments import PluginArgs
from slime.data.mix import mix64
from slime.observability.rollout_metrics import AGENT_KEY
from slime.rollout import episode_record
from slime.rollout.generation.client_requests import ClientRequests
from slime.rollout.generation.turn_gate import RolloutEnded, gate_for_session
from slime.rollout.prompt_groups import without_response
from slime.utils.errors import EpisodeEnded
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.reward_failure import infra_error
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_RESPONSE_TOKENS = 4096  # of one response, if neither a request nor --rollout-max-response-len sets a limit


Outcome = Literal[
    "open", "completed", "truncated", "turn_budget", "token_budget", "context", "failed", "aborted"
]


class SessionError(RuntimeError):
    """A turn that is refused. `outcome` is the outcome of the episode."""

    outcome: Outcome = "failed"


class SessionClosed(SessionError):
    """The episode is over."""


class TurnBudgetUsed(SessionError, EpisodeEnded):
    outcome: Outcome = "turn_budget"


class TokenBudgetUsed(SessionError, EpisodeEnded):
    outcome: Outcome = "token_budget"


class ContextExhausted(SessionError, EpisodeEnded):
    """The prompt leaves no room for a response."""

    outcome: Outcome = "context"

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(f"prompt is too long: {num_tokens} tokens > {limit - 1} maximum")
        self.num_tokens, self.limit = num_tokens, limit


class BadConversation(ValueError):
    """Messages that no response can follow."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one episode; None: no limit."""

    max_turns: int | None = None
    max_context_tokens: int | None = None  # of a prompt and its response together
    max_new_tokens: int = _RESPONSE_TOKENS  # of one response
    max_sampled_tokens: int | None = None  # of all responses together

    @classmethod
    def of_run(cls, args: PluginArgs, sampling_params: Mapping[str, Any]) -> Budget:
        limits = [n for n in (args.rollout_max_context_len, args.max_context_len) if n is not None]
        most = sampling_params.get("max_new_tokens") or args.rollout_max_response_len or _RESPONSE_TOKENS
        return cls(max_context_tokens=min(limits, default=None), max_new_tokens=int(most))


def seed_of_episode(args: PluginArgs, sample: Sample) -> int:
    return mix64(args.rollout_seed, sample.index or 0, int(sample.metadata.get("attempt", 0)))


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """A response of the policy: tokens, text, and the message to append to the conversation."""

    message: Message
    made: Made
    node: TurnNode
    parsed: ParsedModelOutput

    @property
    def text(self) -> str:
        return self.message.get("content") or ""

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls as in OpenAI's messages, but with `arguments` as a dict."""
        return self.message.get("tool_calls") or []


class Session:
    """The turns of one episode. `reward` of a `TurnNode` in `turns` may be set until `samples` is called."""

    def __init__(
        self,
        policy: Policy,
        renderer: Renderer,
        *,
        session_id: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        budget: Budget | None = None,
        parser: Parser = plain_parser,
        seed: int | None = None,
    ) -> None:
        self.policy, self.renderer, self.parser = policy, renderer, parser
        self.session_id = session_id or uuid4().hex
        self.sampling = {"skip_special_tokens": False, "no_stop_trim": True, **(sampling or {})}
        self.budget = budget or Budget()
        self.seed = seed  # None: the engine draws one for each turn
        self.args: PluginArgs | None = None  # of the run; needed for expert choices
        self.gate = gate_for_session()  # of the rollout that creates this session
        self.client: ClientRequests | None = None  # of a client program, whose requests cannot end the run
        self.tree = TurnTree()
        self.outcome: Outcome = "open"
        self.reason: str | None = None  # of the outcome
        self.num_tool_errors = 0  # counted by the code that runs the tools
        self.metadata: dict[str, Any] = {}  # of the episode; added to each sample's metadata["session"]
        self._num_asked = 0
        record = episode_record.current()  # a session that is created elsewhere is not recorded
        self.past = RecordedTurns(record, self.session_id) if record is not None else None
        self.refused: SessionError | None = None  # why the first turn was that was refused
        self._last_answer_at: float | None = None

    @classmethod
    def of_run(
        cls,
        args: PluginArgs,
        sample: Sample,
        sampling_params: Mapping[str, Any],
        *,
        budget: Budget | None = None,
        parser: Parser | None = None,
        history: Literal["template", "extend"] = "template",
    ) -> Session:
        """Make a session for a generate function, with its run's engines, tokenizer, sampling and seed."""
        tokenizer = load_tokenizer(args.hf_checkpoint)
        processor = load_processor(args.hf_checkpoint) if args.multimodal_keys else None
        session = cls(
            policy_of(args),
            Renderer(
                tokenizer,
                template_kwargs=sample.apply_chat_template_kwargs,
                history=history,
                processor=processor,
            ),
            session_id=sample.session_id,
            sampling=sampling_params,
            budget=budget or Budget.of_run(args, sampling_params),
            parser=parser or parser_for(tokenizer),
            seed=seed_of_episode(args, sample),
        )
        session.args = args
        return session

    # -- a turn --------------------------------------------------------------------------------------------

    async def turn(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        *,
        after: TurnAnswer | None = None,
    ) -> TurnAnswer:
        """Generate the response to `messages` and record it; SessionError if the turn is refused.

        With `after`, a response of this session, `messages` are only the new ones that follow it.
        """
        asked = self.ask(messages, tools, sampling, after=after)
        return self.record(asked, await self.generate(asked))

    async def generate(self, asked: Asked) -> Made:
        """Return the response to an accepted turn; the caller records it, or drops it.

        It is a recorded one where a crash made its episode resume. RolloutEnded if the rollout ends first.
        """
        if self.past is not None and (made := self.past.find(asked, exact=self.client is None)) is not None:
            self._num_asked = max(self._num_asked, asked.number)
            return made
        client, images = self.client, images_of(asked.prompt_ids, asked.images, self.renderer.processor)
        sent = client.sending(trained=asked.untrained is None) if client is not None else nullcontext()
        try:
            with self.gate.entered(), sent:
                made = await self.policy.generate(
                    asked.prompt_ids, asked.sampling, session=self.session_id, images=images
                )
            if self.past is not None:
                await self.past.add(asked, made, of_client=client is not None)
            return made
        except RolloutEnded as ended:
            self.end("aborted", str(ended))
            raise

    def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        *,
        after: TurnAnswer | None = None,
    ) -> Asked:
        """Build the prompt of a turn: the ids that exist, followed by the new messages, rendered."""
        messages, tools = list(messages), list(tools or ())
        try:
            self._check_open()
            if self.past is not None and self.client is not None:
                self.past.restore(self, messages, tools)
            ids, parent, new, fork, images = self.prompt(messages, tools, after)
            sampling = self.client.used(sampling or {}) if self.client is not None else sampling or {}
            params = self._sampling_for(len(ids), sampling)
        except SessionError as error:
            self.refused = self.refused or error
            raise
        self._num_asked += 1
        changed = {k: v for k, v in sampling.items() if v != self.sampling.get(k)}
        opens_thought = self.renderer.opens_thought(ids)
        number = self._num_asked
        untrained = self.client.untrained(changed, params) if self.client is not None else None
        return Asked(ids, params, parent, new, tools, opens_thought, fork, number, changed, images, untrained)

    def prompt(
        self, messages: list[Message], tools: list[Any], after: TurnAnswer | None = None
    ) -> tuple[Sequence[int], TurnNode | None, list[Message], str | None, list[Placed]]:
        """Return (ids, the turn they continue, the new messages, why history is rendered again, images)."""
        if not messages or messages[-1].get("role") == "assistant":
            raise BadConversation("the conversation must not end with an assistant's message")
        if after is None:
            parent, known = find_continued(self.tree.nodes, messages, tools)
        else:
            parent, known = after.node, 0
            if parent not in self.tree.nodes:
                raise ValueError("`after` is not a response of this session")
            if parent.tools != tools:
                raise ValueError("`after` needs the tools of that response: send the whole conversation")
        new = messages[known:]
        if parent is None:
            fork = "history" if self.tree.nodes else None
            ids, images = self._rendered(new, tools)
            return ids, None, new, fork, images
        if not self.renderer.rewrites(new, has_thoughts=parent.has_thoughts):
            made = self._extended(parent, new)
            if made is not None:
                return made[0], parent, new, None, made[1]
        new = [*conversation(parent), *new]
        ids, images = self._rendered(new, tools)
        return ids, None, new, "template", images

    def _rendered(self, messages: Sequence[Message], tools: list[Any]) -> tuple[list[int], list[Placed]]:
        return self.renderer.with_pictures(self.renderer.first_prompt(messages, tools), messages, start=0)

    def _extended(self, node: TurnNode, new: Sequence[Message]) -> tuple[Sequence[int], list[Placed]] | None:
        added = self.renderer.extension(new, stop_id=node.details.get("stop_id"))
        if added is None:
            return None
        added, images = self.renderer.with_pictures(added, new, start=node.num_ids)
        if self.renderer.processor is not None:
            images = [*(one for before in node.chain() for one in before.images), *images]
        return node.ids() + array("i", added), images

    def _check_open(self) -> None:
        if self.outcome != "open":
            raise SessionClosed(f"session {self.session_id} is over ({self.reason or self.outcome})")
        turns, sampled = self.budget.max_turns, self.budget.max_sampled_tokens
        if turns is not None and len(self.tree.nodes) >= turns:
            raise TurnBudgetUsed(f"session {self.session_id} has used its {turns} turns")
        if sampled is not None and self.num_sampled_tokens >= sampled:
            raise TokenBudgetUsed(f"session {self.session_id} has used its {sampled} sampled tokens")

    def _sampling_for(self, num_prompt: int, given: Mapping[str, Any] | None) -> dict[str, Any]:
        params = {**self.sampling, **(given or {})}
        wanted = [n for n in (self.budget.max_new_tokens, params.get("max_new_tokens")) if n is not None]
        if self.budget.max_context_tokens is not None:
            room = self.budget.max_context_tokens - num_prompt
            if room <= 0:
                raise ContextExhausted(num_prompt, self.budget.max_context_tokens)
            wanted.append(room)
        if self.budget.max_sampled_tokens is not None:
            wanted.append(self.budget.max_sampled_tokens - self.num_sampled_tokens)
        params["max_new_tokens"] = max(1, min(wanted))
        if self.seed is not None and params.get("sampling_seed") is None:
            params["sampling_seed"] = mix64(self.seed, self._num_asked, num_prompt) % (2**31 - 1) + 1
        return params

    def record(self, asked: Asked, made: Made, parsed: ParsedModelOutput | None = None) -> TurnAnswer:
        """Record a complete response. Only recorded responses are trained."""
        parsed = parsed or self.parser(self.text_of(made), asked.tools, asked.opens_thought)
        turn = TurnRecord(
            asked.prompt_ids,
            made.ids,
            made.finish or "abort",
            made.log_probs if asked.untrained is None else [],
            parsed.ill_formed,
            {**made.meta, "weight_versions": made.spans},
        )
        node = self.tree.add(turn, asked.parent)
        node.images = [one for one in asked.images if one.start >= asked.known]
        if self.past is not None:
            self.past.place(node)
        now = time.monotonic()
        node.details = {
            "tool_calls": [use["name"] for use in parsed.tool_uses],
            "stop_id": made.stop_id,
            "engine_s": round(now - asked.at, 4),
            "other_s": round(asked.at - self._last_answer_at, 4) if self._last_answer_at is not None else 0.0,
        }
        more = {"sampling": asked.changed, "untrained": asked.untrained, "fork": asked.fork}
        node.details |= {name: value for name, value in more.items() if value}
        self._last_answer_at = now
        message = self.message_of(asked, parsed)
        remember(node, asked.new_messages, message, asked.tools)
        return TurnAnswer(message, made, node, parsed)

    def asked_before(
        self, parent: TurnNode | None, added: Sequence[int], made: Made, **fields: Any
    ) -> tuple[Asked, ParsedModelOutput]:
        """Return a turn of an earlier start as it was asked, and its parsed response."""
        ids = (parent.ids() if parent is not None else array("i")) + array("i", added)
        asked = Asked(ids, {}, parent, images=[], **fields)
        self._num_asked = max(self._num_asked, asked.number)
        return asked, self.parser(self.text_of(made), asked.tools, asked.opens_thought)

    def message_of(self, asked: Asked, parsed: ParsedModelOutput) -> Message:
        """Return the response as a chat message; ids of calls are unique in a session."""
        message: Message = {"role": "assistant", "content": parsed.text}
        if parsed.reasoning:
            message[THOUGHTS] = parsed.reasoning
        turn = f"call_{self.session_id[:8]}{asked.number:04d}"
        for place, use in enumerate(parsed.tool_uses):
            function = {"name": use["name"], "arguments": use["input"]}
            call = {"id": f"{turn}{place}", "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        return message

    def text_of(self, made: Made) -> str:
        """Return the text of a response without the token or string that ended it."""
        ids = made.ids[:-1] if made.stop_id is not None else made.ids
        text: str = self.renderer.tokenizer.decode(ids, skip_special_tokens=False)
        return text.removesuffix(made.stop_text) if made.stop_text else text

    # -- the episode ---------------------------------------------------------------------------------------

    @property
    def turns(self) -> list[TurnNode]:
        return self.tree.nodes

    @property
    def num_sampled_tokens(self) -> int:
        return self.tree.num_output_ids

    def end(self, outcome: Outcome | None = None, reason: str | None = None) -> None:
        """Refuse further turns. The first outcome stays; None: it is derived from the turns."""
        if self.outcome != "open":
            return
        if outcome is None and self.refused is not None:
            outcome, reason = self.refused.outcome, reason or str(self.refused)
        if outcome is None:
            truncated = bool(self.tree.nodes) and self.tree.nodes[-1].finish == "length"
            outcome = "truncated" if truncated else "completed"
        self.outcome, self.reason = outcome, reason

    def samples(
        self,
        base_sample: Sample,
        *,
        reward: float | dict[str, Any] | None = None,
        extra_metadata: Mapping[str, Any] | None = None,
        max_sample_tokens: int | None = None,
        args: PluginArgs | None = None,
    ) -> list[Sample]:
        """Return the episode as training data, see `samples_of`; without any turn, one without score.

        `metadata["turns"]` has a span for each turn, `metadata["session"]` the outcome of the episode.
        """
        self.end()
        if self.past is not None:
            self.past.close()
        facts = {
            "id": self.session_id,
            "outcome": self.outcome,
            "reason": self.reason,
            "num_turns": len(self.tree.nodes),
            "num_forks": self.tree.num_forks,
            "num_sampled_tokens": self.num_sampled_tokens,
            **self.metadata,
        }
        samples = samples_of(
            self.tree,
            base_sample=base_sample,
            reward=reward,
            extra_metadata={"session": facts, **(extra_metadata or {})},
            max_sample_tokens=max_sample_tokens,
            args=args if args is not None else self.args,
            processor=self.renderer.processor,
        )
        if samples:  # once for the episode, not for each of its samples
            samples[0].metadata[AGENT_KEY] = self._costs()
        for sample in samples:
            sample.session_id = base_sample.session_id or self.session_id
            response = sample.tokens[len(sample.tokens) - sample.response_length :]
            sample.response = self.renderer.tokenizer.decode(response, skip_special_tokens=False)
        return samples if samples and self.outcome != "aborted" else [_untrained(base_sample, facts)]

    def _costs(self) -> dict[str, float]:
        """Return the values of the metrics `rollout/agent/*`."""
        turns = self.tree.nodes
        return {
            "turns": len(turns),
            "tool_calls": sum(len(turn.details["tool_calls"]) for turn in turns),
            "tool_errors": self.num_tool_errors + sum(turn.ill_formed for turn in turns),
            "forks": self.tree.num_forks,
            "untrained_turns": sum("untrained" in turn.details for turn in turns),
            "env_seconds": sum(turn.details["other_s"] for turn in turns),
            "engine_seconds": sum(turn.details["engine_s"] for turn in turns),
        }


def _untrained(base_sample: Sample, facts: dict[str, Any]) -> Sample:
    """Return the sample of an episode that was aborted, whose prompt is generated again, or has no turn.

    --reward-failure-action decides what follows an episode without a turn.
    """
    sample = without_response(base_sample)
    sample.metadata["session"] = facts
    if facts["outcome"] == "aborted":
        sample.status = Sample.Status.ABORTED
        return sample
    sample.status = Sample.Status.COMPLETED
    why = facts["reason"] or ("no request was made" if facts["num_turns"] == 0 else facts["outcome"])
    sample.reward_failure = infra_error(f"session {facts['id']}: the policy generated nothing ({why})")
    return sample
