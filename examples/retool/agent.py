"""An agent that may run Python before it answers: `generate` is a --custom-generate-function-path."""

from slime.agent.session import Budget, Session
from slime.agent.tools import BoxTools, ToolSet, answer_with_tools

MAX_TURNS = 3
BUDGET = Budget(max_turns=MAX_TURNS, max_context_tokens=200, max_new_tokens=48)


async def generate(args, sample, sampling_params):
    """Turns until the model answers without a call. Only what it sampled is trained, results are not."""
    session = Session.of_run(args, sample, sampling_params, budget=BUDGET)
    async with BoxTools(args.sandbox, timeout_s=10) as box:
        tools = ToolSet([box.python], max_chars=60)
        answer = await answer_with_tools(session, [{"role": "user", "content": sample.prompt}], tools)
    right = float(answer.strip() == sample.label)
    return session.samples(sample, reward=right, extra_metadata=tools.counts, args=args)
