"""Attention of the newest token of each sequence over its pages, which stay where they are.

Shapes depend on the number of sequences alone, not on how long they are: such a pass can be recorded once and
replayed. On a GPU it is a Triton kernel; elsewhere the same result comes from copied pages, for tests.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from slime.utils.misc import is_installed


def can_read_pages(device: torch.device) -> bool:
    return device.type == "cuda" and is_installed("triton")


def attend_to_pages(
    query: torch.Tensor,  # [B, H, D]
    keys: torch.Tensor,  # [rows of the pool, H_kv, D]
    values: torch.Tensor,  # [rows of the pool, H_kv, V]
    table: torch.Tensor,  # [B, W] int32 pages of each sequence; what lies behind its length means nothing
    lengths: torch.Tensor,  # [B] int32 tokens whose keys are in the pool, the newest included
    *,
    block_size: int,
    scale: float | None,
) -> torch.Tensor:
    """Attention of one new token per sequence to the pages of its keys; the result is [B, H, V]."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if query.device.type == "cuda":
        from slime.engines.embedded.decode.decode_kernels import paged_decode  # late: needs Triton

        return paged_decode(query, keys, values, table, lengths, block_size, scale)
    return _from_copies(query, keys, values, table, lengths, block_size, scale)


def _from_copies(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    count, heads = len(query), keys.shape[1]
    column = torch.arange(table.shape[1] * block_size, device=query.device)
    seen = column[None, :] < lengths[:, None]
    pages = torch.where(seen[:, ::block_size], table, 0).long()
    rows = (pages[:, :, None] * block_size + column[:block_size]).view(count, -1)
    k, v = (pool[rows].transpose(1, 2) for pool in (keys, values))
    q = query.reshape(count, heads, -1, query.shape[2])
    out = scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None, :], scale=scale)
    return out.reshape(count, query.shape[1], values.shape[2])
