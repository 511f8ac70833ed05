"""The order of prompts within an epoch: by pass rate, by a column, or by a function of the user.

An order is decided when its epoch begins and visits every prompt once. It is part of the data source's state,
as are the pass rates, so a resumed run continues with the same prompts.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from slime.arguments import PluginArgs
from slime.data.dataset import Dataset
from slime.rollout.prompt_groups import Group
from slime.utils.misc import load_function
from slime.utils.plugin_errors import plugin_call, wrong_return
from slime.utils.types import Sample, flatten_samples

PROMPT_KEY = "prompt_number"  # of Sample.metadata: the prompt's place in the files
DIFFICULTY_KEY = "difficulty"


class Curriculum:
    """Orders the epochs of one dataset, and keeps the mean reward of each prompt's latest group."""

    def __init__(self, args: PluginArgs, path: str, dataset: Dataset) -> None:
        self.args, self.path, self.dataset = args, path, dataset
        self.pass_rates: dict[int, float] = {}

    def order_epoch(self, epoch: int) -> None:
        """Reorder the dataset, which has the order of an epoch without a curriculum."""
        before = list(self.dataset.order)
        rates = [self.pass_rates.get(number) for number in before]
        with plugin_call("--curriculum", self.path, lambda: f"epoch {epoch}"):
            places = list(load_function(self.path)(self.args, epoch, self.dataset.samples, rates))
            if sorted(places) != list(range(len(before))):
                complaint = f"returned {len(places)} places; return each of 0 to {len(before) - 1} once."
                wrong_return("--curriculum", self.path, complaint)
        self.dataset.order = [before[place] for place in places]

    def scored(self, groups: Iterable[Group]) -> None:
        """Note the rewards of groups that are finished."""
        for group in groups:
            samples = [sample for sample in flatten_samples(group) if sample.reward is not None]
            numbers = [sample.metadata.get(PROMPT_KEY) for sample in samples]
            if samples and numbers[0] is not None:
                rewards = [float(sample.get_reward_value(self.args)) for sample in samples]
                self.pass_rates[numbers[0]] = sum(rewards) / len(rewards)

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.dataset.order), "pass_rates": list(self.pass_rates.items())}

    def load_state_dict(self, state: dict[str, Any], epoch: int) -> None:
        """Restore the epoch's order; one of other prompts, or of a run without a curriculum, is made anew."""
        self.pass_rates = dict(map(tuple, state.get("pass_rates", ())))
        if sorted(state.get("order", ())) == sorted(self.dataset.order):
            self.dataset.order = list(state["order"])
        else:
            self.order_epoch(epoch)


def by_pass_rate(
    args: PluginArgs, epoch: int, samples: Sequence[Sample], pass_rates: Sequence[float | None]
) -> list[int]:
    """Put prompts with the most to learn first: rewards are between 0 and 1, and 0.5 is the best rate.

    A prompt without a rate counts as one of 0.5.
    """
    distances = [0.0 if rate is None else abs(rate - 0.5) for rate in pass_rates]
    return sorted(range(len(samples)), key=distances.__getitem__)


def by_difficulty(
    args: PluginArgs, epoch: int, samples: Sequence[Sample], pass_rates: Sequence[float | None]
) -> list[int]:
    """Put prompts in ascending order of metadata["difficulty"]."""
    for number, sample in enumerate(samples):
        if not isinstance(sample.metadata.get(DIFFICULTY_KEY), int | float):
            found = sample.metadata.get(DIFFICULTY_KEY)
            raise ValueError(
                f"prompt {number} of epoch {epoch} has metadata[{DIFFICULTY_KEY!r}] = {found!r}, not a "
                f"number: --curriculum difficulty needs one for each (--metadata-columns {DIFFICULTY_KEY})."
            )
    return sorted(range(len(samples)), key=lambda place: samples[place].metadata[DIFFICULTY_KEY])
