"""`slime ledger replay RUN --step N`: compute one training step again on the CPU and compare it with the log.

Samples come from the record, weights from the checkpoint before that step, settings from run.json. The
training loop itself computes the step (batch, log-probs, advantages, loss terms), without engines.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from slime.arguments.groups.trained_sampling import replays_nucleus
from slime.catalog.estimators import ESTIMATORS
from slime.cli.inspect import need_run
from slime.observability.tracking import read_metrics
from slime.record import RECORD_FILE, Answer, LedgerReader, Record, RecordError, Select, open_record
from slime.record.additions import Advantage
from slime.utils.files.run_file import METRICS_FILE, RunRecord, Start
from slime.utils.files.step_folders import step_folders

# Metrics that a step computes from its batch; each one that the run logged is compared.
_COMPARED = (
    "train/",
    "rollout/log_probs",
    "rollout/ref_log_probs",
    "rollout/advantages",
    "rollout/returns",
    "rollout/rewards",
    "rollout/raw_reward",
)
# Relative and absolute: sums in another order, kernels of another device; bfloat16 there, fp32 here.
_WITHIN = {"float32": (1e-3, 1e-4), "bfloat16": (5e-2, 2e-2)}
_UNCUT = {  # defaults for run.json files of earlier versions
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
    "allow_sampling_mismatch": False,
    "loss_type": "policy_loss",
}


def replay(folder: Path, step: int) -> int:
    """Return 0 if every number agrees, else 1; RecordError where the step cannot be replayed."""
    run = need_run(folder)
    no_gpus = mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="")  # here and in child processes
    with no_gpus, tempfile.TemporaryDirectory(prefix="slime-replay-") as temporary:
        dump, again = Path(temporary) / "{rollout_id}.pt", Path(temporary) / "run"
        with open_record(folder) as record:
            known = {row.rollout_id for row in record.rollouts() if row.kind == "train" and not row.pruned}
            if step not in known:
                raise RecordError(f"{folder}: {record.why_no_step(step)}")
            start = _start_of(folder, run, step)
            settings = {name: entry["value"] for name, entry in start.settings.items()}
            if why := _why_not(settings):
                raise RecordError(f"step {step} cannot be replayed: {why}")
            weights = _weights_before(run, start, step, known)
            _write_dump(record, step, str(dump))
            made = _advantages(record, step)
        args = _args(settings, step, weights, str(dump), again)
        from slime.loop import train  # here: after the device was chosen

        train(args)
        found = _logged(again, step)
        updates = {row["train/step"] for row in read_metrics(again) if "train/step" in row}
        logged = _logged(folder, step, updates)
        with open_record(again) as record:
            advantages = made, _advantages(record, step)
    within = _WITHIN["bfloat16" if args.dtype == "bfloat16" else "float32"]
    apart = _compare_advantages(*advantages, *within)
    return max(apart, _compare(logged, found, *within))


def _start_of(folder: Path, run: RunRecord, step: int) -> Start:
    """Return the start of the run that trained the step last; later starts may have other settings."""
    starts = [*run.earlier, run.last]
    with LedgerReader(folder / RECORD_FILE) as reader:
        rows = reader.events()
    numbers = [row.start for row in rows if row.event == "consumed" and row.rollout == step]
    if rows and not numbers:
        raise RecordError(f"step {step} was generated and never trained: there is nothing to compare with.")
    return starts[numbers[-1] - 1] if numbers and numbers[-1] <= len(starts) else run.last


def _why_not(settings: dict[str, Any]) -> str | None:
    """Return what a step with these settings needs that the record does not keep; None: nothing."""
    get = settings.get
    estimator = ESTIMATORS.get(name := get("advantage_estimator", ""))
    greedy = f"--advantage-estimator {name} compares with greedy responses, whose rewards"
    lacks = {
        "rewards of single turns (--turn-discount)": get("turn_discount") is not None,
        greedy: estimator is not None and estimator.needs_greedy_answer,
        "the token ids kept by --rollout-top-p and --rollout-top-k": replays_nucleus(
            SimpleNamespace(**{**_UNCUT, **settings})
        ),
        "the log-probs of a teacher behind --rm-url": get("use_opd") and get("opd_type") == "engine",
        "the experts that engines chose (--use-rollout-routing-replay)": get("use_rollout_routing_replay"),
        "pictures (--multimodal-keys)": get("multimodal_keys"),
    }
    return next((f"{what} are not recorded." for what, needed in lacks.items() if needed), None)


def _weights_before(run: RunRecord, start: Start, step: int, known: set[int]) -> list[str]:
    """Return the flags that load the weights before that step; none: the model of --hf-checkpoint.

    `known`: steps whose samples are in the record.
    """
    settings = {name: entry["value"] for name, entry in start.settings.items()}
    first = settings.get("start_rollout_id") or 0
    if start.resumed is not None:  # maybe from the checkpoint of another run
        loaded, rollout = Path(start.resumed["checkpoint"]), int(start.resumed["rollout"])
        anew = ["--finetune", "--start-rollout-id", str(first)] if settings.get("finetune") else []
        if step == (first if anew else rollout + 1) and loaded.is_dir():
            return ["--load", str(loaded.parent), "--ckpt-step", str(rollout), *anew]
    elif step == first:
        return ["--start-rollout-id", str(first)] if first else []
    folder = Path(run.last.checkpoints) if run.last.checkpoints else None
    there = sorted(step_folders(folder)) if folder is not None and folder.is_dir() else []
    if step - 1 not in there:
        kept = f"there are checkpoints of steps {there}" if there else "there are no checkpoints"
        raise RecordError(
            f"step {step} started from the weights after step {step - 1}, which were not kept: {kept}. "
            f"Steps that can be replayed: {sorted({0, *(s + 1 for s in there)} & known)} (--save-interval 1 "
            "keeps all)."
        )
    return ["--load", str(folder), "--ckpt-step", str(step - 1)]


def _write_dump(record: Record, step: int, template: str) -> None:
    from slime.rollout.dumps import save_rollout_dump  # here: after the device was chosen

    answers = record.answers(Select(kind="train", rollout_id=step, outcome="trained", limit=1_000_000_000))
    if not answers:
        raise RecordError(f"no sample of step {step} was trained on.")
    groups: dict[int | None, list[Any]] = {}
    for answer in sorted(answers, key=lambda a: a.row):
        groups.setdefault(answer.group_index, []).append(_sample(record, answer))
    save_rollout_dump(template, step, list(groups.values()))


def _advantages(record: Record, step: int) -> dict[int, Advantage]:
    """Return the advantages of trained samples by sample index."""
    select = Select(kind="train", rollout_id=step, outcome="trained", limit=1_000_000_000)
    found = [record.advantage(answer.row) for answer in record.answers(select)]
    return {advantage.sample_index: advantage for advantage in found if advantage is not None}


def _sample(record: Record, answer: Answer) -> Any:
    from slime.utils.types import Sample  # here: it loads torch

    tokens = record.tokens(answer.row)
    return Sample(
        group_index=answer.group_index,
        index=answer.sample_index,
        rollout_id=tokens.execution,
        prompt=answer.prompt,
        tokens=tokens.ids,
        response=answer.response,
        response_length=answer.num_tokens,
        label=answer.label,
        reward=answer.reward_parts or answer.reward,
        loss_mask=tokens.loss_mask,
        rollout_log_probs=tokens.log_probs,
        version_spans=tokens.versions,
        status=Sample.Status(answer.status),
    )


def _args(known: dict[str, Any], step: int, weights: list[str], dump: str, run_dir: Path) -> Any:
    """Return the settings of the run, changed to train one step on one rank without engines."""
    from slime.arguments.parser import parse_args

    words = ["--hf-checkpoint", str(known["hf_checkpoint"]), "--debug-train-only"]
    words += ["--disable-rollout-global-dataset", "--trainer-threads", "1"]
    words += ["--load-debug-rollout-data", dump, "--num-rollout", str(step + 1), "--run-dir", str(run_dir)]
    words += ["--rollout-batch-size", str(known["rollout_batch_size"])]
    words += ["--quiet", "--skip-preflight", "machine", "lengths", "reward", *weights]
    args = parse_args(words)
    here = args.to_dict()
    # Values derived from flags, such as the topology of engines, are in run.json only as text.
    plain = (str, float, int, list, type(None))
    same = {name for name, value in here.items() if isinstance(value, plain)} - set(_OF_THE_REPLAY)
    return args.replace(**{name: value for name, value in known.items() if name in same})


_OF_THE_REPLAY = """
    debug_train_only debug_rollout_only load_debug_rollout_data load_debug_rollout_data_subsample
    save_debug_rollout_data save_debug_train_data num_rollout num_epoch run_dir load ckpt_step finetune save
    save_interval save_hf push_to_hub keep_last_n async_save eval_interval eval_datasets eval_prompt_data
    record_max_mib quiet skip_preflight trainer_threads runtime colocate offload_train offload_rollout
    actor_num_nodes actor_num_gpus_per_node num_gpus_per_node rollout_num_gpus auto_resume start_rollout_id
    use_wandb use_tensorboard use_trackio use_mlflow dump_details log_level prompt_data rollout_global_dataset
    data_source_path rollout_function_path env dashboard tensor_model_parallel_size context_parallel_size
    pipeline_model_parallel_size virtual_pipeline_model_parallel_size expert_model_parallel_size
    expert_tensor_parallel_size sequence_parallel peer_copies max_restarts elastic
