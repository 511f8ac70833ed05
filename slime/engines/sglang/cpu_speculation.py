"""What SGLang's speculation calls on a CPU, in PyTorch: its kernels for that are in no wheel.

For drafts that are chains (`--speculative-eagle-topk 1`), as rollouts use them. The names are those under
which SGLang looks for kernels (`sgl_kernel.X`, `torch.ops.sgl_kernel.X`). One decision of SGLang is replaced:
on a CPU it takes the most likely token whatever the temperature is; here it draws as on a GPU.

Not covered: trees of drafts, sliding windows, soft caps, sinks, attention to an encoder.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def install(kernels: Any) -> None:
    """Put all of it where SGLang looks, and import SGLang. `kernels` stands for the module `sgl_kernel`."""
    for name, kernel in KERNELS.items():
        setattr(kernels, name, kernel)
    for name, operator in OPERATORS.items():
        setattr(torch.ops.sgl_kernel, name, operator)
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.speculative import eagle_utils

    # The other one cannot verify. It is asked for by the name of that one: without its own kernels
    # SGLang does not take it for the model, only for drafts.
    ATTENTION_BACKENDS["torch_native"] = ATTENTION_BACKENDS["intel_amx"]
    setattr(eagle_utils, "_verify_uses_greedy", _all_greedy)  # noqa: B010
    setattr(eagle_utils, "tree_speculative_sampling_target_only", accept_sampled)  # noqa: B010


def _all_greedy(*, is_all_greedy: bool, **_: Any) -> bool:
    return is_all_greedy


# -- where keys and values are -------------------------------------------------------------------------------


def draft_slots(
    rows: Tensor, table: Tensor, starts: Tensor, out: Tensor, _: int, topk: int, steps: int
) -> None:
    """The slots of the next `steps` tokens of each request, behind each other."""
    _only_chains(topk)
    columns = starts.long()[:, None] + torch.arange(steps)
    out.copy_(table[rows.long()[:, None], columns].flatten())


def slots_between(rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, out: Tensor, _: int) -> None:
    """The slots of tokens `starts` to `ends` of each request, behind each other."""
    spans = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    found = torch.cat([table[row, start:end] for row, start, end in spans])
    out[: len(found)].copy_(found)


def assign_slots(rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, _: int) -> None:
    """The other way round: write them into the table."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[taken : taken + end - start].to(table.dtype)
        taken += end - start


def draft_table(table: Tensor, rows: Tensor, _lengths: Tensor, topk: int, _steps: int, _width: int) -> Tensor:
    _only_chains(topk)
    return table[rows.long()]


def move_slots(pointers: Tensor, row_bytes: Tensor, targets: Tensor, sources: Tensor) -> None:
    """In every layer's memory, given by address: what is in `sources` goes to `targets`."""
    for pointer, size in zip(pointers.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + source * size, size) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(pointer + target * size, row, size)


# -- chains of drafts ----------------------------------------------------------------------------------------


def build_chain(
    _parents: Tensor,
    _chosen: Tensor,
    lengths: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    following: Tensor,
    sibling: Tensor,
    topk: int,
    _steps: int,
    count: int,
    mask_mode: int,
) -> None:
    """Fill positions, mask and links of `count` tokens per request, each the child of the one before."""
    _only_chains(topk)
    if int(mask_mode) != 1:
        raise NotImplementedError(f"masks of mode {mask_mode}")
    requests, place = len(lengths), torch.arange(count)
    mask.copy_((place[:, None] >= place).expand(requests, count, count).flatten())
    positions.copy_((lengths[:, None] + place).flatten())
    index.copy_(torch.arange(requests * count).view(requests, count))
    following.copy_(torch.where(place + 1 < count, place + 1, -1))
    sibling.fill_(-1)


def accept_greedy(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    target_predict: Tensor,
    **_links: Tensor,
) -> None:
    """Accept drafted tokens for as long as each is the one that the target takes, which comes at the end."""
    same = candidates[:, 1:] == target_predict[:, :-1]
    accepted = same.long().cumprod(1).sum(1)
    _write(predicts, accept_index, accept_token_num, accepted, target_predict)


