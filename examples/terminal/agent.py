"""An agent at a shell: it runs commands until it says that it is done, and tests read the files it left.

`generate` is a --custom-generate-function-path; `generate_by_chance` is the control, whose training reward
is drawn at random.
"""

import random

from slime.agent.session import Budget, Session
from slime.agent.tools import BoxTools, ToolSet, answer_with_tools

BUDGET = Budget(max_turns=4, max_context_tokens=160, max_new_tokens=32)


async def generate(args, sample, sampling_params):
    session = Session.of_run(args, sample, sampling_params, budget=BUDGET)
    async with BoxTools(args.sandbox, timeout_s=20) as tools_of_box:
        box = await tools_of_box.box()
        for name, text in sample.label["files"].items():
            await box.write_file(f"{box.workdir}/{name}", text)
        tools = ToolSet([tools_of_box.shell], max_chars=40)
        await answer_with_tools(session, [{"role": "user", "content": sample.prompt}], tools)
        tests = sample.label["tests"]
        passed = [await box.read_file(f"{box.workdir}/{name}") == text for name, text in tests.items()]
    reward = sum(passed) / len(passed)
    return session.samples(sample, reward=reward, extra_metadata={"solved": float(all(passed))}, args=args)


async def generate_by_chance(args, sample, sampling_params, evaluation=False):
    samples = await generate(args, sample, sampling_params)
    if not evaluation:
        rng = random.Random(sample.index)
        for one in samples:
            one.reward = float(rng.random() < 0.5)
    return samples
