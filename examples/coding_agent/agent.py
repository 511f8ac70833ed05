"""An agent that repairs a function: it edits the file, runs the tests, and may edit once more.

`generate` is a --custom-generate-function-path. Everything happens in a sandbox: the file lies there, the
edits are made there, and the tests that give the reward run there, those that the model never saw included.
"""

from slime.agent.rewards.code import Checks, count_passed
from slime.agent.session import Budget, Session
from slime.agent.tools import BoxTools, ToolSet, answer_with_tools

BUDGET = Budget(max_turns=6, max_context_tokens=360, max_new_tokens=40)
MAX_EDITS, COST_OF_AN_EDIT = 2, 0.25
SECONDS = 20.0


async def generate(args, sample, sampling_params):
    session = Session.of_run(args, sample, sampling_params, budget=BUDGET)
    shown, hidden = sample.label["shown"], sample.label["hidden"]
    edits = 0
    async with BoxTools(args.sandbox, timeout_s=SECONDS) as files:
        box = await files.box()
        await box.write_file("/work/f.py", sample.label["source"])

        async def passes(asserts):
            source = await box.read_file("/work/f.py")
            return await count_passed(box, source, Checks(asserts=tuple(asserts)), SECONDS) == len(asserts)

        async def edit_file(path: str, old: str, new: str) -> str:
            """Replaces one piece of a file."""
            nonlocal edits
            edits += 1
            return await files.edit_file(path, old, new) if edits <= MAX_EDITS else "no more edits"

        async def run_tests() -> str:
            """Says whether the tests pass."""
            return "passed" if await passes(shown) else "failed"

        tools = ToolSet([edit_file, run_tests], max_chars=80)
        await answer_with_tools(session, [{"role": "user", "content": sample.prompt}], tools)
        repaired = edits > 0 and await passes([*shown, *hidden])
    reward = repaired * (1 - COST_OF_AN_EDIT * max(0, edits - 1))
    told = {"repaired": float(repaired), "edits": edits, "tool_errors": tools.num_errors}
    return session.samples(sample, reward=reward, extra_metadata=told, args=args)
