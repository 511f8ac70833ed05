"""`slime ledger replay RUN --step N`: takes one training step again on the CPU and compares it with the log.

The samples come from the record, the weights from the checkpoint before that step, the settings from
run.json; what computes is the training loop itself (batch, log-probs, advantages, loss terms), without
engines.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.record import Answer, Record, RecordError, Select, open_record
from slime.utils.files.run_file import METRICS_FILE, RunRecord, read_run
from slime.utils.files.step_folders import step_folders

# What a step computes of its batch; all of it is compared where the run logged it.
_COMPARED = (
    "train/",
    "rollout/log_probs",
    "rollout/ref_log_probs",
    "rollout/advantages",
    "rollout/returns",
    "rollout/rewards",
    "rollout/raw_reward",
)
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4  # sums in another order, kernels of another device
_HALF_RELATIVE, _HALF_ABSOLUTE = 5e-2, 2e-2  # bfloat16 on the device, fp32 here


def replay(folder: Path, step: int) -> int:
    """0: every number agrees; 1: some do not. A RecordError says why it cannot be done."""
    run = read_run(folder)
    if run is None:
        raise RecordError(f"{folder} holds no run.json: it is not the folder of a run.")
    with _no_devices(), tempfile.TemporaryDirectory(prefix="slime-replay-") as temporary:
        dump = Path(temporary) / "{rollout_id}.pt"
        with open_record(folder) as record:
            known = {row.rollout_id for row in record.rollouts() if row.kind == "train" and not row.pruned}
            if step not in known:
                raise RecordError(f"{folder}: {record.why_no_step(step)}")
            load = _weights_before(run, step, known)
            _write_dump(record, step, str(dump))
        args = _args(run, step, load, str(dump), Path(temporary) / "run")
        from slime.loop import train  # here: after the device was chosen

        train(args)
        found = _logged(Path(temporary) / "run", step)
        logged = _logged(folder, step, _updates(Path(temporary) / "run"))
    half = args.dtype == "bfloat16"
    return _compare(logged, found, *((_HALF_RELATIVE, _HALF_ABSOLUTE) if half else (_RELATIVE, _ABSOLUTE)))


@contextlib.contextmanager
def _no_devices() -> Iterator[None]:
    """For torch, which looks once, and for children; whoever called keeps his environment."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _weights_before(run: RunRecord, step: int, known: set[int]) -> str | None:
    """The folder of checkpoints that holds the weights which that step began with; None: the first model.

    `known`: steps whose samples are in the record.
    """
    if step == 0:
        return None
    folder = Path(run.last.checkpoints) if run.last.checkpoints else None
    there = sorted(step_folders(folder)) if folder is not None and folder.is_dir() else []
    if step - 1 not in there:
        kept = f"checkpoints are there of steps {there}" if there else "there are no checkpoints"
        raise RecordError(
            f"step {step} began with the weights after step {step - 1}, which are gone: {kept}. Steps that "
            f"can be replayed: {sorted({0, *(s + 1 for s in there)} & known)} (--save-interval 1 keeps all)."
        )
    return str(folder)


def _write_dump(record: Record, step: int, template: str) -> None:
    from slime.rollout.dumps import save_rollout_dump  # here: after the device was chosen

    answers = record.answers(Select(kind="train", rollout_id=step, outcome="trained", limit=1_000_000_000))
    if not answers:
        raise RecordError(f"no sample of step {step} was trained on.")
    groups: dict[int | None, list[Any]] = {}
    for answer in sorted(answers, key=lambda a: a.row):
        groups.setdefault(answer.group_index, []).append(_sample(record, answer))
    save_rollout_dump(template, step, list(groups.values()))


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


def _args(run: RunRecord, step: int, load: str | None, dump: str, run_dir: Path) -> Any:
    """The run's settings, for one step without engines on one rank of this machine."""
    from slime.arguments import parse_args

    known = {name: entry["value"] for name, entry in run.last.settings.items()}
    if known.get("turn_discount") is not None:
        raise RecordError(
            f"--turn-discount is {known['turn_discount']}: rewards of single turns are not in the record, "
            "and without them the advantages of a step cannot be computed again."
        )
    words = ["--hf-checkpoint", str(known["hf_checkpoint"]), "--debug-train-only"]
    words += ["--disable-rollout-global-dataset"]
    words += ["--load-debug-rollout-data", dump, "--num-rollout", str(step + 1), "--run-dir", str(run_dir)]
    words += ["--rollout-batch-size", str(known["rollout_batch_size"]), "--trainer-threads", "1"]
    words += ["--record-max-mib", "0", "--quiet", "--skip-preflight", "machine", "lengths", "reward"]
    if load is not None:
        words += ["--load", load, "--ckpt-step", str(step - 1)]
    args = parse_args(words)
    here = args.to_dict()
    # What parsing made of flags (a topology of engines) is in the file as text only.
    made = {
        name for name, value in here.items() if not isinstance(value, (str, float, int, list, type(None)))
    }
    own = set(_OF_THE_REPLAY) | made | {name for name in known if name not in here}
    return args.replace(**{name: value for name, value in known.items() if name not in own})


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
    """Numbers of a step, the last that was logged for each: a step that was lost was logged before.

    `updates`: the optimizer updates of that step; None: all that were logged.
    """
    found: dict[str, float] = {}
    file = folder / METRICS_FILE
    for line in file.read_text().splitlines() if file.is_file() else []:
        row = json.loads(line)
        update = row.get("train/step")
        if update is not None and (updates is None or update in updates):
            found |= {f"{name} (update {update})": value for name, value in _numbers(row).items()}
        elif row.get("rollout/step") == step:
            found |= _numbers(row)
    return found


def _updates(folder: Path) -> set[int]:
    rows = map(json.loads, (folder / METRICS_FILE).read_text().splitlines())
    return {row["train/step"] for row in rows if "train/step" in row}


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, (int, float)) and name.startswith(_COMPARED) and not name.endswith("/step")
    }


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
