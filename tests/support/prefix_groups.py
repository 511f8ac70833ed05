"""Samples that begin alike in the ways that samples do: prompts, system prompts, answers, turns."""

import torch

from slime.utils.types import Sample


def families_of_samples(groups, *, vocab=128, seed=0):
    """`groups`: for each prompt its length (or itself) and the lengths of its answers (or themselves)."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(wanted):
        made = (
            torch.randint(4, vocab, (wanted,), generator=generator).tolist()
            if type(wanted) is int
            else wanted
        )
        return list(made)

    samples = []
    for number, (prompt, answers) in enumerate(groups):
        prompt = tokens(prompt)
        for answer in map(tokens, answers):
            sample = Sample(group_index=number, index=len(samples), tokens=prompt + answer)
            sample.response_length, sample.status = len(answer), Sample.Status.COMPLETED
            sample.reward = float(torch.rand((), generator=generator))
            sample.rollout_log_probs = [-1.0] * len(answer)
            samples.append(sample)
    return samples


GROUPS = [(7, [3, 5, 1, 4]), (1, [2, 2]), (9, [6]), (12, [1, 1, 8])]
SYSTEM = range(20, 29)
# Prompts that begin alike; answers that begin alike, are the same or go on from another; and the second turn
# of an agent, whose prompt is the prompt and answer of its first.
TURN = [*SYSTEM, 40, 41, 50, 51, 52, 60]
ALIKE = [
    ([*SYSTEM, 40, 41], [[50, 51, 52], [50, 51, 52], [50, 51, 53], [50], [50, 51, 52, 53, 54], [55, 51]]),
    (TURN, [[61, 62], [61, 63, 64], 4]),
    ([*SYSTEM, 42], [[50, 51, 52], 5]),
    (6, [2]),
]
LONG_PROMPTS = [(70, [3, 5, 1, 4]), (64, [2, 30]), (9, [6]), (80, [1, 1, 8])]
