"""Draws one token per row, with noise that depends only on the request's seed and the token's position.

A row's uniform number is a hash of (seed, absolute position), so its token does not depend on who else is in
the batch, and a request that is resubmitted with its first tokens as prompt continues the same stream. The
number is turned into a token by inverting the cumulative distribution: one hash per row, not one per
vocabulary entry.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the finaliser of SplitMix64: every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return numbers strictly inside (0, 1), one per (int64 seed, position), with 32 random bits each."""
    with np.errstate(over="ignore"):  # modulo 2^64 is meant
        keys = _mix(seeds.astype(np.int64).view(np.uint64) + _GOLDEN)
        bits = _mix(keys + positions.astype(np.uint64) * _GOLDEN) >> np.uint64(32)
    return (bits.astype(np.float64) + 0.5) / 2.0**32


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The sampling parameters of N rows of logits, as arrays."""

    seeds: np.ndarray  # [N] int64
    positions: np.ndarray  # [N] absolute position of the token to draw
    temperature: np.ndarray  # [N] 0: greedy
    top_p: np.ndarray
    top_k: np.ndarray  # <= 0: off
    min_p: np.ndarray
    banned: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (row, ids that may not be drawn yet)
    recorded: tuple[int, ...] = ()  # rows that need the ids they were drawn from
    never: tuple[int, ...] = ()  # ids that no row may draw

    @property
    def is_filtered(self) -> np.ndarray:
        """Return [N]: whether top_p, top_k or min_p exclude ids."""
        return (self.top_p < 1.0) | (self.top_k > 0) | (self.min_p > 0.0)


@dataclass(frozen=True, slots=True)
class Draws:
    """One token per row. `kept`: the ids that a recorded row was drawn from; empty if that is all of them."""

    tokens: list[int]
    log_probs: list[float]
    kept: dict[int, np.ndarray] = field(default_factory=dict)  # row -> [K] int32, in ascending order


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: SampleRows) -> Draws:
    """Draw a token per row, with its log-prob.

    Log-probs are of the temperature-scaled full distribution (unscaled for greedy rows), and of recorded rows
    over the ids that they were drawn from. A row with NaN logits, or without any token to draw, gets some
    token with a non-finite log-prob.
    """
    greedy = rows.temperature == 0.0
    logits = logits.float()
    if not (rows.temperature == 1.0).all():
        scale = torch.from_numpy(np.where(greedy, 1.0, rows.temperature)).to(logits.device, torch.float32)
        logits = logits / scale[:, None]
    log_probs = torch.log_softmax(logits, dim=-1)
    allowed = _ban(log_probs, rows)
    if greedy.all():
        tokens = allowed.argmax(dim=-1)
    else:
        allowed = _filter(allowed, rows)
        tokens = _draw(allowed, uniforms(rows.seeds, rows.positions))
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy).to(tokens.device), allowed.argmax(dim=-1), tokens)
    chosen = log_probs.gather(1, tokens[:, None]).squeeze(1)
    kept = _record(allowed, chosen, tokens, rows) if rows.recorded else {}
    return Draws(tokens.tolist(), chosen.tolist(), kept)


def _record(
    allowed: torch.Tensor, chosen: torch.Tensor, tokens: torch.Tensor, rows: SampleRows
) -> dict[int, np.ndarray]:
    """Return the ids that recorded rows were drawn from; `chosen` becomes log-probs over these ids."""
    banned = {row for row, _ in rows.banned}
    cut = rows.is_filtered | (rows.temperature == 0.0)
    wanted = np.array([row for row in rows.recorded if cut[row] or row in banned], np.int64)
    kept = {row: np.zeros(0, np.int32) for row in rows.recorded}
    if not len(wanted):
        return kept
    index = torch.from_numpy(wanted).to(allowed.device)
    own = tokens[index, None]
    part = allowed[index]
    greedy = torch.from_numpy(rows.temperature[wanted] == 0.0).to(part.device)[:, None]
    part = part.masked_fill(greedy & (torch.arange(part.shape[1], device=part.device) != own), float("-inf"))
    chosen[index] = torch.log_softmax(part, dim=-1).gather(1, own).squeeze(1)
    places, ids = (x.cpu().numpy() for x in part.isfinite().nonzero(as_tuple=True))
    parts = np.split(ids.astype(np.int32), np.searchsorted(places, np.arange(1, len(wanted))))
    # Copies: a view would keep all rows of the pass in memory for as long as one of their requests runs.
    return kept | {row: part.copy() for row, part in zip(wanted.tolist(), parts, strict=True)}


def _ban(log_probs: torch.Tensor, rows: SampleRows) -> torch.Tensor:
    if not rows.banned and not rows.never:
        return log_probs
    out = log_probs.clone()
    out[:, list(rows.never)] = float("-inf")
    for row, ids in rows.banned:
        out[row, list(ids)] = float("-inf")
    return out


def _draw(log_probs: torch.Tensor, u: np.ndarray) -> torch.Tensor:
    # In float32 the sum over a large vocabulary would lose the tail.
    cumulative = log_probs.exp().cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.from_numpy(u).to(total.device)[:, None] * total
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))  # never reaches the end
    # right=True steps over entries of mass 0: their cumulative value equals the one before
    place = torch.searchsorted(cumulative, target, right=True)
    return place.squeeze(1).clamp_(max=cumulative.shape[-1] - 1)


def _filter(log_probs: torch.Tensor, rows: SampleRows) -> torch.Tensor:
    """Set logits that top_k, top_p and min_p exclude to -inf; rows without filters are not changed."""
    cut = rows.is_filtered
    if not cut.any():
        return log_probs
    index = torch.from_numpy(np.flatnonzero(cut)).to(log_probs.device)
    part, order = log_probs.index_select(0, index).sort(dim=-1, descending=True, stable=True)

    def on_device(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values[cut]).to(part.device)[:, None]

    vocab = part.shape[-1]
    top_k = on_device(np.where(rows.top_k > 0, rows.top_k, vocab))
    drop = torch.arange(vocab, device=part.device)[None, :] >= top_k
    probs = part.exp().double().masked_fill(drop, 0.0)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    # keep a token while the mass before it is below top_p: the first one always stays
    drop |= probs.cumsum(dim=-1) - probs >= on_device(rows.top_p.astype(np.float64))
    drop |= probs < probs[:, :1] * on_device(rows.min_p.astype(np.float64))
    part = part.masked_fill(drop, float("-inf"))
    out = log_probs.clone()
    out[index] = torch.empty_like(part).scatter_(1, order, part)
    return out
