"""`slime eval`: evaluate a model on data sets without training it (slime/cli/tasks.py)."""

from collections.abc import Sequence
from pathlib import Path

from slime.arguments import Args
from slime.cli.tasks import TASKS, in_columns
from slime.observability.tracking import read_metrics


def main(argv: Sequence[str] | None = None) -> int:
    return TASKS["eval"].main(argv, then=lambda args: print(render_table(args)))


def render_table(args: Args) -> str:
    """Return the last scores of a run's evaluations: a line per data set."""
    last: dict[str, float] = {}
    for row in read_metrics(Path(args.run_dir)):
        last |= row
    rates = sorted({key.partition("-pass@")[2] for key in last if "-pass@" in key}, key=int)
    shown = [k for k in rates if rates != ["1"]]
    rows = [("dataset", "reward", *(f"pass@{k}" for k in shown), "samples", "truncated")]
    for name in (dataset.name for dataset in args.eval_datasets):
        scores = [last.get(f"eval/{name}"), *(last.get(f"eval/{name}-pass@{k}") for k in shown)]
        cells = ["-" if score is None else f"{score:.4g}" for score in scores]
        truncated = f"{last.get(f'eval/{name}-truncated_ratio', 0.0):.1%}"
        rows.append((name, *cells, f"{last.get(f'eval/{name}-samples', 0):.0f}", truncated))
    return in_columns(rows)
