"""One request inside the engine: its tokens so far, its pages of the KV cache, and why it finished."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime.engines.embedded.request_images import ImagePrompt
from slime.wire.protocol import SamplingParams


@dataclass(eq=False, slots=True)
class Sequence:
    """A running request. Only the engine's thread writes it; the HTTP side reads `len(log_probs)` tokens."""

    rid: str
    prompt: list[int]
    sampling: SamplingParams
    seed: int
    max_new_tokens: int  # already clamped to the context
    stop_ids: frozenset[int]
    return_logprob: bool = True
    stream: bool = False
    return_experts: bool = False
    scored: bool = False  # only the input's log-probs are requested, no tokens
    num_top: int = 0  # of a scored input: the number of most likely ids to report for each token
    created: float = field(default_factory=time.time)
    pictures: ImagePrompt | None = None  # None: the prompt has no images

    output: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    # Per token the ids it was drawn from, if requested.
    kept_ids: list[np.ndarray] = field(default_factory=list)
    num_kept_ids: int = 0  # over all tokens
    # Log-probs of a scored input, None for its first token.
    input_log_probs: list[float | None] = field(default_factory=list)
    # Most likely ids of each token but the first, with their log-probs.
    input_top: list[list[tuple[float, int]]] = field(default_factory=list)
    experts: np.ndarray | None = None  # [tokens - 1, layers, top k], if requested
    finish: dict[str, Any] | None = None  # SGLang's finish_reason; None while it runs
    versions: list[tuple[str, int]] = field(default_factory=list)  # (weight version, first output token)
    cached_tokens: int = 0
    num_retractions: int = 0

    # set by the scheduler
    slot: int = -1  # row of the slot table; -1: not running
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose KV is in the pool
    epoch: int = 0  # the allocator's flush count when its first KV was written

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def keys(self) -> list[int]:
        """Return the keys for comparing prefixes: tokens, with an image's key in place of image tokens."""
        keys = None if self.pictures is None else self.pictures.keys
        return self.tokens if keys is None else keys + self.output

    @property
    def shift(self) -> int:
        """Return the offset from a token's index after the prompt to its position."""
        return 0 if self.pictures is None else self.pictures.shift

    def positions(self, start: int, end: int) -> np.ndarray:
        """Return [3, end - start] positions of tokens in time, height and width."""
        place = np.broadcast_to(np.arange(start, end) + self.shift, (3, end - start))
        inside = None if self.pictures is None else self.pictures.positions
        if inside is None or start >= inside.shape[1]:
            return place
        return np.concatenate((inside[:, start:end], place[:, inside.shape[1] - start :]), axis=1)

    @property
    def has_event(self) -> bool:
        """Whether the newest token is sent as an event of a stream."""
        return self.stream and len(self.output) % (self.sampling.stream_interval or 1) == 0

    @property
    def done(self) -> bool:
        return self.finish is not None

    @property
    def failed(self) -> bool:
        """Return whether the client gets an error, whatever tokens the sequence has."""
        return self.finish is not None and self.finish.get("status_code") is not None

    def enter_version(self, version: str) -> None:
        """Record that tokens from here on are drawn from weights `version`."""
        start = len(self.output)
        if self.versions and self.versions[-1][1] == start:
            self.versions.pop()
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, start))

    def spans(self, num_tokens: int) -> list[dict[str, Any]]:
        """Return `[{"version", "start", "end"}]` over the first `num_tokens` outputs."""
        starts = [start for _, start in self.versions]
        ends = [*starts[1:], num_tokens]
        spans = zip(self.versions, ends, strict=True)
        return [{"version": v, "start": s, "end": e} for (v, s), e in spans if e > s]


ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def failure(status: int, message: str, kind: str) -> dict[str, Any]:
    """Return the finish reason of a request that gets an HTTP error instead of tokens."""
    return {"type": "abort", "message": message, "status_code": status, "err_type": kind}
