"""Curricula: the rows of `--curriculum`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Curriculum:
    """One order of the prompts of an epoch. `function` returns the places of the prompts in that order."""

    function: str
    help: str


CURRICULA: dict[str, Curriculum] = {
    "pass_rate": Curriculum(
        "slime.rollout.curriculum.by_pass_rate",
        "prompts that are solved now and then first, prompts that are always or never solved last",
    ),
    "difficulty": Curriculum(
        "slime.rollout.curriculum.by_difficulty", "ascending by the column `difficulty` of the metadata"
    ),
}
