"""The metrics that a quick start looks at."""

from typing import Any

from slime.cli.quickstart.task_files import GREEDY, SAMPLED

LOSS = "train/loss"
REWARD = "rollout/raw_reward"
NUM_SAMPLES = "rollout/num_samples"
WEIGHT_VERSION = "rollout/weight_version"
ACCURACY = {"greedy": f"eval/{GREEDY}", "sampled": f"eval/{SAMPLED}"}

Record = dict[str, Any]


def values_by_step(records: list[Record], key: str) -> dict[int, float]:
    """One metric over the steps at which it was logged; of a step logged twice, the later value counts."""
    return {int(record["step"]): record[key] for record in records if key in record}
