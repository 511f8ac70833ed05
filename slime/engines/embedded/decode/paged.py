"""Attention of the newest token of each sequence over its pages, which stay where they are.

Shapes depend on the number of sequences alone, not on how long they are: such a pass can be recorded once and
replayed. On a GPU it is a Triton kernel; elsewhere the same result comes from copied pages, for tests.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slime.utils.misc import is_installed


def can_read_pages(device: torch.device) -> bool:
    return device.type == "cuda" and is_installed("triton")


def attend_to_pages(
    query: Tensor,  # [B, H, D]
    keys: Tensor,  # [rows of the pool, H_kv, D]
    values: Tensor,  # [rows of the pool, H_kv, V]
    table: Tensor,  # [B, W] int32 pages of each sequence; what lies behind its length means nothing
    lengths: Tensor,  # [B] int32 tokens whose keys are in the pool, the newest included
    *,
    block_size: int,
    scale: float | None,
) -> Tensor:
    """Attention of one new token per sequence to the pages of its keys; the result is [B, H, V]."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    attend = _from_copies
    if query.device.type == "cuda":
        from slime.engines.embedded.decode.decode_kernels import paged_decode as attend  # late: needs Triton

    return attend(query, keys, values, table, lengths, block_size, scale)


def _from_copies(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, page: int, scale: float
) -> Tensor:
    count, heads = len(query), keys.shape[1]
    column = torch.arange(table.shape[1] * page, device=query.device)
    seen = column[None, :] < lengths[:, None]
    pages = torch.where(seen[:, ::page], table, 0).long()
    rows = (pages[:, :, None] * page + column[:page]).view(count, -1)
    k, v = (pool[rows].transpose(1, 2) for pool in (keys, values))
    q = query.reshape(count, heads, -1, query.shape[2])
    out = scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None, :], scale=scale)
    return out.reshape(count, query.shape[1], values.shape[2])