def accept_sampled(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    threshold_single: float,
    threshold_acc: float,
    **_links: Any,
) -> None:
    """Accept a drafted token with its probability; after the first that is not, draw among all others.

    So every token is drawn from the target's distribution, whatever was drafted.
    """
    if (threshold_single, threshold_acc) != (1.0, 1.0):
        raise NotImplementedError("thresholds of acceptance change the distribution")
    drafted = candidates[:, 1:].long()
    chance = target_probs[:, :-1].gather(2, drafted[..., None])[..., 0]
    accepted = (uniform_samples[:, : drafted.shape[1]] < chance).long().cumprod(1).sum(1)
    requests = torch.arange(len(candidates))
    left = target_probs[requests, accepted].clone()
    refused = accepted < drafted.shape[1]
    left[requests[refused], drafted[requests[refused], accepted[refused]]] = 0.0
    total = left.cumsum(1)
    final = torch.searchsorted(total, uniform_samples_for_final_sampling[:, None] * total[:, -1:], right=True)
    tokens = torch.cat([drafted, drafted[:, :1]], dim=1)
    tokens[requests, accepted] = final[:, 0].clamp(max=left.shape[1] - 1)
    _write(predicts, accept_index, accept_token_num, accepted, tokens)


def _write(predicts: Tensor, index: Tensor, count: Tensor, accepted: Tensor, tokens: Tensor) -> None:
    """`tokens` [requests, drafted + 1]: those up to and with place `accepted` are what a request gets."""
    requests, width = tokens.shape
    kept = torch.arange(width) <= accepted[:, None]
    places = torch.arange(requests * width).view(requests, width)
    predicts[places[kept]] = tokens[kept].to(predicts.dtype)
    index[:, :width] = torch.where(kept, places, -1).to(index.dtype)[:, : index.shape[1]]
    count.copy_(accepted)


def last_accepted(tokens: Tensor, lengths: Tensor, out: Tensor, width: int) -> None:
    out.copy_(tokens.flatten()[torch.arange(len(lengths)) * width + lengths.long() - 1])


def accepted_slots(index: Tensor, slots: Tensor, out: Tensor) -> None:
    found = slots[index[index >= 0].long()]
    out[: len(found)].copy_(found)


def _only_chains(topk: int) -> None:
    if topk != 1:
        raise NotImplementedError("trees of drafts on a CPU: give --speculative-eagle-topk 1")


# -- attention -----------------------------------------------------------------------------------------------


def extend_attention(
    query: Tensor,
    _key: Tensor,
    _value: Tensor,
    out: Tensor,
    keys: Tensor,
    values: Tensor,
    _key_scale: float,
    _value_scale: float,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    new: Tensor,
    starts: Tensor,
    _longest: int,
    scale: float,
    *_rest: Any,
) -> None:
    """Each request's `new` last tokens see what is before them; their keys are in the cache already."""
    for row, length, count, start in zip(
        rows.tolist(), lengths.tolist(), new.tolist(), starts.tolist(), strict=True
    ):
        slots = table[row, :length].long()
        place = torch.arange(length)
        seen = place <= place[length - count :, None]
        part = slice(start, start + count)
        out[part] = _attend(query[part][None], keys[slots][None], values[slots][None], seen, scale)[0]


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    _key_scale: float,
    _value_scale: float,
    out: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    new_slots: Tensor,
    _scratch: Tensor,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    scale: float,
    *_rest: Any,
) -> None:
    """One token per request, whose key and value are written first."""
    if key is not None and value is not None:
        keys[new_slots] = key.view(-1, *keys.shape[1:])
        values[new_slots] = value.view(-1, *values.shape[1:])
    place = torch.arange(int(lengths.max()))
    slots = table[rows.long()[:, None], place].long()
    seen = place < lengths[:, None]
    slots = torch.where(seen, slots, 0)
    out.copy_(_attend(query[:, None], keys[slots], values[slots], seen[:, None, None], scale)[:, 0])


def _attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """[B, L, heads, size] each; `seen` broadcasts to [B, heads, L, S]."""
    query, keys, values = (x.transpose(1, 2) for x in (query, keys, values))
    made = functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=seen, scale=scale, enable_gqa=True
    )
    return made.transpose(1, 2)


KERNELS: dict[str, Callable[..., Any]] = {
    "assign_draft_cache_locs_contiguous_cpu": draft_slots,
    "assign_extend_cache_locs_cpu": slots_between,
    "assign_req_to_token_pool_cpu": assign_slots,
    "copy_all_layer_kv_cache_cpu": move_slots,
    "build_draft_decode_metadata_cpu": draft_table,
    "build_tree_kernel_efficient_cpu": build_chain,
    "verify_tree_greedy_cpu": accept_greedy,
    "fill_bonus_tokens_cpu": last_accepted,
    "fill_accept_out_cache_loc_cpu": accepted_slots,
}
OPERATORS: dict[str, Callable[..., Any]] = {
    "extend_attention_cpu": extend_attention,
    "decode_attention_cpu": decode_attention,
}
