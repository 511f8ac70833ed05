"""Does an engine in FP8 stay with the policy that it is given? The log-prob
difference of engine and trainer over pushes.

The same GRPO run (colocated_grpo.py), once in 16 bit and then with FP8 engines: from an FP8 folder and from
16-bit weights, with weights rounded to the nearest FP8 value and stochastically. A difference that grows with
the number of pushes is a policy that the engine does not have. Every push is compared with a load of the same
weights from files, so what grows is the rounding.

    python benchmarks/fp8_drift.py --shape 0.6b --engine sglang --sglang-python PATH    # one GPU
    python benchmarks/fp8_drift.py --shape tiny --steps 4                               # any machine
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from slime.cli.main import USER_MISTAKE

CASES = {
    "16-bit": [],
    "fp8-start-nearest": ["--fp8-folder", "--fp8-rounding", "nearest"],
    "fp8-start-stochastic": ["--fp8-folder", "--fp8-rounding", "stochastic"],
    "16-bit-start-nearest": ["--rollout-quantization", "fp8", "--fp8-rounding", "nearest"],
    "16-bit-start-stochastic": ["--rollout-quantization", "fp8", "--fp8-rounding", "stochastic"],
}
COLUMNS = {"|logp diff|": "train/train_rollout_logprob_abs_diff", "reward": "rollout/raw_reward"}


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/fp8_drift.json"))
    return parser.parse_known_args()


def measure(name: str, extra: list[str], folder: Path) -> list[dict[str, float]]:
    """The steps of one run. It may end with an exit status of 1: that
    only says that the reward has not moved.
    """
    result = folder / f"{name}.json"
    words = [*CASES[name], "--check-weight-update-equal", "--logprob-diff-threshold", "0", *extra]
    script = str(Path(__file__).with_name("colocated_grpo.py"))
    done = subprocess.run([sys.executable, script, "--json", str(result), *words], check=False)
    if done.returncode == USER_MISTAKE:
        sys.exit(USER_MISTAKE)  # the other runs have the same flags
    return json.loads(result.read_text())["steps"] if result.is_file() else []


def main() -> int:
    options, extra = parse()
    rows: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.cases:
            rows[name] = measure(name, extra, Path(folder))
    for title, column in COLUMNS.items():
        print(f"\n{title}")
        for name, steps in rows.items():
            values = " ".join(f"{step[column]:8.4f}" for step in steps if column in step)
            print(f"  {name:24s} {values or 'the run failed'}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"flags": extra, "cases": rows}, indent=1) + "\n")
    return 0 if all(rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
