"""A made-up world: people work in towns, and towns lie in lands. Its documents are all that is known.

A question needs one document ("town of bado") or two ("land of bado": where bado works, and where that lies).
"""

import itertools
import random
from functools import cache

SYLLABLES = tuple(first + second for first in "bdklmnprst" for second in "aeiou")
TRADES = (" bakes bread in ", " mends boats in ", " sells books in ")
LIES = " lies in "
NUM_LANDS, NUM_TOWNS, NUM_PEOPLE = 20, 200, 600


class World:
    """Who works where, and what lies where; the same seed gives the same world."""

    def __init__(self, seed: int = 7) -> None:
        rng = random.Random(seed)
        names = ["".join(pair) for pair in itertools.product(SYLLABLES, repeat=2)]
        rng.shuffle(names)
        self.lands, names = names[:NUM_LANDS], names[NUM_LANDS:]
        self.towns, names = names[:NUM_TOWNS], names[NUM_TOWNS:]
        self.people = names[:NUM_PEOPLE]
        self.land_of = {town: rng.choice(self.lands) for town in self.towns}
        self.town_of = {person: rng.choice(self.towns) for person in self.people}
        self.trade_of = {person: rng.choice(TRADES) for person in self.people}

    def document_of(self, name: str) -> str:
        if name in self.land_of:
            return f"{name}{LIES}{self.land_of[name]}"
        return f"{name}{self.trade_of[name]}{self.town_of[name]}"

    def answer(self, question: str) -> str:
        kind, _, person = question.partition(" of ")
        town = self.town_of[person]
        return town if kind == "town" else self.land_of[town]


@cache
def corpus():
    """The index of the world that is asked about; one for all episodes of a process."""
    from slime.agent.tools import Corpus

    world = World()
    return Corpus([world.document_of(name) for name in (*world.towns, *world.people)])
