"""Save the samples of a rollout to a file and load them again, to replay training without engines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.utils.files.torch_files import load_torch_file
from slime.utils.types import Sample, flatten_samples


def dump_path(path_template: str, rollout_id: int | str) -> Path:
    """`runs/dump_{rollout_id}.pt` -> the file of that rollout.

    Without a place for the number, evaluations (`eval_3`) get a file of their own beside it.
    """
    path = Path(path_template.format(rollout_id=rollout_id))
    if str(rollout_id).startswith("eval_") and str(path) == path_template:
        return path.with_name(f"eval_{path.name}")
    return path


def save_rollout_dump(path_template: str, rollout_id: int | str, samples: Sequence[Any]) -> Path:
    """Write `{rollout_id, samples: [Sample.to_dict(), ...]}` with groups flattened; never half a file."""
    path = dump_path(path_template, rollout_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    content = {"rollout_id": rollout_id, "samples": [s.to_dict() for s in flatten_samples(samples)]}
    import torch  # here: whoever never dumps needs none of it

    torch.save(content, temporary)
    temporary.rename(path)
    return path


def load_rollout_dump(
    path_template: str, rollout_id: int | str, *, subsample: float | None = None
) -> list[Sample]:
    """The samples of a dump, or its first `subsample` share. A file with code in it is refused."""
    path = dump_path(path_template, rollout_id)
    if not path.exists():
        raise FileNotFoundError(f"--load-debug-rollout-data: {path} does not exist (rollout {rollout_id}).")
    content = load_torch_file(path)
    if not isinstance(content, dict) or "samples" not in content:
        raise ValueError(f"--load-debug-rollout-data: {path} is not a rollout dump (no 'samples' in it).")
    try:
        samples = [Sample.from_dict(data) for data in content["samples"]]
    except (TypeError, ValueError, KeyError, AttributeError, LookupError) as error:
        cause = f"{type(error).__name__}: {str(error)[:200]}"
        raise ValueError(
            f"--load-debug-rollout-data: {path} holds something that is no sample ({cause})."
        ) from error
    return samples if subsample is None else samples[: max(1, int(len(samples) * subsample))]
