"""A teacher behind real HTTP: its log-probs land on the sample, and
an answer that does not fit is no score.
"""

from types import SimpleNamespace

import pytest
from aiohttp import web
from patience import PATIENCE_S
from tiny_model import make_tiny_model

from slime.rollout.on_policy_distillation import (
    post_process_rewards,
    reward_func,
    self_reward_func,
    teacher_url,
    zero_reward,
)
from slime.rollout.rm_hub.outcomes import RewardConfigError
from slime.utils import async_utils
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import RewardFailure, Sample

SAMPLE = dict(tokens=[5, 6, 7, 8], response_length=2, index=0, group_index=0)


async def ask(answer, sample, function=reward_func, **more):
    """Serve `answer(payload)` as the teacher and score one sample."""
    seen = []

    async def generate(request):
        payload = await request.json()
        seen.append(payload)
        return web.json_response(answer(payload))

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    args = SimpleNamespace(
        rm_url=f"http://127.0.0.1:{port}/generate", rollout_temperature=1.0, timeouts={"generate": PATIENCE_S}
    )
    vars(args).update(opd_kl="sampled", opd_top_k=2)
    vars(args).update(sglang_router_ip="127.0.0.1", sglang_router_port=port, **more)
    try:
        return await function(args, sample), seen
    finally:
        await runner.cleanup()


def scored(payload, shift=0):
    entries = [
        [None if i == 0 else -0.5 * i, token + shift, None] for i, token in enumerate(payload["input_ids"])
    ]
    return {"meta_info": {"input_token_logprobs": entries}}


def test_the_teachers_log_probs_of_the_response_are_kept_and_the_reward_is_zero():
    sample = Sample(**SAMPLE)
    reward, [payload] = async_utils.run(ask(scored, sample))
    assert reward == 0.0
    assert sample.teacher_log_probs == [-1.0, -1.5]
    assert payload["sampling_params"]["max_new_tokens"] == 0 and payload["logprob_start_len"] == 0


@pytest.mark.parametrize(
    "answer, reason",
    [
        (
            lambda payload: scored({"input_ids": payload["input_ids"][1:]}),
            "3 input_token_logprobs for 4 tokens",
        ),
        (lambda payload: scored(payload, shift=1), "share the policy's tokenizer"),
        (lambda payload: {}, "0 input_token_logprobs"),
    ],
)
def test_an_answer_that_does_not_fit_is_no_score(answer, reason):
    sample = Sample(**SAMPLE)
    reward, _ = async_utils.run(ask(answer, sample))
    assert isinstance(reward, RewardFailure) and reason in reward.reason
    assert sample.teacher_log_probs is None


def with_top(payload, num_entries=2):
    answer = scored(payload)
    rows = [[[-0.1 * k, 10 * i + k, None] for k in range(num_entries)] for i in range(4)]
    answer["meta_info"]["input_top_logprobs"] = [None, *rows[1:]]
    return answer


def test_the_teachers_top_ids_of_the_response_are_kept():
    sample = Sample(**SAMPLE)
    reward, [payload] = async_utils.run(ask(with_top, sample, opd_kl="forward_top_k"))
    assert reward == 0.0 and payload["top_logprobs_num"] == 2 and sample.teacher_log_probs == [-1.0, -1.5]
    assert sample.teacher_top_ids.tolist() == [[20, 21], [30, 31]]
    assert sample.teacher_top_log_probs.tolist() == [[0.0, pytest.approx(-0.1)]] * 2
    again = Sample.from_dict(sample.to_dict())
    assert again.teacher_top_ids is sample.teacher_top_ids
    for answer in (scored, lambda payload: with_top(payload, 1)):
        reward, _ = async_utils.run(ask(answer, sample, opd_kl="reverse_top_k"))
        assert isinstance(reward, RewardFailure) and "not 2 for each" in reward.reason


def test_rewards_beside_a_teacher_are_zero():
    samples = [Sample(**SAMPLE), Sample(**SAMPLE)]
    assert post_process_rewards(None, samples) == ([0.0, 0.0], [0.0, 0.0])
    assert async_utils.run(zero_reward(None, samples[0])) == 0.0


def test_the_metadata_of_a_prompt_names_its_teacher():
    sample = Sample(**SAMPLE, metadata={"teacher": "code"})
    urls = "math=http://one/generate, code=http://two/generate"
    assert teacher_url(urls, sample) == "http://two/generate"
    assert teacher_url("http://one/generate?key=a", sample) == "http://one/generate?key=a"
    sample.metadata = {"teacher": "art"}
    with pytest.raises(RewardConfigError, match=r"the teachers math, code, and .* sample 0 is 'art'"):
        teacher_url(urls, sample)


@pytest.mark.parametrize("chat", [False, True])
def test_the_policy_scores_its_response_behind_a_prompt_that_knows_more(tmp_path, chat):
    folder = str(make_tiny_model(tmp_path / "tiny"))
    tokenizer = load_tokenizer(folder)
    more = dict(hf_checkpoint=folder, apply_chat_template=chat)
    sample = Sample(**SAMPLE, metadata={"teacher_prompt": "1+1? It is 2."})
    reward, [payload] = async_utils.run(ask(scored, sample, self_reward_func, **more))
    text = "1+1? It is 2."
    if chat:
        told = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    assert payload["input_ids"] == [*prompt, 7, 8]
    assert (reward, sample.teacher_log_probs) == (0.0, [-0.5 * (len(prompt) + i) for i in range(2)])
    sample.metadata = {}
    with pytest.raises(RewardConfigError, match=r"sample 0 has no metadata\['teacher_prompt'\]"):
        async_utils.run(ask(scored, sample, self_reward_func, **more))
