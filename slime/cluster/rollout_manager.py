"""The rollout side of a run: data source, rollout functions and engines turn prompts into batches."""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from dataclasses import dataclass, replace
from typing import Any

from slime.arguments import Args, RunInfo, plugin_args
from slime.batch.convert import samples_to_batch
from slime.cluster.canary.probe import probe_tokens, why_no_canary
from slime.cluster.checkpoints.run_ledger import Resume, encodable, open_ledger
from slime.cluster.recording import Recording
from slime.cluster.serving.engine_plane import EnginePlane
from slime.cluster.serving.engine_weights import EngineWeights
from slime.liveness import phases
from slime.liveness.loop_watch import watch_loop
from slime.observability.logging_utils import configure_logger
from slime.observability.rollout_metrics import eval_metrics, rollout_metrics
from slime.record import LedgerReader, record_file
from slime.rollout import ledger
from slime.rollout.base_types import RolloutFnTrainOutput, eval_output, train_output
from slime.rollout.collection.versions import push_plan
from slime.rollout.data_source import CountingJournal, follow
from slime.rollout.dumps import load_rollout_dump, save_rollout_dump
from slime.rollout.generation import turn_gate
from slime.rollout.generation.policy_requests import PolicyRequests, not_trained
from slime.rollout.ledger import Ledger
from slime.rollout.response_text import share_with_ending
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.rollout.workers import current
from slime.rollout.workers.current import GroupRunner
from slime.runtime.base import Runtime
from slime.runtime.placement import Placement
from slime.utils.async_utils import get_loop
from slime.utils.column_rewards import takes_columns
from slime.utils.machine.run_identity import Run
from slime.utils.misc import load_function
from slime.utils.packed_samples import references_in
from slime.utils.plugin_errors import plugin_call
from slime.utils.processing_utils import load_tokenizer
from slime.utils.stored_arrays import KeptArrays
from slime.utils.types import RolloutBatch, Sample, flatten_samples, is_score, version_number

logger = logging.getLogger(__name__)

_ROLLOUT_WORKERS = "slime.cluster.rollout_workers.RolloutWorkers"  # by name, like rollout functions


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """Facts that are known after start-up. `num_rollout_per_epoch` None: the data has no epochs."""

    num_rollout: int
    num_rollout_per_epoch: int | None
    transports: tuple[str, ...]  # that every engine offers
    engine_urls: tuple[str, ...]
    probe: tuple[tuple[int, ...], ...] = ()  # the fixed texts of the canary; empty: the run has none


@dataclass(frozen=True, slots=True)
class Generated:
    """One rollout: the batch to train on, and the data cursor after it.

    `batch` None: the run only generates. `cursor` None: the data source keeps its state itself.
    """

    batch: RolloutBatch | None
    cursor: dict[str, Any] | None
    metrics: dict[str, float]
    num_samples: int


class RolloutProcess:
    """Holds the engines, the record and the manager of the rollout side.

    The constructor never blocks; slow work is done in calls, whose errors reach the driver.
    """

    def __init__(self, args: Args, run: Run, placement: Placement, runtime: Runtime):
        configure_logger(level=args.log_level)
        self._args, self._run, self._placement, self._runtime = args, run, placement, runtime
        self._plane: EnginePlane | None = None
        self._manager: RolloutManager | None = None
        self._workers: GroupRunner | None = None  # None: groups are generated in this process
        self._recording = Recording(run, args)

    def launch(self) -> None:
        """Start the engines, without waiting until they serve."""
        self._plane = EnginePlane(self._args, self._run, self._placement, self._runtime)
        watch_loop(get_loop())

    def start(
        self, start_rollout_id: int, rollout_state: dict[str, Any] | None, resume: Resume
    ) -> RolloutFacts:
        assert self._plane is not None, "the engines are not launched"
        self._recording.begin(start_rollout_id)
        durable = open_ledger(self._args, self._run, self._recording, resume)
        ledger.use(durable)
        self._manager = RolloutManager(
            *(self._args, self._run, self._plane, self._recording, start_rollout_id, rollout_state),
            *(resume, durable),
        )
        if self._args.rollout_workers > 1:
            open_workers = load_function(_ROLLOUT_WORKERS)
            self._workers = open_workers(
                self._args, self._manager.info, self._runtime, durable, self._plane.balancers
            )
            current.use(self._workers)
        facts = self._manager.facts
        if facts.engine_urls and why_no_canary(self._args) is None:
            facts = replace(facts, probe=probe_tokens(load_tokenizer(self._args.hf_checkpoint)))
        return facts

    def manager(self) -> RolloutManager:
        assert self._manager is not None, "the rollout side is not started"
        return self._manager

    def recording(self) -> Recording:
        """Return the record's writer, which is called on the control lane during generation."""
        return self._recording

    def weights(self) -> EngineWeights:
        """Return the engines' weights, which are called on the control lane during generation."""
        assert self._plane is not None, "the engines are not launched"
        return self._plane.weights

    def close(self) -> None:
        turn_gate.forget_all()
        if self._workers is not None:
            current.use(None)
            self._workers.close()
        if self._plane is not None:
            self._plane.close()
        ledger.use(None)

    def close_record(self) -> None:
        """Close the record, after all who write to it; its last copy may take long."""
        self._recording.close()


