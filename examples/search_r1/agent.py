"""An agent that may search before it answers: `generate` is a --custom-generate-function-path."""

import sys
from pathlib import Path

from slime.agent.session import Budget, Session
from slime.agent.tools import ToolSet, answer_with_tools

sys.path.insert(0, str(Path(__file__).parent))
import world

BUDGET = Budget(max_turns=4, max_context_tokens=200, max_new_tokens=24)


def search(query: str) -> str:
    """The document that fits a query best."""
    return world.corpus().search(query, num_results=1)


async def generate(args, sample, sampling_params):
    session = Session.of_run(args, sample, sampling_params, budget=BUDGET)
    tools = ToolSet([search], max_chars=60)
    answer = await answer_with_tools(session, [{"role": "user", "content": sample.prompt}], tools)
    right = float(answer.strip() == sample.label)
    return session.samples(sample, reward=right, extra_metadata=tools.counts, args=args)
