"""Filters for `--buffer-filter-path`: which returned groups are handed out again first."""

from slime.arguments import PluginArgs
from slime.rollout.prompt_groups import Group, first_sample

PRIORITY_KEY = "priority"  # of Sample.metadata, a number; a prompt without one has 0


def pop_by_priority(
    args: PluginArgs, rollout_id: int | None, buffer: list[Group], num_samples: int
) -> list[Group]:
    """Remove and return the groups of the highest metadata["priority"], the oldest first among equals.

    In fully asynchronous runs --max-weight-staleness bounds the age of their tokens, as with every filter.
    """
    ranked = sorted(range(len(buffer)), key=lambda i: -first_sample(buffer[i]).metadata.get(PRIORITY_KEY, 0))
    chosen = sorted(ranked[:num_samples], key=ranked.index)
    taken = [buffer[place] for place in chosen]
    for place in sorted(chosen, reverse=True):
        del buffer[place]
    return taken
