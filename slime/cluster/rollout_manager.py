"""The rollout stage: owns the engines, the data source and the
rollout functions; turns prompts into a batch.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from slime.arguments import Args, RunInfo, plugin_args
from slime.arguments.run_info import EVALUATION_ENGINES
from slime.batch.convert import samples_to_batch
from slime.cluster.run import Run
from slime.cluster.serving.engine_weights import EngineWeights
from slime.cluster.serving.served_model import ModelService, make_servers, ranks_on_engines
from slime.observability.logging_utils import configure_logger
from slime.observability.metrics import eval_metrics, rollout_metrics
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.dumps import load_rollout_dump, save_rollout_dump
from slime.rollout.generation.policy_requests import PolicyRequests, not_trained
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.runtime.base import Runtime, in_background
from slime.runtime.placement import Placement
from slime.utils.async_utils import run
from slime.utils.misc import load_function
from slime.utils.plugin_errors import plugin_call
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import RolloutBatch, Sample, flatten_samples
from slime.weight_sync import LiveReport, Parcel, Target
from slime.wire.control import EngineControl
from slime.wire.protocol import EngineInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """What start-up found out. `num_rollout_per_epoch` None: the data has
    no epochs. `transports`: of every engine.
    """

    num_rollout: int
    num_rollout_per_epoch: int | None
    transports: tuple[str, ...]
    engine_urls: tuple[str, ...]
    engine_pids: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Generated:
    """One rollout: the batch to train on, and the cursor of all that was consumed to make it.

    `batch` None: the run only generates. `cursor` None: the data source keeps its state itself.
    """

    batch: RolloutBatch | None
    cursor: dict[str, Any] | None
    metrics: dict[str, float]
    num_samples: int


class RolloutManager:
    """Calls on the work lane: start, generate, evaluate. On the
    control lane: receive, release, restore, close.
    """

    def __init__(self, args: Args, run_: Run, placement: Placement, runtime: Runtime):
        configure_logger()
        self._args, self._run = args, run_
        self._info = RunInfo(run_id=run_.run_id, run_dir=str(run_.run_dir))
        self._told_of_bent = False
        self._released: frozenset[str] = frozenset()  # memory tags that engines hold no more
        policy, servers = args.engine_topology.policy, make_servers(args, run_, placement.engines, runtime)
        engines = servers.pop(policy.name, [])
        reserved = args.eval_num_engines if engines else 0
        self._policy = ModelService(args, policy, engines, self._bring_up_to_date, reserved)
        self._fleet = self._policy.fleet
        self._weights = EngineWeights(args, run_.shm_prefix, ranks_on_engines(args, placement))
        self._weights.watch(self._fleet)
        models = {model.name: model for model in args.engine_topology.models}
        # Beside the policy, with the weights they were loaded with: teachers, reward models.
        self._frozen = [
            ModelService(args, models[name], found, _stays_as_it_is) for name, found in servers.items()
        ]
        for service in self._services:
            service.fleet.launch()

    def start(self, start_rollout_id: int, rollout_state: dict[str, Any] | None) -> RolloutFacts:
        """Reads the data while the engines start, then waits for them."""
        self._info = replace(self._info, start_rollout_id=start_rollout_id)
        self._data_source = self._make_data_source()
        self._load_state(start_rollout_id, rollout_state)
        per_epoch, num_rollout = self._count_rollouts()
        self._info = replace(self._info, num_rollout=num_rollout)
        transports = self._connect() if self._fleet.urls else ()
        # One namespace for all plug-ins of this stage, built once.
        self._plugin_args = plugin_args(self._args, self._info)
        self._rollout_fn = load_function(self._args.rollout_function_path)
        self._eval_fn = load_function(self._args.eval_function_path or self._args.rollout_function_path)
        return RolloutFacts(num_rollout, per_epoch, transports, self._fleet.urls, self._fleet.pids)

    def _make_data_source(self) -> Any:
        path, args = self._args.data_source_path, plugin_args(self._args, self._info)
        if path.startswith("slime.rollout."):
            return load_function(path)(args)
        with plugin_call("--data-source-path", path):
            return load_function(path)(args)

    def _load_state(self, start_rollout_id: int, rollout_state: dict[str, Any] | None) -> None:
        if rollout_state is not None:
            self._data_source.load_state_dict(rollout_state)
        elif start_rollout_id > 0 and self._args.rollout_global_dataset:
            self._data_source.load(start_rollout_id - 1)

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
        return per_epoch, per_epoch * args.num_epoch

    def _connect(self) -> tuple[str, ...]:
        # Now, while the engines start: the default rollout needs it, and a
        # folder that is no model is told at once.
        load_tokenizer(self._args.hf_checkpoint)
        urls = self._fleet.wait_ready()
        infos = [self._weights.info(url) for url in urls]
        port, evaluation_port = self._policy.start_routers(self._run, self._args.sglang_router_port)
        reserved = {EVALUATION_ENGINES: ("127.0.0.1", evaluation_port)} if evaluation_port is not None else {}
        self._info = replace(
            self._info,
            router_ip="127.0.0.1",
            router_port=port,
            model_routers={
                self._policy.model.name: ("127.0.0.1", port),
                **reserved,
                **self._connect_frozen(),
            },
            engine_urls=self._policy.urls,
            num_engines=len(self._policy.urls),
            **_model_facts(self._args.hf_checkpoint, infos),
        )
        return tuple(
            set.intersection(
                *(
                    set(server.transports(info))
                    for server, info in zip(self._fleet.servers, infos, strict=True)
                )
            )
        )

    def _connect_frozen(self) -> dict[str, tuple[str, int]]:
        routers = {}
        for service in self._frozen:
            service.fleet.wait_ready()
            routers[service.model.name] = ("127.0.0.1", service.start_routers(self._run, None)[0])
        return routers

    @property
    def _services(self) -> list[ModelService]:
        return [self._policy, *self._frozen]

    # ---- generation ----------------------------------------------------------------------------------------

    def generate(self, rollout_id: int) -> Generated:
        started, forward_before, version = time.monotonic(), self._forward_seconds(), self._version
        set_current_rollout_id(rollout_id)
        output = self._guarded(lambda: self._samples_of(rollout_id))
        samples = flatten_samples(output.samples)
        if self._args.save_debug_rollout_data:
            save_rollout_dump(self._args.save_debug_rollout_data, rollout_id, output.samples)
        metrics = self._rollout_metrics(rollout_id, samples, output.metrics or {}, time.monotonic() - started)
        metrics["perf/engine_forward_time"] = max(0.0, self._forward_seconds() - forward_before)
        self._tell_of_bent_requests()
        batch = None
        if not self._args.debug_rollout_only:
            batch = samples_to_batch(self._plugin_args, output.samples, engine_version=version)
        cursor = output.cursor if output.cursor is not None else self._cursor(rollout_id)
        return Generated(batch, cursor, metrics, len(samples))

    @property
    def _version(self) -> str | None:
        """What the engines were last brought to; None: nothing was pushed yet."""
        return self._weights.parcel.version if self._weights.parcel is not None else None

    def _samples_of(self, rollout_id: int) -> RolloutFnTrainOutput:
        template = self._args.load_debug_rollout_data
        if template is not None:
            subsample = self._args.load_debug_rollout_data_subsample
            return RolloutFnTrainOutput(samples=load_rollout_dump(template, rollout_id, subsample=subsample))
        call = functools.partial(
            call_rollout_fn, self._rollout_fn, self._plugin_args, rollout_id, self._data_source
        )
        if self._args.rollout_function_path.startswith("slime.rollout."):
            return call(evaluation=False)
        path = self._args.rollout_function_path
        with (
            PolicyRequests(self._plugin_args).entered(),
            plugin_call("--rollout-function-path", path, lambda: f"rollout {rollout_id}"),
        ):
            return call(evaluation=False)

    def _forward_seconds(self) -> float:
        """Of the engine that spent most; 0 where engines do not count (or one died and began anew)."""
        with self._fleet.frozen() as urls:
            counts = run(_gather([EngineControl(url).forward_seconds() for url in urls]))
        return max((count for count in counts if isinstance(count, float)), default=0.0)

    def _tell_of_bent_requests(self) -> None:
        """Once: of requests that only the engines saw."""
        if self._told_of_bent or self._args.allow_sampling_mismatch or self._args.debug_rollout_only:
            return
        with self._fleet.frozen() as urls:
            answers = run(_gather([EngineControl(url).bent_by_others() for url in urls]))
        found = [answer for answer in answers if isinstance(answer, tuple) and answer[0]]
        if found:
            self._told_of_bent = True
            logger.warning(
                "%d requests whose %s reached the engines by another HTTP client than slime's, which looks "
                "at what is asked for. If their tokens are trained on, the trainer computes another "
                "distribution than they were drawn from: ask through slime.utils.http_utils.post, or accept "
                "it with --allow-sampling-mismatch.",
                sum(count for count, _ in found),
                found[0][1],
            )

    def _cursor(self, rollout_id: int) -> dict[str, Any] | None:
        state_dict = getattr(
            self._data_source, "state_dict", None
        )  # a user's data source may keep its own state
        return state_dict() if state_dict is not None else None

    def save_data_source(self, rollout_id: int) -> None:
        """For data sources that keep their own state."""
        self._data_source.save(rollout_id)

    def _rollout_metrics(
        self, rollout_id: int, samples: list[Sample], extra: dict[str, Any], rollout_time: float
    ) -> dict[str, float]:
        path = self._args.custom_rollout_log_function_path
        if path:
            with plugin_call("--custom-rollout-log-function-path", path, lambda: f"rollout {rollout_id}"):
                if load_function(path)(rollout_id, self._plugin_args, samples, extra, rollout_time):
                    return {}
        return {
            **rollout_metrics(self._plugin_args, samples, rollout_time, current_version=self._version),
            **extra,
        }

    # ---- evaluation ----------------------------------------------------------------------------------------

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        output = self._guarded(lambda: self._evaluate(rollout_id))
        if self._args.save_debug_rollout_data:
            samples = [sample for result in output.data.values() for sample in result["samples"]]
            save_rollout_dump(self._args.save_debug_rollout_data, f"eval_{rollout_id}", samples)
        self._write_eval(rollout_id, output)
        path = self._args.custom_eval_rollout_log_function_path
        if path:
            with plugin_call(
                "--custom-eval-rollout-log-function-path", path, lambda: f"evaluation {rollout_id}"
            ):
                if load_function(path)(rollout_id, self._plugin_args, output.data, output.metrics or {}):
                    return {}
        return {**eval_metrics(self._plugin_args, output.data), **(output.metrics or {})}

    def _evaluate(self, rollout_id: int) -> RolloutFnEvalOutput:
        path = self._args.eval_function_path or self._args.rollout_function_path
        call = functools.partial(
            call_rollout_fn, self._eval_fn, self._plugin_args, rollout_id, self._data_source
        )
        with not_trained():
            if path.startswith("slime.rollout."):
                return call(evaluation=True)
            with plugin_call("--eval-function-path", path, lambda: f"evaluation {rollout_id}"):
                return call(evaluation=True)

    def _write_eval(self, rollout_id: int, output: RolloutFnEvalOutput) -> None:
        """The answers themselves, one line each: numbers without answers convince nobody."""
        path = self._run.run_dir / "eval" / f"{rollout_id}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w") as file:
            for dataset, result in output.data.items():
                for sample, reward in zip(
                    flatten_samples(result["samples"]), result["rewards"], strict=False
                ):
                    row = {"dataset": dataset, "prompt": sample.prompt, "response": sample.response}
                    file.write(
                        json.dumps({**row, "label": sample.label, "reward": reward}, default=str) + "\n"
                    )

    # ---- engines -------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Runs rollout code, but ends at once with the cause when the engines are given up."""
        future = in_background(work, "rollout")
        failures = [failure for service in self._services for failure in service.failures]
        done, _ = concurrent.futures.wait([future, *failures], return_when=concurrent.futures.FIRST_COMPLETED)
        return next((failure for failure in failures if failure in done), future).result()

    def receive(self, parcel: Parcel) -> dict[str, float]:
        return self._weights.receive(parcel)

    def begin_live(self) -> tuple[Target, ...]:
        return self._weights.begin_live()

    def finish_live(self, version: str, targets: tuple[Target, ...], report: LiveReport) -> dict[str, float]:
        return self._weights.finish_live(version, targets, report)

    def _bring_up_to_date(self, url: str) -> None:
        self._weights.bring_up_to_date(url)
        if self._released:
            run(EngineControl(url).release(self._released))

    def release(self, tags: frozenset[str]) -> None:
        with self._fleet.frozen() as urls:
            run(_gather([EngineControl(url).release(tags) for url in urls], strict=True))
            self._released |= tags
            self._fleet.asleep = True

    def restore(self, tags: frozenset[str]) -> None:
        with self._fleet.frozen() as urls:
            run(_gather([EngineControl(url).restore(tags) for url in urls], strict=True))
            self._released -= tags
            self._fleet.asleep = bool(self._released)

    def engine_pids(self) -> tuple[int | None, ...]:
        return self._fleet.pids

    def close(self) -> None:
        for service in self._services:
            service.close()


def _stays_as_it_is(url: str) -> None:
    """A frozen model that was started again has loaded all it needs."""


async def _gather(tasks: list, *, strict: bool = False) -> list:
    return await asyncio.gather(*tasks, return_exceptions=not strict)


def _model_facts(hf_checkpoint: str, infos: list[EngineInfo]) -> dict[str, int | None]:
    """What every engine can take; what an engine does not say
    about itself follows from the model's config.
    """
    config = _text_config(hf_checkpoint)
    return {
        "vocab_size": min(info.vocab_size or config.vocab_size for info in infos),
        "max_context_len": min(info.context_len or config.max_position_embeddings for info in infos),
        "num_layers": getattr(config, "num_hidden_layers", None),
        "moe_router_topk": getattr(config, "num_experts_per_tok", None),
    }


def _text_config(hf_checkpoint: str) -> Any:
    # Heavy import, and some runs have no engines.
    from transformers import AutoConfig, PretrainedConfig

    try:
        return AutoConfig.from_pretrained(hf_checkpoint).get_text_config()
    except ValueError:
        # A model type that engine and trainer know and transformers does not (MiMo):
        # its sizes stand in the file all the same.
        return PretrainedConfig.from_pretrained(hf_checkpoint).get_text_config()
