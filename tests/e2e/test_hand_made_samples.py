"""A generate function in the style of slime's examples:
it posts to /generate and sets a sample's fields by hand.
"""

import pytest
from loop_helpers import make_world, run_train, series

GENERATE = """
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, sample, sampling_params):
    tokenizer = GenerateState(args).tokenizer
    prompt = tokenizer.encode(sample.prompt)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    request = {"input_ids": prompt, "sampling_params": sampling_params, "return_logprob": True}
    answer = await post(url, request)
    made = answer["meta_info"]["output_token_logprobs"]
    sample.tokens = prompt + [entry[1] for entry in made]
    sample.response_length = len(made)
    sample.response = tokenizer.decode(sample.tokens[len(prompt) :])
    sample.rollout_log_probs = [entry[0] for entry in made]
    sample.loss_mask = [1] * len(made)
    sample.status = Sample.Status.COMPLETED
    return sample
"""


@pytest.mark.slow
def test_hand_made_samples_of_older_weights_are_compared_as_such_and_the_driver_tells(tmp_path):
    world = make_world(tmp_path)
    (world / "by_hand.py").write_text(GENERATE)
    own = {"custom_generate_function_path": f"{world}/by_hand.py:generate", "script": "train_async.py"}
    done = run_train(world, "run", num_rollout=2, no_use_tis=True, **own)
    assert series(world, "run", "train/logprob_abs_diff/lag_0")[0] < 1e-5
    assert series(world, "run", "train/staleness/lag_1") == {1: 1.0}
    told = [line for line in done.stderr.splitlines() if "were sampled by older weights" in line]
    assert len(told) == 1 and "1.0 versions behind" in told[0] and "--use-tis" in told[0]
