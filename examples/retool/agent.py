"""An agent that may run Python before it answers: `generate` is a --custom-generate-function-path."""

from slime.agent.session import Budget, Session, SessionError
from slime.agent.tools import BoxTools, ToolSet

MAX_TURNS = 3
BUDGET = Budget(max_turns=MAX_TURNS, max_context_tokens=200, max_new_tokens=48)


async def generate(args, sample, sampling_params):
    """Turns until the model answers without a call. Only what it sampled is trained, results are not."""
    session = Session.of_run(args, sample, sampling_params, budget=BUDGET)
    messages = [{"role": "user", "content": sample.prompt}]
    answer = ""
    async with BoxTools(args.sandbox, timeout_s=10) as box:
        tools = ToolSet([box.python], max_chars=60)
        try:
            while True:
                said = await session.turn(messages, tools=tools.schemas)
                messages.append(said.message)
                if not said.tool_calls:
                    answer = said.text
                    break
                messages += await tools.answer(said.tool_calls)
        except SessionError as error:
            session.end(error.outcome, str(error))
    right = float(answer.strip() == sample.label)
    told = {"tool_calls": tools.num_calls, "tool_errors": tools.num_errors}
    return session.samples(sample, reward=right, extra_metadata=told, args=args)
