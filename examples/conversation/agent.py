"""A clerk who talks to a customer and books what the customer wants.

`generate` is a --custom-generate-function-path. The customer is another model of the topology, with frozen
weights. The reward is 1 if the bookings are exactly the wish, which the clerk only learns by asking.
"""

import random

from slime.agent.engine_access import EnginePolicy
from slime.agent.rendering import Renderer
from slime.agent.session import Budget, Session, SessionError
from slime.agent.tools import ToolSet
from slime.rollout.sglang_rollout import get_model_url
from slime.utils.processing_utils import load_tokenizer

BUDGET = Budget(max_turns=6, max_context_tokens=200, max_new_tokens=32)
NO_MORE = "bye"  # the clerk ends the conversation


def customer_of(args) -> Session:
    """The conversation as the customer sees it; nothing of it is trained."""
    renderer = Renderer(load_tokenizer(args.hf_checkpoint))
    sampling = {"temperature": 1.0, "max_new_tokens": 12}
    return Session(EnginePolicy(get_model_url(args, "customer", endpoint="")), renderer, sampling=sampling)


async def generate(args, sample, sampling_params):
    bookings = []

    async def book(item: str, count: str) -> str:
        """Books so many of an item."""
        bookings.append([item, count])
        return "booked"

    clerk = Session.of_run(args, sample, sampling_params, budget=BUDGET)
    customer, tools = customer_of(args), ToolSet([book], max_chars=80)
    wish = await customer.turn([{"role": "user", "content": sample.prompt}])
    heard, answer, questions = wish.text, None, 0
    try:
        while True:
            new = [{"role": "user", "content": heard}]
            answer = await clerk.turn(new, tools=tools.schemas, after=answer)
            while answer.tool_calls:
                answer = await clerk.turn(
                    await tools.answer(answer.tool_calls), tools=tools.schemas, after=answer
                )
            if NO_MORE in answer.text:
                break
            questions += 1
            wish = await customer.turn([{"role": "user", "content": answer.text}], after=wish)
            heard = wish.text
    except SessionError as error:
        clerk.end(error.outcome, str(error))
    right = float(bookings == [sample.label])
    told = {"right": right, "questions": questions, **tools.counts}
    return clerk.samples(sample, reward=right, extra_metadata=told, args=args)


async def generate_by_chance(args, sample, sampling_params, evaluation=False):
    """The control: rewards of training are drawn at random."""
    samples = await generate(args, sample, sampling_params)
    if not evaluation:
        rng = random.Random(sample.index)
        for one in samples:
            one.reward = float(rng.random() < 0.5)
    return samples
