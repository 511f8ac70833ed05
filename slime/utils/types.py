"""Defines slime's basic types: a trajectory (`Sample`) and the batch for training (`RolloutBatch`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Protocol, Required, Self, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from slime.utils import top_p
from slime.utils.media.pictures import from_plain, to_plain
from slime.utils.misc import decode_int32_meta_array
from slime.utils.reward_failure import RewardFailure
from slime.utils.reward_failure import infra_error as infra_error  # plug-ins import both from here
from slime.utils.reward_failure import invalid as invalid

if TYPE_CHECKING:
    import torch


class RewardArgs(Protocol):
    """The one setting that reading a reward needs."""

    reward_key: str | None


class ExpertArgs(Protocol):
    """The sizes that recorded expert choices have; plug-in arguments have them once the model is known."""

    num_layers: int | None
    moe_router_topk: int | None


IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
Tensors: TypeAlias = "list[torch.Tensor]"  # one for each sample of a batch


class _Counters:
    """Counters of engines, which are stored as plain numbers."""

    def to_dict(self) -> dict[str, int]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, data: dict[str, int]) -> Self:
        return cls(**data)


@dataclass
class SpecInfo(_Counters):
    """Speculative-decoding counters, summed over the requests of one sample."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add counters of a response: names of SGLang 0.5.16 and later, then earlier ones."""
        accepted = meta_info.get("spec_num_correct_drafts", meta_info.get("spec_accept_token_num"))
        drafted = meta_info.get("spec_num_proposed_drafts", meta_info.get("spec_draft_token_num"))
        self.spec_accept_token_num += accepted or 0
        self.spec_draft_token_num += drafted or 0
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)


@dataclass
class PrefixCacheInfo(_Counters):
    """Prompt tokens that the engine found in its prefix cache, summed over the requests of one sample."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)


class SampleStatus(Enum):
    """The state of a sample: pending, completed, truncated, aborted or failed."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


_STATUS_OF_FINISH = {
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
    "stop": SampleStatus.COMPLETED,
}