class RolloutManager:
    """Reads the data while the engines start, then waits for them."""

    def __init__(
        self,
        args: Args,
        run: Run,
        engines: EnginePlane,
        recording: Recording,
        start_rollout_id: int,
        rollout_state: dict[str, Any] | None,
        resume: Resume | None = None,
        durable: Ledger | None = None,
    ):
        resume = resume or Resume("")
        self._args, self._run, self._engines, self._recording = args, run, engines, recording
        self._ledger = durable
        # Seconds in forward passes until the last rollout ended; None: engines have evaluated since.
        self._forward_s: float | None = None
        info = RunInfo(
            run_id=run.run_id,
            run_dir=str(run.run_dir),
            start_rollout_id=start_rollout_id,
            overlapped_loop=resume.overlapped,
        )
        with phases.starting("data") as part:
            path = args.data_source_path
            with _named("--data-source-path", path):
                self._data_source = load_function(path)(plugin_args(args, info))
            if rollout_state is not None:
                self._data_source.load_state_dict(rollout_state)
            elif start_rollout_id > 0 and args.rollout_global_dataset:
                self._data_source.load(start_rollout_id - 1)
            if durable is not None:
                follow(self._data_source, durable)
            self._arrays, self._last_commit = self._keep_arrays(resume), resume.committed
            per_epoch, num_rollout = self._count_rollouts()
            steps = f"steps {start_rollout_id + 1} to {num_rollout}"
            none_left = f"none of {num_rollout} steps (--num-rollout) is left" if num_rollout else ""
            part.total, part.note = num_rollout, steps if start_rollout_id < num_rollout else none_left
        with phases.starting("engines"):
            self.info = info = engines.connect(replace(info, num_rollout=num_rollout))
        # One namespace for all plug-ins of this side, built once.
        self._plugin_args = plugin_args(args, info)
        self._rollout_fn = load_function(args.rollout_function_path)
        self._eval_fn = load_function(args.eval_function_path or args.rollout_function_path)
        self.facts = RolloutFacts(num_rollout, per_epoch, engines.transports, engines.urls)

    @property
    def _trainer_keeps_batches(self) -> bool:
        """Return whether steps since any earlier one may be repeated, from batches that the trainer keeps."""
        args = self._args
        return bool(args.max_restarts) and (
            args.save is None or not args.record_max_mib or args.no_save_optim
        )

    def _keep_arrays(self, resume: Resume) -> KeptArrays:
        """Find what this start can use of the arrays of an earlier one; the rest is removed."""
        waiting = flatten_samples(getattr(self._data_source, "buffer", []))
        others = [array for sample in waiting for array in references_in(sample)]
        if self._args.use_rollout_routing_replay and self._ledger is not None:
            others += self._ledger.references()
        return KeptArrays(self._run.run_dir, resume.arrays, others)

    def _count_rollouts(self) -> tuple[int | None, int]:
        args = self._args
        size = len(self._data_source) if args.rollout_global_dataset else 0
        per_epoch = size // args.rollout_batch_size or None
        if args.num_rollout is not None:
            return per_epoch, args.num_rollout
        if not per_epoch:
            raise ValueError(
                f"--num-epoch {args.num_epoch} of {size} prompts makes no rollout of --rollout-batch-size "
                f"{args.rollout_batch_size}: lower it, add prompts, or give --num-rollout"
            )
        assert args.num_epoch is not None, "without --num-rollout there is --num-epoch"
        return per_epoch, per_epoch * args.num_epoch

    # -- generation

    def generate(self, rollout_id: int) -> Generated:
        started = time.monotonic()
        if (forward_before := self._forward_s) is None:
            forward_before = self._engines.forward_seconds()
        version = self._engines.weights.version
        if self._ledger is not None:
            self._ledger.begin(rollout_id, version)
        set_current_rollout_id(rollout_id)
        path, template = self._args.rollout_function_path, self._args.load_debug_rollout_data
        if template is not None:
            subsample = self._args.load_debug_rollout_data_subsample
            output = RolloutFnTrainOutput(load_rollout_dump(template, rollout_id, subsample=subsample))
        else:
            of_user = not _is_ours(path)
            with (
                PolicyRequests(self._plugin_args).entered() if of_user else contextlib.nullcontext(),
                _named("--rollout-function-path", path, f"rollout {rollout_id}"),
            ):
                made = self._engines.guard(
                    self._rollout_fn, self._plugin_args, rollout_id, self._data_source, evaluation=False
                )
                output = train_output(self._rollout_fn, made)
        self._forward_s = self._engines.forward_seconds()
        samples = flatten_samples(output.samples)
        if self._args.save_debug_rollout_data:
            save_rollout_dump(self._args.save_debug_rollout_data, rollout_id, output.samples)
        journal = getattr(self._data_source, "journal", None)
        dropped = journal.drain_dropped() if isinstance(journal, CountingJournal) else []
        self._recording.rollout(rollout_id, output, dropped, version)
        metrics = self._rollout_metrics(rollout_id, samples, output.metrics or {}, time.monotonic() - started)
        batch = None
        if not self._args.debug_rollout_only:
            batch = samples_to_batch(self._plugin_args, output.samples, engine_version=version)
            if "rollout/raw_reward" in metrics:  # as people are to read it
                shown = [value for value in batch["raw_reward"] if is_score(value)]
                metrics["rollout/raw_reward"] = sum(shown) / len(batch["raw_reward"])
        metrics["perf/engine_forward_time"] = max(0.0, self._forward_s - forward_before)
        if self._ledger is not None:
            self._ledger.account_for(rollout_id, samples)
            self._ledger.cut(rollout_id)
        cursor, state_dict = output.cursor, getattr(self._data_source, "state_dict", None)
        if cursor is None and state_dict is not None:  # a user's data source may keep its own state
            cursor = state_dict()
        generated = Generated(batch, cursor, metrics, len(samples))
        if self._ledger is not None:
            self._ledger.made(rollout_id, encodable(generated))
        self._arrays.keep(rollout_id, [array for sample in samples for array in references_in(sample)])
        if isinstance(journal, CountingJournal):
            self._arrays.remove(journal.drain_unneeded())
        return generated

    def note_trained(self, rollout_id: int) -> None:
        """Record that the trainer has made its step with the batch of this rollout."""
        if self._ledger is not None:
            self._ledger.trained(rollout_id)
        if self._args.save is None and not self._trainer_keeps_batches:
            self._arrays.forget(rollout_id)

    def note_evaluated(self, rollout_id: int) -> None:
        """Record that the metrics of this evaluation are on the disk."""
        if self._ledger is not None:
            self._ledger.evaluated(rollout_id)

    def write_ledger(self) -> None:
        """Return when every event until now is written: no checkpoint may know more than the ledger."""
        self._recording.flush()
        self._recording.copy()

    def made_batch(self, rollout_id: int) -> RolloutBatch | None:
        """Return the batch of a rollout from the ledger; None: it is not there."""
        if self._ledger is None or self._recording.writer is None:
            return None
        self._recording.writer.flush()
        with LedgerReader(record_file(self._run.run_dir)) as reader:
            made = reader.rollout(rollout_id, self._ledger.settings)
        batch: RolloutBatch | None = None if made is None else made["batch"]
        return batch

    def note_committed(self, rollout_id: int) -> None:
        """Record that a checkpoint after this rollout's step is complete."""
        if self._ledger is not None:
            self._ledger.committed(rollout_id)
        if not self._trainer_keeps_batches:
            self._arrays.forget(self._last_commit)  # what this one covers is kept, in case it is damaged
            self._last_commit = rollout_id

    def save_data_source(self, rollout_id: int) -> None:
        """Save the state of a data source that keeps its own."""
        self._data_source.save(rollout_id)

    def _rollout_metrics(
        self, rollout_id: int, samples: list[Sample], extra: dict[str, Any], rollout_time: float
    ) -> dict[str, float]:
        path = self._args.custom_rollout_log_function_path
        if path:
            with plugin_call("--custom-rollout-log-function-path", path, lambda: f"rollout {rollout_id}"):
                if load_function(path)(rollout_id, self._plugin_args, samples, extra, rollout_time):
                    return {}
        version = version_number(self._engines.weights.version)
        if version is not None:  # the trainer may have one that is pushed when this rollout is made
            version += push_plan(self._plugin_args).until(rollout_id, rollout_id)
        metrics = rollout_metrics(self._plugin_args, samples, rollout_time, current_version=version)
        own = self._args.custom_rm_path
        if samples and own and not own.startswith("slime.") and not takes_columns(load_function(own)):
            metrics["rollout/special_ending_ratio"] = share_with_ending(samples)  # our own rewards cut it off
        return {**metrics, **extra}

    def change_setting(self, name: str, value: object) -> None:
        """Change a setting between two rollouts, also in the args of plug-ins."""
        # A module whose rollout function keeps groups in flight across rollouts brings this function.
        restart_pool = getattr(inspect.getmodule(self._rollout_fn), "restart_pool", None)
        if name == "rollout_temperature" and restart_pool is not None:
            restart_pool(self._data_source)
        self._plugin_args.change(name, value)
        if (workers := current.current()) is not None:
            workers.change(name, value)

    def change_engines(self, name: str, address: str, transport: str | None) -> tuple[str, tuple[str, ...]]:
        """Let an engine join or leave; return what was done and all that generate, or why not and none."""
        try:
            if name == "add_engine":
                url = self._engines.add_engine(address, transport)
            else:
                url = self._engines.remove_engine(address)
        except (ValueError, RuntimeError, OSError) as error:
            return str(error), ()
        urls = self._engines.engines_that_generate
        if (workers := current.current()) is not None:
            workers.know_engines(urls)
        self.change_setting("engine_urls", list(urls))
        self.change_setting("rollout_num_engines", len(urls))
        what = "left"
        if name == "add_engine":
            now = self._engines.is_serving(url)
            what = (
                "joined with the current weights" if now else "joins when the trainer has written its weights"
            )
        return f"{url} {what}; engines that generate: {len(urls)}", urls

    # -- evaluation

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        self._forward_s = None
        path = self._args.eval_function_path or self._args.rollout_function_path
        with not_trained(), _named("--eval-function-path", path, f"evaluation {rollout_id}"):
            made = self._engines.guard(
                self._eval_fn, self._plugin_args, rollout_id, self._data_source, evaluation=True
            )
            output = eval_output(self._eval_fn, made)
        if self._args.save_debug_rollout_data:
            samples = [sample for result in output.data.values() for sample in result["samples"]]
            save_rollout_dump(self._args.save_debug_rollout_data, f"eval_{rollout_id}", samples)
        self._recording.evaluation(rollout_id, output, self._engines.weights.version)
        log_path = self._args.custom_eval_rollout_log_function_path
        if log_path:
            flag = "--custom-eval-rollout-log-function-path"
            with plugin_call(flag, log_path, lambda: f"evaluation {rollout_id}"):
                if load_function(log_path)(rollout_id, self._plugin_args, output.data, output.metrics or {}):
                    return {}
        return {**eval_metrics(self._plugin_args, output.data), **(output.metrics or {})}


def _is_ours(path: str) -> bool:
    return path.startswith("slime.rollout.")


def _named(flag: str, path: str, subject: str = "") -> contextlib.AbstractContextManager[None]:
    """Name the flag in errors of a user's function; errors of slime's own functions stay as they are."""
    return contextlib.nullcontext() if _is_ours(path) else plugin_call(flag, path, lambda: subject)
