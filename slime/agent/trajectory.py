"""The turns of an episode as a tree of token ids, and the samples that its leaves become.

The parent of a turn is the turn whose prompt and response its own prompt starts with. A prompt that continues
no turn is a root: a first turn, or history that was edited. Each leaf becomes one sample. A turn that several
leaves share is trained in the first of them.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.agent.shown_pictures import Placed, add_to_sample
from slime.arguments import PluginArgs
from slime.utils.types import Sample, SampleStatus

# In Sample.metadata: one entry for each turn of the sample, see `TurnNode.describe`.
TURNS_KEY = "turns"
# Parts of an engine's meta_info that a turn does not keep: it has them itself.
PER_TOKEN_META = ("output_token_logprobs", "input_token_logprobs")
Message = dict[str, Any]


@dataclass(slots=True)
class TurnRecord:
    """One response of the engine: its whole prompt, the sampled tokens, and the finish reason.

    Without log-probs (a response that the policy did not sample) none of its tokens is trained on.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    finish_reason: str
    output_log_probs: Sequence[float] = field(default_factory=list)
    ill_formed: bool = False  # the response has a tool call that cannot be read
    meta: Mapping[str, Any] = field(default_factory=dict)  # the engine's meta_info


@dataclass(slots=True, eq=False)
class TurnNode:
    """A turn in the tree: `added_ids` is what its prompt has beyond its parent's prompt and response."""

    number: int
    parent: TurnNode | None
    added_ids: array[int]
    output_ids: array[int]
    log_probs: array[float]
    finish: str
    ill_formed: bool
    meta: dict[str, Any]
    num_ids: int  # of the prompt and the response
    details: dict[str, Any] = field(default_factory=dict)  # shown in the record of the run: tool calls, ...
    reward: float | None = None  # of this turn alone; None: the episode's reward covers it
    images: Sequence[Placed] = ()  # of its added ids; places count from the root
    replaced: bool = False  # a client's rendering of it took its place: it is not trained
    # Of a turn of a session, see `slime.agent.history`.
    messages: list[Message] = field(default_factory=list)
    answer: Message = field(default_factory=dict)
    tools: list[Any] = field(default_factory=list)
    has_thoughts: bool = False  # this response or an earlier one

    @property
    def is_trained(self) -> bool:
        return bool(self.log_probs) and not self.replaced

    def chain(self) -> list[TurnNode]:
        """Return the turns from the root down to this one."""
        nodes: list[TurnNode] = []
        node: TurnNode | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def ids(self) -> array[int]:
        """Return prompt and response: what a prompt must start with to continue this turn."""
        out = array("i")
        for node in self.chain():
            out += node.added_ids
            out += node.output_ids
        return out

    def describe(self, start: int, *, trained: bool) -> dict[str, Any]:
        """Return the entry of `metadata["turns"]`: its span in the sample's response, and its details."""
        entry = {
            "turn": self.number,
            "start": start,
            "end": start + len(self.output_ids),
            "trained": trained,
            "finish": self.finish,
            **self.details,
        }
        return entry if self.reward is None else {**entry, "reward": self.reward}


class TurnTree:
    """All turns of one episode, in the order of their responses."""

    def __init__(self) -> None:
        self.nodes: list[TurnNode] = []
        self.num_output_ids = 0

    def add(self, turn: TurnRecord, parent: TurnNode | None) -> TurnNode:
        """Add a turn whose `prompt_ids` start with `parent.ids()`, which the caller has checked."""
        added = turn.prompt_ids[parent.num_ids if parent is not None else 0 :]
        node = TurnNode(
            number=len(self.nodes),
            parent=parent,
            added_ids=array("i", added),
            output_ids=array("i", turn.output_ids),
            log_probs=array("d", turn.output_log_probs),
            finish=turn.finish_reason,
            ill_formed=turn.ill_formed,
            meta={name: value for name, value in turn.meta.items() if name not in PER_TOKEN_META},
            num_ids=len(turn.prompt_ids) + len(turn.output_ids),
        )
        self.nodes.append(node)
        self.num_output_ids += len(node.output_ids)
        return node

    def find_parent(self, prompt_ids: Sequence[int]) -> TurnNode | None:
        """Return the longest turn that the prompt continues; None: it continues none."""
        prompt = array("i", prompt_ids)
        best: TurnNode | None = None
        for node in reversed(self.nodes):
            longer = node.num_ids <= len(prompt) and (best is None or node.num_ids > best.num_ids)
            if longer and not node.replaced and prompt[: node.num_ids] == node.ids():
                best = node
        return best

    def leaves(self) -> list[TurnNode]:
        """Return the turns that no other continues, without replaced and empty ones."""
        parents = {id(node.parent) for node in self.nodes if node.parent is not None and _counts(node)}
        return [node for node in self.nodes if _counts(node) and id(node) not in parents]

    @property
    def num_forks(self) -> int:
        """The number of samples beyond the first."""
        return max(0, len(self.leaves()) - 1)


