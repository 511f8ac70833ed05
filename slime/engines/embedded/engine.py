"""The embedded engine: one `step` schedules, computes, samples and records, on the engine's own thread.

Control operations (pause, abort, new weights, memory) run between two steps on that same thread, so none of
them needs a lock and none of them sees a half-done step. An exception in a step fails only the requests in
that step.
"""

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from slime.engines.embedded.adapter import AdaptedWeights
from slime.engines.embedded.kv_cache import BlockAllocator
from slime.engines.embedded.pass_layout import PassLayout, SlotTable
from slime.engines.embedded.runner import ModelRunner
from slime.engines.embedded.sampler import Draws, sample
from slime.engines.embedded.scheduler import Scheduler
from slime.engines.embedded.sequence import ABORTED, Sequence, failure
from slime.engines.embedded.text import Detokenizer
from slime.engines.embedded.weight_delta import DeltaUpdate
from slime.engines.embedded.weight_update import BadWeights, Source, WeightStore
from slime.wire.control import TAGS, PauseMode

logger = logging.getLogger(__name__)

NOT_FINITE = "NotFinite"
# Limit for a request that asks for the ids of each draw: 64 MiB, and the same again in the response.
MAX_KEPT_IDS = 1 << 24
_PREFILL_BUDGET = {"cpu": 2048, "cuda": 8192}  # tokens of prompts in one pass
# A pass with a prompt is launched kernel by kernel, and takes as long as several replayed passes.
_RECORDED_PASSES = 16