""".split()  # noqa: SIM905 - a list of words reads better as words


def _logged(folder: Path, step: int, updates: set[int] | None = None) -> dict[str, float]:
    """Return the latest value of each metric of a step; after a crash a step is logged twice.

    `updates`: the optimizer updates of that step; None: all that were logged.
    """
    found: dict[str, float] = {}
    for row in read_metrics(folder) if (folder / METRICS_FILE).is_file() else []:
        update = row.get("train/step")
        if update is not None and (updates is None or update in updates):
            found |= {f"{name} (update {update})": value for name, value in _numbers(row).items()}
        elif row.get("rollout/step") == step:
            found |= _numbers(row)
    return found


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, (int, float)) and name.startswith(_COMPARED) and not name.endswith("/step")
    }


def _compare_advantages(
    logged: dict[int, Advantage], found: dict[int, Advantage], relative: float, absolute: float
) -> int:
    """Return 0 if the advantages of all samples that are in both records agree."""
    common = sorted(logged.keys() & found.keys())
    apart = []
    for index in common:
        each = ([a.value, *(a.tokens or ())] for a in (logged[index], found[index]))
        pairs = zip(*each, strict=False)
        if not all(math.isclose(a, b, rel_tol=relative, abs_tol=absolute) for a, b in pairs):
            apart.append(index)
    if common:
        which = f", of samples {apart[:5]}" if apart else ""
        print(f"{'DIFFERS' if apart else 'same':8s} advantages of {len(common)} samples{which}")
    return 1 if apart else 0


def _compare(logged: dict[str, float], found: dict[str, float], relative: float, absolute: float) -> int:
    common = sorted(logged.keys() & found.keys())
    apart = [n for n in common if not math.isclose(logged[n], found[n], rel_tol=relative, abs_tol=absolute)]
    for name in common:
        mark = "DIFFERS" if name in apart else "same"
        print(f"{mark:8s} {name:52s} logged {logged[name]:<14.7g} replayed {found[name]:.7g}")
    for name in sorted(logged.keys() - found.keys()):
        print(f"{'not here':8s} {name:52s} logged {logged[name]:.7g}", file=sys.stderr)
    print(f"{len(common) - len(apart)} of {len(common)} numbers agree within {relative:g}")
    return 1 if apart or not common else 0