def _counts(node: TurnNode) -> bool:
    return bool(node.output_ids) and not node.replaced


_STATUS_OF_FINISH = {
    "stop": SampleStatus.COMPLETED,
    "tool_calls": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


def samples_of(
    tree: TurnTree,
    *,
    base_sample: Sample,
    reward: float | dict[str, Any] | None = None,
    extra_metadata: Mapping[str, Any] | None = None,
    max_sample_tokens: int | None = None,
    args: PluginArgs | None = None,
    processor: Any = None,
) -> list[Sample]:
    """Return one sample for each leaf with a trained token, in the order of their last turns.

    If no token is trained, because a client chose the sampling of every turn, one sample keeps the reward.
    All share `rollout_id` (the base sample's, else its index) and the reward. Their response starts after the
    first prompt. `args` is needed if the engine returns expert choices, `processor` if turns show images.
    """
    trained: set[int] = set()
    samples: list[Sample] = []
    untrained: list[Sample] = []
    for leaf in tree.leaves():
        sample = _blank(base_sample, reward, extra_metadata)
        chain = leaf.chain()
        sample.metadata[TURNS_KEY] = list(_append_chain(sample, chain, trained, args))
        sample.metadata["truncated"] = leaf.finish == "length"
        sample.metadata["ill_formed"] = any(node.ill_formed for node in chain)
        sample.metadata["use_tool"] = any(node.details.get("tool_calls") for node in chain)
        sample.status = _STATUS_OF_FINISH.get(leaf.finish, SampleStatus.COMPLETED)
        images = [one for node in chain for one in node.images]
        if max_sample_tokens is not None and len(sample.tokens) > max_sample_tokens:
            split = (one.start for one in images if one.start < max_sample_tokens < one.end)
            _truncate(sample, next(split, max_sample_tokens))
        if processor is not None:
            add_to_sample(sample, images, processor)
        if any(sample.loss_mask or ()):
            samples.append(sample)
        elif any("untrained" in node.details for node in chain):
            untrained.append(sample)
    return samples or untrained[:1]


def _blank(
    base: Sample, reward: float | dict[str, Any] | None, extra_metadata: Mapping[str, Any] | None
) -> Sample:
    """Return a sample of the same prompt with nothing generated yet."""
    return Sample(
        group_index=base.group_index,
        index=base.index,
        rollout_id=base.rollout_id if base.rollout_id is not None else base.index,
        prompt=base.prompt,
        multimodal_inputs=base.multimodal_inputs,
        apply_chat_template_kwargs=dict(base.apply_chat_template_kwargs),
        label=base.label,
        reward=copy.copy(reward) if reward is not None else copy.copy(base.reward),
        metadata={**copy.deepcopy(base.metadata), **(extra_metadata or {})},
        generate_function_path=base.generate_function_path,
        custom_rm_path=base.custom_rm_path,
        train_metadata=base.train_metadata,
        session_id=base.session_id,
    )


def _append_chain(
    sample: Sample, chain: Sequence[TurnNode], trained: set[int], args: PluginArgs | None
) -> Iterator[dict[str, Any]]:
    """Append the turns to the sample; yields the description of each, with its span in the response."""
    for place, node in enumerate(chain):
        if place == 0:
            sample.tokens = list(node.added_ids)
        else:
            sample.append_response_tokens(tokens=node.added_ids, trainable=False)
        start = sample.response_length
        trains = node.is_trained and node.number not in trained
        if trains:
            trained.add(node.number)
            meta = dict(node.meta)
            sample.append_response_tokens(
                args, tokens=node.output_ids, log_probs=node.log_probs, meta_info=meta
            )
        else:
            sample.append_response_tokens(tokens=node.output_ids, trainable=False)
        yield node.describe(start, trained=trains)


def _truncate(sample: Sample, max_tokens: int) -> None:
    """Keep the first tokens and their masks."""
    keep = max(0, max_tokens - (len(sample.tokens) - sample.response_length))
    sample.tokens = sample.tokens[:max_tokens]
    sample.response_length = min(keep, len(sample.tokens))
    sample.loss_mask = (sample.loss_mask or [])[:keep]
    sample.rollout_log_probs = (sample.rollout_log_probs or [])[:keep]
    sample.version_spans = [(v, a, min(b, keep)) for v, a, b in sample.version_spans if a < keep]
    if sample.rollout_top_p_token_offsets is not None:
        offsets = sample.rollout_top_p_token_offsets[: keep + 1]
        sample.rollout_top_p_token_offsets = offsets
        sample.rollout_top_p_token_ids = (sample.rollout_top_p_token_ids or [])[: int(offsets[-1])]
    if sample.rollout_routed_experts is not None:
        sample.rollout_routed_experts = sample.rollout_routed_experts[: max_tokens - 1]
    turns = [turn for turn in sample.metadata[TURNS_KEY] if turn["start"] < keep]
    sample.metadata[TURNS_KEY] = [{**turn, "end": min(turn["end"], keep)} for turn in turns]
    sample.metadata["truncated"] = True
    sample.status = SampleStatus.TRUNCATED


class TrajectoryManager:
    """Trees of any number of sessions, for code that renders prompts itself and records the responses.

    A prompt that a template rendered again may differ from the tokens of the last response. If the new
    response is shorter than `fork_threshold_tokens`, the prompt replaces that response, which is then not
    trained; otherwise, and with 0 or None, the prompt starts a new sample and both are trained.
    """

    def __init__(self, fork_threshold_tokens: int | None = 1024) -> None:
        self.fork_threshold_tokens = fork_threshold_tokens or 0
        self._trees: dict[str, TurnTree] = {}

    def record_turn(
        self,
        sid: str,
        *,
        turn: TurnRecord,
        prompt_messages: Sequence[Mapping[str, Any]] = (),
        response_message: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> TurnNode:
        """Add a turn where its prompt belongs. `prompt_messages` are what the prompt was rendered from."""
        tree = self._trees.setdefault(sid, TurnTree())
        parent = tree.find_parent(turn.prompt_ids)
        last = self._rendered_again(tree, turn, prompt_messages)
        if last is not None and (parent is None or parent.num_ids < last.num_ids):
            last.replaced = True
            parent = last.parent
        node = tree.add(turn, parent)
        calls = (response_message or {}).get("tool_calls") or ()
        node.details = {
            "tool_calls": [str((call.get("function") or call).get("name", "")) for call in calls],
            "num_messages": len(prompt_messages),
            **(metadata or {}),
        }
        return node

    def _rendered_again(
        self, tree: TurnTree, turn: TurnRecord, messages: Sequence[Mapping[str, Any]]
    ) -> TurnNode | None:
        """Return the leaf whose response this prompt holds in other tokens; None: none, or both must stay."""
        if len(turn.output_ids) >= self.fork_threshold_tokens:
            return None
        prompt = array("i", turn.prompt_ids)
        for leaf in reversed(tree.leaves()):
            at = leaf.details.get("num_messages", 0)
            answered = at < len(messages) and messages[at].get("role") == "assistant"
            start = leaf.num_ids - len(leaf.output_ids)
            if answered and len(prompt) > start and prompt[:start] == leaf.ids()[:start]:
                return leaf
        return None

    def get_trajectory(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float | dict[str, Any] | None = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        max_sample_tokens: int | None = None,
    ) -> list[Sample]:
        """Return the samples of a session; none for an unknown one."""
        return samples_of(
            self._trees.get(sid, TurnTree()),
            base_sample=base_sample,
            reward=reward,
            extra_metadata=extra_metadata,
            max_sample_tokens=max_sample_tokens,
        )

    def drop_session(self, sid: str) -> None:
        self._trees.pop(sid, None)

    def has_session(self, sid: str) -> bool:
        return sid in self._trees

    def turn_count(self, sid: str) -> int:
        tree = self._trees.get(sid)
        return len(tree.nodes) if tree is not None else 0
