"""An agent that repairs a small project: one of its files is wrong, and its tests say which call fails.

`generate` is a --custom-generate-function-path; `generate_by_chance` is the control, whose training reward is
drawn at random. Files, edits and tests are in a sandbox; the tests that score also have hidden calls.
"""

import random

from slime.agent.session import Budget, Session
from slime.agent.tools import BoxTools, ToolSet, answer_with_tools

BUDGET = Budget(max_turns=6, max_context_tokens=300, max_new_tokens=40)
COST_OF_AN_EDIT, SECONDS = 0.25, 20.0
# Prints the first call that fails, with its right value, and the file that it is in.
TESTS = """import importlib
for file, a, b, right in {cases!r}:
    try:
        found = importlib.import_module(file[:-3]).f(a, b)
    except Exception as error:
        found = error
    if found != right:
        print(f"{{file}} f({{a}},{{b}})={{right}}")
        break
else:
    print("passed")
"""


async def generate(args, sample, sampling_params):
    session = Session.of_run(args, sample, sampling_params, budget=BUDGET)
    shown, hidden = sample.label["shown"], sample.label["hidden"]
    edits = 0
    async with BoxTools(args.sandbox, timeout_s=SECONDS) as files:
        box = await files.box()
        for name, source in sample.label["files"].items():
            await box.write_file(f"{box.workdir}/{name}", source)

        async def result(cases) -> str:
            await box.write_file(f"{box.workdir}/tests.py", TESTS.format(cases=cases))
            command = f"cd {box.workdir} && python3 -B tests.py"
            return (await box.exec(command, timeout=SECONDS, user="agent"))[1].strip()

        async def edit_file(path: str, old: str, new: str) -> str:
            """Replaces one piece of a file."""
            nonlocal edits
            edits += 1
            return await files.edit_file(path, old, new)

        async def run_tests() -> str:
            """Runs the tests: the first call that fails, or passed."""
            return await result(shown)

        tools = ToolSet([edit_file, run_tests], max_chars=80)
        await answer_with_tools(session, [{"role": "user", "content": sample.prompt}], tools)
        repaired = edits > 0 and await result([*shown, *hidden]) == "passed"
    reward = repaired * max(0.25, 1 - COST_OF_AN_EDIT * max(0, edits - 1))
    told = {"repaired": float(repaired), "edits": edits, **tools.counts}
    return session.samples(sample, reward=reward, extra_metadata=told, args=args)


async def generate_by_chance(args, sample, sampling_params, evaluation=False):
    samples = await generate(args, sample, sampling_params)
    if not evaluation:
        rng = random.Random(sample.index)
        for one in samples:
            one.reward = float(rng.random() < 0.5)
    return samples
