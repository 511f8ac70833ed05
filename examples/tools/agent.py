"""An agent with one tool: the model may write <calc>2 * 21</calc> and reads the result before it goes on.

`generate` is a --custom-generate-function-path, `reward` a --custom-rm-path. The conversation is kept as
token ids: what the model wrote is never tokenised again, and what the tool wrote is not trained on.
"""

from slime.agent.tools import ToolError, calculator
from slime.rollout.sglang_rollout import GenerateState
from slime.rollout.sglang_rollout import generate as ask_engine
from slime.utils.types import Sample

MAX_TURNS = 4
CALL, END = "<calc>", "</calc>"


async def generate(args, sample, sampling_params):
    """Turns until the model stops without a call, has had MAX_TURNS, or is out of room."""
    tokenizer = GenerateState(args).tokenizer
    params = {**sampling_params, "stop": [END], "no_stop_trim": True}
    for turn in range(MAX_TURNS):
        before = sample.response_length
        sample = await ask_engine(args, sample, params)
        text = tokenizer.decode(sample.tokens[len(sample.tokens) - sample.response_length + before :])
        sample.metadata["turns"] = turn + 1
        if sample.status != Sample.Status.COMPLETED or END not in text or turn + 1 == MAX_TURNS:
            return sample
        result = f"\n<result>{calculate(text.partition(CALL)[2].partition(END)[0])}</result>\n"
        tokens = tokenizer.encode(result, add_special_tokens=False)
        sample.append_response_tokens(args, tokens=tokens, trainable=False, text=result)
        sample.status = Sample.Status.PENDING  # so that the engine is asked again


def reward(args, sample):
    """1 for an answer that ends in the label; a tenth less for each turn beyond the second."""
    last = sample.response.rpartition("</result>")[2]
    words = last.replace("<|im_end|>", " ").replace(".", " . ").split()
    right = bool(words) and sample.label in words[-3:]
    return float(right) - 0.1 * max(0, sample.metadata.get("turns", 1) - 2) * right


def calculate(text):
    """The value of an arithmetic expression, or an error, as text for the model."""
    try:
        return calculator(text)
    except ToolError as error:
        return f"error: {error}"