@dataclass
class Sample:
    """One trajectory. Training uses the sampled token ids: text is never tokenised again after generation.

    Example: prompt ids [5, 6], response ids [7, 8, 2] of which 8 came from a tool: tokens=[5, 6, 7, 8, 2],
    response_length=3, loss_mask=[1, 0, 1], rollout_log_probs=[-.1, 0.0, -.2], version_spans=[("run:3", 0, 1),
    ("run:4", 2, 3)] (response coordinates; the tool token belongs to no version).
    """

    group_index: int | None = None  # the prompt group; all copies of one prompt share it
    index: int | None = None  # unique over the run
    rollout_id: int | None = None  # one execution; fan-out siblings share it; None: this sample stands alone
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None  # a hash of the pictures
    image_spans: list[tuple[int, int]] | None = None  # (start, end) of each picture in `tokens`
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None  # only ever a score; a failure is in `reward_failure`
    reward_failure: RewardFailure | None = None
    loss_mask: list[int] | None = None  # one entry per response token; None: all ones
    # (start, end, reward) of each turn of the policy in the response; None: only the whole has a reward
    turn_rewards: list[tuple[int, int, float]] | None = None
    weight_versions: list[str] = field(default_factory=list)  # one entry per engine response, in order
    # (version, start, end) in the response
    version_spans: list[tuple[str, int, int]] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    # int32, see slime.utils.top_p; None: not recorded. There is one more offset than response tokens.
    rollout_top_p_token_ids: torch.Tensor | list[int] | None = None
    rollout_top_p_token_offsets: torch.Tensor | list[int] | None = None
    rollout_routed_experts: IntArray | None = None
    remove_sample: bool = False  # set by a sample filter: stays in the statistics, trains nothing
    teacher_log_probs: list[float] | None = None
    teacher_top_ids: IntArray | None = None  # [R, K] int32, the teacher's most likely ids of each token
    teacher_top_log_probs: FloatArray | None = None  # [R, K] fp32
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    # Names that plug-ins use. They follow the fields, whose annotations refer to the module's names.
    Status = SampleStatus
    SpecInfo = SpecInfo
    PrefixCacheInfo = PrefixCacheInfo

    def to_dict(self) -> dict[str, Any]:
        """Return plain types (and tensors or arrays of plug-ins), attributes attached later included."""
        data = dict(self.__dict__)
        data["status"] = self.status.value
        data["multimodal_inputs"] = to_plain(self.multimodal_inputs)
        data["spec_info"] = self.spec_info.to_dict()
        data["prefix_cache_info"] = self.prefix_cache_info.to_dict()
        if self.reward_failure is not None:
            data["reward_failure"] = {"kind": self.reward_failure.kind, "reason": self.reward_failure.reason}
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """Invert `to_dict`; keys that are no field become attributes."""
        data = dict(data)
        data["status"] = SampleStatus(data.get("status", "pending"))
        data["spec_info"] = SpecInfo.from_dict(data.get("spec_info", {}))
        data["prefix_cache_info"] = PrefixCacheInfo.from_dict(data.get("prefix_cache_info", {}))
        if isinstance(data.get("reward_failure"), dict):
            data["reward_failure"] = RewardFailure(**data["reward_failure"])
        data["multimodal_inputs"] = from_plain(data.get("multimodal_inputs"))
        for name in ("version_spans", "image_spans", "turn_rewards"):
            if data.get(name) is not None:
                data[name] = [tuple(entry) for entry in data[name]]
        names = {f.name for f in dataclasses.fields(cls)}
        sample = cls(**{k: v for k, v in data.items() if k in names})
        for key in data.keys() - names:
            setattr(sample, key, data[key])
        return sample

    def get_reward_value(self, args: RewardArgs) -> float:
        """Return the score, or the component that --reward-key names."""
        reward: Any = self.reward
        key = getattr(args, "reward_key", None)  # a plug-in may pass its own namespace
        value: float = reward[key] if key else reward
        return value

    @property
    def effective_response_length(self) -> int:
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length

    def append_response_tokens(
        self,
        args: ExpertArgs | None = None,
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens to the response and keep mask, log-probs and versions aligned with them.

        Trainable tokens come from the policy and need log-probs; others (tool output, environment text) must
        have none and get log-prob 0 and mask 0. `meta_info`: the field of this name in the engine's response.
        """
        if meta_info is not None and (ours := top_p.in_our_fields(meta_info)) is not meta_info:
            meta_info = dict(ours)  # of SGLang, with log-probs over the ids that it kept
            log_probs = [triple[0] for triple in meta_info["output_token_logprobs"]]
        new = list(map(int, tokens or ()))
        log_probs = None if log_probs is None else list(map(float, log_probs))
        self._check_append(new, log_probs, trainable)
        start = self.response_length
        mask = [1] * start if self.loss_mask is None else self.loss_mask
        mask.extend([int(trainable)] * len(new))
        self.loss_mask = mask
        self.tokens.extend(new)
        self.response_length += len(new)
        if new or log_probs is not None:
            values = log_probs if log_probs is not None else [0.0] * len(new)
            self.rollout_log_probs = self.rollout_log_probs + values if self.rollout_log_probs else values
        if text:
            self.response += text
        self._merge_top_p(meta_info or {}, start, len(new), trainable)
        if meta_info is not None:
            self._apply_meta_info(args, meta_info, start, len(new), update_terminal_info)
        self._check_lengths()

    def _name(self) -> str:
        return f"sample {self.index} (group {self.group_index})"

    def _check_append(self, new: list[int], log_probs: Sequence[float] | None, trainable: bool) -> None:
        if log_probs is not None and len(log_probs) != len(new):
            raise ValueError(f"{len(log_probs)} log-probs for {len(new)} new tokens in {self._name()}")
        if trainable and new and log_probs is None:
            raise ValueError(f"trainable tokens appended to {self._name()} without log-probs")
        if not trainable and log_probs is not None:
            raise ValueError(f"tokens that are not trained have no log-probs ({self._name()})")
        recorded = len(self.rollout_log_probs or ())
        if trainable and new and recorded != self.response_length:
            raise ValueError(
                f"{self._name()} has {self.response_length} response tokens but {recorded} log-probs: "
                "earlier tokens were added without log-probs, so trainable ones cannot follow"
            )

    def _apply_meta_info(
        self, args: ExpertArgs | None, meta: Mapping[str, Any], start: int, count: int, terminal: bool
    ) -> None:
        self._merge_routed_experts(args, meta)
        for span in meta.get("weight_versions") or ():
            self.version_spans.append((str(span["version"]), start + span["start"], start + span["end"]))
        if not meta.get("weight_versions") and count and meta.get("weight_version") is not None:
            self.version_spans.append((str(meta["weight_version"]), start, start + count))
        if not terminal or "finish_reason" not in meta:
            return
        if "spec_verify_ct" in meta:
            self.spec_info.add(meta)
        self.prefix_cache_info.add(meta)
        if meta.get("weight_version") is not None:
            self.weight_versions.append(str(meta["weight_version"]))
        reason = (meta["finish_reason"] or {}).get("type", "")
        self.status = _STATUS_OF_FINISH.get(reason, self.status)

    def _merge_top_p(self, meta: Mapping[str, Any], start: int, count: int, trainable: bool) -> None:
        """Append the ids that the new tokens were drawn from; tokens of other origin have none."""
        ids, offsets = self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets
        found: tuple[Any, Any] | None = top_p.from_meta(meta)
        if found is None:
            if offsets is None or trainable:
                return
            found = [], [0] * (count + 1)
        elif wrong := top_p.wrong_with(*found, self.tokens[len(self.tokens) - count :]):
            raise ValueError(f"{self._name()}, {count} new tokens: {wrong}")
        if offsets is None:
            ids, offsets = [], [0] * (start + 1)
        self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets = top_p.joined(ids, offsets, *found)

    def _merge_routed_experts(self, args: ExpertArgs | None, meta: Mapping[str, Any]) -> None:
        if meta.get("routed_experts") is None:
            return
        assert args is not None, "append_response_tokens needs `args` for a response with routed experts"
        assert args.num_layers and args.moe_router_topk, "the model's config names its layers and experts"
        start = meta.get("routed_experts_start_len", 0)
        shape = len(self.tokens) - 1 - start, args.num_layers, args.moe_router_topk
        routed = decode_int32_meta_array(meta["routed_experts"]).reshape(shape)
        held = self.rollout_routed_experts
        self.rollout_routed_experts = routed if held is None else np.concatenate([held[:start], routed])

    def _check_lengths(self) -> None:
        mask = self.loss_mask or []
        tokens = f"for {self.response_length} response tokens in {self._name()}"
        if len(mask) != self.response_length:
            raise ValueError(f"loss_mask has {len(mask)} entries {tokens}")
        if self.rollout_log_probs is not None and len(self.rollout_log_probs) != self.response_length:
            raise ValueError(f"{len(self.rollout_log_probs)} log-probs {tokens}")
        offsets = self.rollout_top_p_token_offsets
        if offsets is not None and len(offsets) != self.response_length + 1:
            raise ValueError(
                f"{len(offsets)} top-p offsets {tokens}: pass the engine's meta_info with every response, "
                f"and request the ids with custom_params {{{top_p.REQUEST_FIELD!r}: True}}."
            )


class RolloutBatch(TypedDict, total=False):
    """The batch for training: N samples as per-sample lists.

    L_i is the length of sample i, R_i that of its response. Keys without `Required` exist for all samples or
    for none. Plug-ins read and change the batch as a dict; keys of their own are kept. The comment
    after each key is an example entry: prompt [5, 6], response [7, 8, 2], of which 8 came from a tool.
    """

    # -- from the rollout
    tokens: Required[Tensors]  # [L_i] int64 = [5, 6, 7, 8, 2]
    response_lengths: Required[list[int]]  # R_i, at most L_i - 1 = 3
    loss_masks: Required[Tensors]  # [R_i] int32, 1 where a token trains = [1, 0, 1]
    rewards: Required[list[float]]  # after group normalisation = 0.7
    raw_reward: Required[list[float]]  # as the reward function returned it = 1.0
    rollout_ids: Required[list[int]]  # of one execution; fan-out siblings share it = 12
    rollout_mask_sums: Required[list[float]]  # trained tokens of all siblings, before any rejection = 2.0
    sample_indices: Required[list[int]]  # unique over the run = 48
    truncated: Required[list[int]]  # 1 where the length limit truncated the response = 0
    group_index: list[int]  # samples of one prompt share it; -1 where there is none = 6
    rollout_log_probs: Tensors  # [R_i] fp32 of the engine, 0 where it generated nothing = [-0.1, 0.0, -0.2]
    rollout_top_p_token_ids: Tensors  # [N_i] int32; absent where all ids could be drawn = [7, 9, 2]
    rollout_top_p_token_offsets: Tensors  # [R_i + 1] int32, each token's place in the ids = [0, 2, 2, 3]
    versions: Tensors  # [R_i] int32 of the weights, -1 where not generated = [3, -1, 4]
    routed_experts: Tensors  # [L_i - 1, layers, topk] int32 = [[[0, 5]], [[5, 3]], [[1, 2]], [[7, 0]]]
    metadata: list[dict[str, Any] | None]  # `Sample.train_metadata` = {"margin": 0.5}
    multimodal_train_inputs: list[dict[str, Any] | None]  # of the processor = {"image_grid_thw": [[1, 2, 2]]}
    round_number: list[int]  # of an agent's conversation = 2
    teacher_log_probs: Tensors  # [R_i] fp32, of a teacher engine or by the step = [-0.3, 0.0, -0.1]
    teacher_top_ids: Tensors  # [R_i, K] int32, of a teacher engine = [[7, 9], [3, 8], [2, 7]]
    teacher_top_log_probs: Tensors  # [R_i, K] fp32 = [[-0.3, -1.4], [-0.1, -2.5], [-0.1, -3.0]]
    token_rewards: Tensors  # [R_i] fp32, in place of `rewards` where turns have their own = [0.2, 0.0, 0.7]
    # -- added by the training step, where the run needs it
    log_probs: Tensors  # [R_i] fp32 of the old policy, before any update = [-0.1, -5.2, -0.2]
    entropy: Tensors  # [R_i] fp32 of the old policy = [0.4, 2.9, 0.6]
    ref_log_probs: Tensors  # [R_i] fp32 of the reference = [-0.2, -5.0, -0.2]
    teacher_hidden: Tensors  # [R_i, H] for the full KL to the teacher = [[0.1, -1.3], [0.8, 0.2], [0.4, 0.9]]
    values: Tensors  # [R_i] fp32 of the critic = [0.5, 0.5, 0.8]
    kl: Tensors  # [R_i] fp32 to the reference, 0 without --kl-coef = [0.1, -0.2, 0.0]
    advantages: Tensors  # [R_i] fp32 = [0.7, 0.7, 0.7]
    returns: Tensors  # [R_i] fp32, what the critic learns = [1.0, 0.0, 1.0]
    opd_reverse_kl: Tensors  # [R_i] fp32, log-probs minus those of the teacher = [0.2, -5.2, -0.1]


# Keys of a batch whose entries have one row per response token, and keys with one number per sample.
TokenKey = Literal[
    "loss_masks", "rollout_log_probs", "versions", "teacher_log_probs", "log_probs", "entropy",
    "ref_log_probs", "teacher_hidden", "values", "kl", "advantages", "returns", "opd_reverse_kl",
    "token_rewards", "teacher_top_ids", "teacher_top_log_probs",
]  # fmt: skip
SampleKey = Literal["response_lengths", "rewards", "raw_reward", "rollout_mask_sums", "truncated"]


def flatten_samples(groups: Iterable[Any]) -> list[Sample]:
    """Return all samples of groups, of fan-out lists inside groups, or of a flat list, in order."""
    flat: list[Sample] = []
    for item in groups:
        if isinstance(item, Sample):
            flat.append(item)
        else:
            flat.extend(flatten_samples(item))
    return flat


def version_number(version: str | int | None) -> int | None:
    """Return the n of a weight version "run:n"; None if it ends in no number: the engine has none yet."""
    tail = str(version).rpartition(":")[2]
    return int(tail) if tail.isdecimal() else None


def is_score(value: Any) -> bool:
    """Return whether a value is a finite number; booleans are 0 and 1. Integers may exceed any float."""
    try:
        return isinstance(value, (bool, int, float, np.number)) and math.isfinite(value)
    except OverflowError:
        return False