@dataclass
class Engine:
    """The served model and its requests. `version` names the weights that the next token is drawn from."""

    runner: ModelRunner
    detokenizer: Detokenizer
    max_running: int
    version: str = "default"
    awaiting_weights: bool = False
    paused: PauseMode | None = None
    released: set[str] = field(default_factory=set)
    num_generated_tokens: int = 0
    forward_s: float = 0.0  # seconds in forward passes and sampling

    def __post_init__(self) -> None:
        self.weights = WeightStore(self.runner.model, self.runner.fp8_block, self.runner.hub_names)
        self.adapters = AdaptedWeights(self.runner.model)
        # (version, names received) of weights that arrive bucket by bucket; None: the model is complete.
        self._arriving: tuple[str, set[str]] | None = None
        self.scoring: deque[Sequence] = deque()  # inputs to score, each in a pass of its own
        self._make_scheduler()

    def _make_scheduler(self) -> None:
        # One at a time: each request is computed alone, so its bits do not depend on other requests.
        self.allocator = BlockAllocator(
            self.runner.num_blocks, self.runner.block_size, reuse=self.max_running > 1
        )
        runner, device = self.runner, self.runner.device
        layout = PassLayout(
            SlotTable(self.max_running, self.allocator.blocks_for(self.max_tokens)),
            runner.block_size,
            row_bytes=runner.row_bytes,
            dtype=runner.dtype,
            device=device,
            in_grid=runner.vision is not None and runner.vision.grid_positions,
            never=runner.image_ids,
            paged=runner.paged,
            spans=runner.spans,
        )
        self.scheduler = Scheduler(
            self.allocator,
            layout,
            max_running=self.max_running,
            prefill_budget=_PREFILL_BUDGET[device.type],
            admit_every=_RECORDED_PASSES if runner.paged and device.type == "cuda" else 1,
        )

    @property
    def max_tokens(self) -> int:
        """Longest prompt and output of one request together."""
        return min(self.runner.context_len, self.runner.num_blocks * self.runner.block_size)

    @property
    def can_step(self) -> bool:
        may = self.paused is None and not self.released and not self.is_mixed
        return may and bool(self.scoring or self.scheduler.has_work)

    @property
    def is_mixed(self) -> bool:
        """Whether some weights are already of the next version; requests then wait for the rest."""
        return self._arriving is not None

    @property
    def _everyone(self) -> tuple[Sequence, ...]:
        return (*self.scheduler.running, *self.scheduler.waiting, *self.scoring)

    # -- requests --------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> list[Sequence]:
        """Queue a request; return it if it is already finished, because it requests no token."""
        sequence.enter_version(self.version)
        if sequence.scored:
            self.scoring.append(sequence)
            return []
        if sequence.max_new_tokens == 0:
            sequence.finish = {"type": "length", "length": 0}
            return [sequence]
        self.scheduler.add(sequence)
        return []

    def step(self) -> list[Sequence]:
        """Run one forward pass; return sequences with news for clients: finished, failed or streamed."""
        if self.scoring:
            return self._score(self.scoring.popleft())
        try:
            work = self.scheduler.schedule()
        except Exception as error:
            return self._start_over(error)
        if work is None:
            return []
        try:
            with self._forward_timed():
                logits = self.runner.forward(work.plan)
                draws = sample(logits, work.rows) if work.samplers else Draws([], [])
            self.scheduler.commit(work, draws)
            heard = self._settle(work.samplers)
        except Exception as error:
            return self._fail(work.sequences, error)
        self.num_generated_tokens += len(draws.tokens)
        return heard

    @contextlib.contextmanager
    def _forward_timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.forward_s += time.perf_counter() - started

    def _score(self, sequence: Sequence) -> list[Sequence]:
        try:
            with self._forward_timed():
                scores = self.runner.score(sequence)
        except Exception as error:
            return self._fail([sequence], error)
        sequence.input_log_probs = [None, *scores]
        sequence.finish = {"type": "length", "length": 0}
        if not math.isfinite(sum(scores)):
            sequence.finish = self._not_finite()
            self._wipe_cache()
        return [sequence]

    def _settle(self, sequences: list[Sequence]) -> list[Sequence]:
        heard = []
        for sequence in sequences:
            finish = self._finish_reason(sequence)
            if finish is not None:
                self._release(sequence)
            sequence.finish = finish  # last: readers on other threads count on it
            if sequence.finish is not None or sequence.has_event:
                heard.append(sequence)
        if any(
            sequence.finish is not None and sequence.finish.get("err_type") == NOT_FINITE
            for sequence in heard
        ):
            self._wipe_cache()
        return heard

    # -- failures --------------------------------------------------------------------------------------------

    def _fail(self, sequences: Iterable[Sequence], error: Exception) -> list[Sequence]:
        """Fail the sequences of a pass that raised; raise if the device can no longer be used."""
        logger.error("A step and its requests failed; the engine continues.", exc_info=error)
        members = list(sequences)  # some may have finished before the error: they are reported, too
        for sequence in members:
            if sequence.slot >= 0:
                self.scheduler.forget(sequence)
            if not sequence.done:
                sequence.finish = failure(
                    500, f"a step failed: {type(error).__name__}: {error}"[:1000], "StepFailed"
                )
        self.allocator.flush()  # pages count as computed once their prompt is in a pass
        self.runner.check_device()
        return members

    def _start_over(self, error: Exception) -> list[Sequence]:
        """Fail every sequence after a scheduling error: the queues may be half changed."""
        everyone = list(dict.fromkeys([*self.scheduler.running, *self.scheduler.waiting]))
        for sequence in everyone:
            sequence.slot = -1
        self._make_scheduler()
        return self._fail(everyone, error)

    def _wipe_cache(self) -> None:
        """Zero the pool: a NaN in a page spoils the next sequence that reads it, even under a mask."""
        self.scheduler.retract_all()
        self.allocator.flush()
        if self.runner.pool is not None:
            self.runner.pool.wipe()

    def _not_finite(self) -> dict[str, Any]:
        why = f"the model's probabilities are not finite numbers (weights {self.version})"
        return failure(422, f"{why}: no token can be drawn", NOT_FINITE)

    def _finish_reason(self, sequence: Sequence) -> dict[str, Any] | None:
        count, token, sampling = len(sequence.output), sequence.output[-1], sequence.sampling
        if not math.isfinite(sequence.log_probs[-1]):
            return self._not_finite()
        if sequence.num_kept_ids > MAX_KEPT_IDS:
            many = f"its {count} tokens were drawn from more than {MAX_KEPT_IDS} ids"
            return failure(422, f"{many}: lower top_p, top_k, the temperature or max_new_tokens", "TooWide")
        if token in sequence.stop_ids and count >= sampling.min_new_tokens:
            return {"type": "stop", "matched": token}
        if sampling.stop and count >= sampling.min_new_tokens:
            matched = self.detokenizer.find_stop(sequence.output, sampling)
            if matched is not None:
                return {"type": "stop", "matched": matched}
        return {"type": "length", "length": count} if count >= sequence.max_new_tokens else None

    def abort(self, rid: str | None, *, prefix: bool = False) -> list[Sequence]:
        """End the requests with that id, or all for None; each keeps its tokens.

        `prefix`: all whose ids begin with it.
        """
        chosen = [
            s for s in self._everyone if rid is None or s.rid == rid or (prefix and s.rid.startswith(rid))
        ]
        for sequence in chosen:
            self.abort_sequence(sequence)
        return chosen

    def abort_sequence(self, sequence: Sequence) -> None:
        if sequence.scored:
            self.scoring.remove(sequence)
        else:
            self._release(sequence)
        sequence.finish = dict(ABORTED)

    def _release(self, sequence: Sequence) -> None:
        if sequence.return_experts and self.runner.experts is not None:
            known, size = sequence.num_computed, self.allocator.block_size
            count = sequence.num_tokens - 1
            sequence.experts = self.runner.experts.of(sequence.blocks, size, known, count)
        self.scheduler.release(sequence)

    def pause(self, mode: PauseMode) -> list[Sequence]:
        self.paused = mode
        if mode == "retract":
            self.scheduler.retract_all()
        return self.abort(None) if mode == "abort" else []

    def resume(self) -> None:
        self.paused = None

    # -- weights ---------------------------------------------------------------------------------------------

    def update_weights(self, source: Source, version: str) -> tuple[int, int]:
        """Replace all parameters. Requests in flight keep their KV cache; no other request reuses it."""
        self._refuse_without_memory()
        self.weights.check(source)

        def apply() -> tuple[int, int]:
            self.adapters.forget()
            return self.weights.apply(source)

        return self._change_weights(apply, version)

    def update_part(self, source: Source, version: str) -> tuple[int, int]:
        """Replace some parameters. `version` is complete once every parameter has arrived under that name."""
        self._refuse_without_memory()
        self.weights.check_part(source)
        self.weights.check_finite(source)
        if self._arriving is None or self._arriving[0] != version:
            self._arriving = (version, set())
            self.adapters.forget()
        counts = self.weights.apply(source)
        names = self._arriving[1]
        names.update(source.shapes)
        return counts if self.weights.missing(names) else self._change_weights(lambda: counts, version)

    def update_by_delta(self, delta: DeltaUpdate) -> tuple[int, int]:
        """Change the parameters in place from the delta's base version, which the engine must hold."""
        self._refuse_without_memory()
        if self.version != delta.base or self.awaiting_weights or self._arriving or self.adapters.name:
            raise BadWeights(
                f"the delta is made for plain weights {delta.base}, and this engine holds {self.version} or "
                "a part of other ones"
            )
        tensors = self.weights.plain_tensors()
        delta.check(tensors)
        return self._change_weights(lambda: delta.apply(tensors), delta.version)

    def update_adapter(self, source: Source, scale: float, name: str, version: str) -> tuple[int, int]:
        """Replace the adapters that are added to the weights from the start or from the last update."""
        self._refuse_without_memory()
        self.adapters.check(source)
        return self._change_weights(lambda: self.adapters.apply(source, scale, name), version)

    def _refuse_without_memory(self) -> None:
        if "weights" in self.released:
            raise BadWeights(
                "the weights are released: call /resume_memory_occupation with the tag weights first"
            )

    def _change_weights(self, apply: Callable[[], tuple[int, int]], version: str) -> tuple[int, int]:
        self.awaiting_weights = True  # if the copy fails half-way, the mixture is never served
        counts = apply()
        self.allocator.flush()
        self.runner.features.clear()
        self.set_version(version)
        logger.info("The engine now serves weights %s", version)
        self.awaiting_weights, self._arriving = False, None
        return counts

    def checksums(self) -> dict[str, int]:
        return self.adapters.checksums(self.weights.checksums())

    def set_version(self, version: str) -> None:
        self.version = version
        for sequence in self._everyone:
            sequence.enter_version(version)

    # -- memory ----------------------------------------------------------------------------------------------

    def release(self, tags: Iterable[str]) -> None:
        """Free memory. Nothing is generated until all of it is resumed; requests are then recomputed."""
        tags = set(tags)
        if "kv_cache" in tags - self.released:
            self.scheduler.retract_all()
            self.allocator.flush()
            self.runner.release_pool()
        if "weights" in tags - self.released:
            self.runner.release_weights()
        self.released |= tags

    def restore(self, tags: Iterable[str]) -> None:
        tags = set(tags) & self.released
        if "weights" in tags:
            self.runner.model.to(self.runner.device)
        if "kv_cache" in tags:
            self.runner.restore_pool()
        self.released -= tags

    # -- state -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return counters and state for /server_info."""
        pool = self.runner.pool
        return {
            "weight_version": self.version,
            "awaiting_weights": self.awaiting_weights,
            "paused": self.paused,
            "released": [tag for tag in TAGS if tag in self.released],
            "num_running_reqs": len(self.scheduler.running),
            "num_waiting_reqs": len(self.scheduler.waiting) + len(self.scoring),
            "num_retracted_reqs": sum(sequence.num_retractions > 0 for sequence in self.scheduler.waiting),
            "num_forward_passes": self.runner.num_forward_passes,
            "forward_s": self.forward_s,
            "num_generated_tokens": self.num_generated_tokens,
            "kv_blocks_total": self.allocator.num_blocks,
            "kv_blocks_free": self.allocator.num_free,
            "kv_pool_bytes": pool.nbytes if pool is not None else 0,
            "memory_bytes": self.runner.memory_bytes,
        }
