"""What every engine behind the protocol must do, checked over real HTTP against a plain forward pass."""

import asyncio
import json
from dataclasses import replace

import aiohttp
import pytest
from devices import CLOSE
from engine_under_test import CONTEXT, VOCAB, largest_difference, met, plain_log_probs

from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.http_utils import HttpError
from slime.utils.top_p import from_meta, wrong_with
from slime.wire.client import EngineClient
from slime.wire.protocol import Generation

PROMPT = [10, 20, 30, 40, 50]
LONG_PROMPT = [(7 * i + i * i) % 96 + 4 for i in range(300)]


# -- log-probs and sampling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7, 0.0])
def test_log_probs_are_those_of_the_temperature_scaled_forward_pass(engine, old_model, temperature):
    made = engine.generate(PROMPT, temperature=temperature, max_new_tokens=40, ignore_eos=True)
    assert len(made.ids) == len(made.log_probs) == 40
    assert (
        largest_difference(made.log_probs, plain_log_probs(old_model, PROMPT, made.ids, temperature)) < CLOSE
    )


def test_log_probs_under_filters_are_still_those_of_the_full_distribution(engine, old_model):
    made = engine.generate(
        PROMPT, temperature=0.8, top_p=0.7, top_k=9, min_p=0.05, max_new_tokens=40, ignore_eos=True
    )
    assert largest_difference(made.log_probs, plain_log_probs(old_model, PROMPT, made.ids, 0.8)) < CLOSE


def test_a_scored_input_comes_with_its_most_likely_ids(engine, old_model):
    import torch

    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}}
    body |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 7}
    first, *rows = engine.post("generate", body)["meta_info"]["input_top_logprobs"]
    assert not first and len(rows) == len(PROMPT) - 1
    with torch.inference_mode():
        dist = torch.log_softmax(old_model(torch.tensor([PROMPT])).logits[0, :-1].float(), -1)
    values, ids = dist.topk(7, -1)
    assert [[entry[1] for entry in row] for row in rows] == ids.tolist()
    assert largest_difference([entry[0] for row in rows for entry in row], values.flatten().tolist()) < CLOSE


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_can_tells_what_each_token_was_drawn_from(engine, old_model, stream):
    import torch

    engine.need(engine.can.dialect.reports_nucleus, "to tell what it draws from")
    sampling = dict(temperature=0.8, top_p=0.7, top_k=60, min_p=0.01, max_new_tokens=40, ignore_eos=True)
    sampling |= {"sampling_seed": 3} if engine.can.has_seeds else {}
    request = engine.request(PROMPT, **sampling, return_top_p_token_ids=True)

    async def last_event():
        events = http_utils.stream(f"{engine.url}/generate", replace(request, stream=True).to_json())
        return [event async for event in events][-1]

    made = Generation.from_json(run(last_event())) if stream else run(engine.client.generate(request))
    assert not engine.can.has_seeds or made.ids == engine.generate(PROMPT, **sampling).ids
    ids, bounds = from_meta(made.meta)
    assert wrong_with(ids, bounds, made.ids, VOCAB) is None
    with torch.inference_mode():
        logits = old_model(torch.tensor([[*PROMPT, *made.ids]])).logits[0, len(PROMPT) - 1 : -1] / 0.8
    for row, (token, found) in enumerate(zip(made.ids, made.log_probs, strict=True)):
        kept = ids[bounds[row] : bounds[row + 1]].tolist()
        assert 0 < len(kept) < VOCAB
        expected = torch.log_softmax(logits[row, kept].double(), 0)[kept.index(token)]
        assert abs(found - expected) < 1e-4


def test_a_long_prompt_over_many_pages_has_right_log_probs(engine, old_model):
    made = engine.generate(LONG_PROMPT, max_new_tokens=30, ignore_eos=True)
    assert largest_difference(made.log_probs, plain_log_probs(old_model, LONG_PROMPT, made.ids)) < CLOSE


def test_greedy_takes_the_most_likely_token(engine, old_model):
    import torch

    made = engine.generate(PROMPT, temperature=0.0, max_new_tokens=20, ignore_eos=True)
    with torch.inference_mode():
        logits = old_model(torch.tensor([[*PROMPT, *made.ids]])).logits[0, len(PROMPT) - 1 : -1]
    assert logits.argmax(-1).tolist() == list(made.ids)


@pytest.mark.parametrize("filter_", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_a_filter_that_leaves_one_token_is_greedy(engine, filter_):
    greedy = engine.generate(PROMPT, temperature=0.0, max_new_tokens=20, ignore_eos=True)
    assert (
        engine.generate(PROMPT, temperature=1.0, max_new_tokens=20, ignore_eos=True, **filter_).ids
        == greedy.ids
    )


def test_top_k_draws_only_from_the_best(engine, old_model):
    import torch

    made = engine.generate(PROMPT, temperature=1.5, top_k=3, max_new_tokens=60, ignore_eos=True)
    with torch.inference_mode():
        logits = old_model(torch.tensor([[*PROMPT, *made.ids]])).logits[0, len(PROMPT) - 1 : -1]
    best = logits.topk(3).indices.tolist()
    assert all(token in allowed for token, allowed in zip(made.ids, best, strict=True))
    assert len({allowed.index(token) for token, allowed in zip(made.ids, best, strict=True)}) == 3


def test_the_same_seed_gives_the_same_tokens_alone_and_among_others(engine):
    alone = engine.generate(PROMPT, sampling_seed=7, max_new_tokens=40, ignore_eos=True)

    async def crowd():
        others = [
            engine.agenerate(
                [5 + i] * (i + 3), temperature=0.5 + i / 10, max_new_tokens=30 + i, ignore_eos=True
            )
            for i in range(7)
        ]
        results = await asyncio.gather(
            *others, engine.agenerate(PROMPT, sampling_seed=7, max_new_tokens=40, ignore_eos=True)
        )
        return results[-1]

    assert run(crowd()).ids == alone.ids


def test_another_seed_and_no_seed_give_other_tokens(engine):
    sampling = {"temperature": 1.5, "max_new_tokens": 30, "ignore_eos": True}
    seen = {engine.generate(PROMPT, sampling_seed=seed, **sampling).ids for seed in (1, 2, -3, None, None)}
    assert len(seen) == 5


def test_a_seeded_request_resumed_from_its_own_prefix_continues_the_same(engine):
    whole = engine.generate(PROMPT, sampling_seed=11, max_new_tokens=30, ignore_eos=True)
    rest = engine.generate([*PROMPT, *whole.ids[:12]], sampling_seed=11, max_new_tokens=18, ignore_eos=True)
    assert whole.ids[12:] == rest.ids


# -- the answer ----------------------------------------------------------------------------------------------


def test_an_answer_has_the_shape_that_sglang_gives(engine):
    payload = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 6, "ignore_eos": True},
        "return_logprob": True,
    }
    answer = engine.post("generate", {**payload, "rid": "my-rid"})
    meta = answer["meta_info"]
    assert set(answer) >= {"text", "output_ids", "meta_info"} and isinstance(answer["text"], str)
    assert meta["id"] == "my-rid"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["prompt_tokens"] == 5 and meta["completion_tokens"] == 6 and meta["cached_tokens"] == 0
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 6}]
    assert [i for _, i, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(text is None and log_prob <= 0 for log_prob, _, text in meta["output_token_logprobs"])


def test_without_return_logprob_there_are_none(engine):
    answer = engine.post("generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}})
    assert "output_token_logprobs" not in answer["meta_info"] and answer["output_ids"]


def test_a_batch_answers_in_order_with_n_for_each_prompt(engine):
    params = {"max_new_tokens": 3, "n": 2, "ignore_eos": True, "temperature": 1.5}
    answers = engine.post("generate", {"input_ids": [[5, 6], [7, 8, 9]], "sampling_params": params})
    assert [a["meta_info"]["prompt_tokens"] for a in answers] == [2, 2, 3, 3]
    assert answers[0]["output_ids"] != answers[1]["output_ids"]


def test_a_stop_token_ends_the_answer_and_stays_in_its_ids(engine):
    free = engine.generate(PROMPT, temperature=0.0, max_new_tokens=30, ignore_eos=True)
    stop = free.ids[9]
    made = engine.generate(PROMPT, temperature=0.0, max_new_tokens=30, stop_token_ids=(stop,))
    first = free.ids.index(stop)
    assert made.ids == free.ids[: first + 1]
    assert made.finish == "stop" and made.finish_detail["matched"] == stop


def test_a_stop_string_ends_the_answer_and_leaves_the_text(engine):
    free = engine.generate(PROMPT, temperature=0.0, max_new_tokens=40, ignore_eos=True)
    stop = free.text[10:13]
    made = engine.generate(
        PROMPT, temperature=0.0, max_new_tokens=40, ignore_eos=True, stop=(stop, "never there")
    )
    assert made.finish == "stop" and made.finish_detail["matched"] == stop
    assert made.text == free.text[: free.text.index(stop)]
    assert made.ids == free.ids[: len(made.ids)] and len(made.ids) < 40
    untrimmed = engine.generate(
        PROMPT, temperature=0.0, max_new_tokens=40, ignore_eos=True, stop=(stop,), no_stop_trim=True
    )
    assert untrimmed.text == made.text + stop


def test_min_new_tokens_holds_a_stop_token_back(engine):
    greedy = engine.generate(PROMPT, temperature=0.0, max_new_tokens=1)
    made = engine.generate(
        PROMPT, temperature=0.0, max_new_tokens=10, min_new_tokens=4, stop_token_ids=(greedy.ids[0],)
    )
    assert len(made.ids) >= 4 and greedy.ids[0] not in made.ids[:3]


def test_max_new_tokens_is_clamped_to_the_context_or_refused(engine):
    if not engine.is_strict:
        with pytest.raises(HttpError, match="context") as error:
            engine.generate(LONG_PROMPT, max_new_tokens=100_000, ignore_eos=True)
        assert error.value.status == 400
        return
    made = engine.generate(LONG_PROMPT, max_new_tokens=100_000, ignore_eos=True)
    assert made.finish == "length" and 0 < len(made.ids) <= CONTEXT - len(LONG_PROMPT)


def test_zero_new_tokens_is_an_empty_answer(engine):
    made = engine.generate(PROMPT, max_new_tokens=0)
    assert made.ids == () and made.finish == "length" and made.spans == ()


def test_a_stream_is_cumulative_and_ends_with_done(engine):
    async def read():
        payload = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 20, "temperature": 0.0, "ignore_eos": True},
            "stream": True,
            "return_logprob": True,
        }
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{engine.url}/generate", json=payload, headers=engine.headers) as response,
        ):
            assert response.headers["Content-Type"].startswith("text/event-stream")
            return (await response.text()).strip().split("\n\n")

    *events, done = run(read())
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    whole = engine.generate(PROMPT, max_new_tokens=20, temperature=0.0, ignore_eos=True)
    assert done == "data: [DONE]" and len(chunks) > 1
    for chunk in chunks:
        count = len(chunk["output_ids"])
        assert tuple(chunk["output_ids"]) == whole.ids[:count]
        assert len(chunk["meta_info"]["output_token_logprobs"]) == count
    assert [c["meta_info"]["finish_reason"] is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
    assert tuple(chunks[-1]["output_ids"]) == whole.ids and chunks[-1]["text"] == whole.text


# -- groups --------------------------------------------------------------------------------------------------


async def ask_together(engine, requests):
    """The answers, and in how many HTTP requests they were asked for."""
    posted, post, stream = [], http_utils.post, http_utils.stream
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_utils, "post", lambda url, *a, **k: posted.append(url) or post(url, *a, **k))
        patch.setattr(http_utils, "stream", lambda url, *a, **k: posted.append(url) or stream(url, *a, **k))
        answers = await asyncio.gather(*map(engine.client.generate, requests))
    return answers, sum(url.endswith("/generate") for url in posted)


def test_a_group_travels_as_one_request_with_the_answers_of_single_ones(engine):
    lengths = [3, 25, 9, 25, 1, 14]
    alone = [
        engine.request(PROMPT[: 2 + i % 3], temperature=0.0, max_new_tokens=n, ignore_eos=True)
        for i, n in enumerate(lengths)
    ]
    expected = [run(engine.client.generate(request)) for request in alone]
    found, num_posts = run(ask_together(engine, [replace(request, group="g") for request in alone]))
    assert num_posts == 1
    for one, other in zip(found, expected, strict=True):
        assert one.ids == other.ids and one.text == other.text and one.finish == other.finish
        assert largest_difference(one.log_probs, other.log_probs) < CLOSE
        assert one.weight_version == other.weight_version and one.spans == other.spans


def test_the_members_of_a_group_have_their_own_seeds(engine):
    alone = [engine.request(PROMPT, max_new_tokens=20, ignore_eos=True, sampling_seed=n) for n in range(4)]
    expected = [run(engine.client.generate(request)).ids for request in alone]
    found, num_posts = run(ask_together(engine, [replace(request, group="g") for request in alone]))
    assert [one.ids for one in found] == expected and len(set(expected)) == 4 and num_posts == 1


def test_one_member_of_a_group_can_be_aborted(engine):
    async def scenario():
        requests = [
            replace(engine.request(PROMPT, max_new_tokens=count, ignore_eos=True), group="g")
            for count in (450, 30, 450)
        ]
        asked = asyncio.create_task(ask_together(engine, requests))
        await engine.running(tokens=5)
        await engine.client.cancel([engine.url], [requests[0].rid])
        made, num_posts = await asked
        met(made[0].finish == "abort")
        return made, num_posts

    (first, second, third), num_posts = engine.meet(scenario)
    assert num_posts == 1 and len(first.ids) < 450
    assert (second.finish, third.finish) == ("length", "length") and len(third.ids) == 450


def test_a_member_of_a_group_that_is_refused_is_named_and_the_others_are_answered(engine):
    good = replace(engine.request(PROMPT, max_new_tokens=5, ignore_eos=True), group="g")
    bad = replace(engine.request([5] * (CONTEXT + 10), max_new_tokens=5), group="g")

    async def scenario():
        return await asyncio.gather(*map(engine.client.generate, (good, bad)), return_exceptions=True)

    answer, error = run(scenario())
    assert len(answer.ids) == 5
    assert isinstance(error, HttpError) and error.status == 400 and "longer" in str(error)


# -- scheduling ----------------------------------------------------------------------------------------------


def test_a_short_request_overtakes_a_long_one_in_the_same_forward_passes(engine):
    engine.counter("num_forward_passes")

    async def race():
        order, before = [], (await engine.control.info()).raw["num_forward_passes"]

        async def one(name, count):
            await engine.agenerate(PROMPT, max_new_tokens=count, ignore_eos=True)
            order.append(name)

        long = asyncio.create_task(one("long", 400))
        await engine.running(tokens=5)
        await one("short", 6)
        await long
        met(order == ["short", "long"])
        return (await engine.control.info()).raw["num_forward_passes"] - before

    assert engine.meet(race) <= 400 + 2


def test_more_requests_than_run_at_once_all_finish_right(engine, old_model):
    async def many():
        prompts = [[4 + i, 5 + i, 6 + i] * (1 + i % 5) for i in range(40)]
        made = await asyncio.gather(
            *[engine.agenerate(p, max_new_tokens=5 + i, ignore_eos=True) for i, p in enumerate(prompts)]
        )
        return prompts, made

    for i, (prompt, made) in enumerate(zip(*run(many()), strict=True)):
        assert len(made.ids) == 5 + i
        assert largest_difference(made.log_probs, plain_log_probs(old_model, prompt, made.ids)) < CLOSE


def test_a_repeated_prompt_is_taken_from_the_prefix_cache(engine, old_model):
    first = engine.generate(LONG_PROMPT, temperature=0.0, max_new_tokens=10, ignore_eos=True)
    second = engine.generate(LONG_PROMPT, temperature=0.0, max_new_tokens=10, ignore_eos=True)
    assert first.cached_tokens == 0 and second.cached_tokens >= 256
    assert second.ids == first.ids and largest_difference(first.log_probs, second.log_probs) < CLOSE
    run(engine.control.flush())
    assert engine.generate(LONG_PROMPT, max_new_tokens=1).cached_tokens == 0


def test_loads_count_running_and_waiting(engine):
    async def look():
        tasks = [
            asyncio.create_task(engine.agenerate(PROMPT, max_new_tokens=300, ignore_eos=True))
            for _ in range(11)
        ]
        await engine.running(tokens=40)
        load = await engine.control.load()
        await engine.abort_all()
        await asyncio.gather(*tasks)
        met(load == (8, 3))
        return await engine.control.load()

    assert engine.meet(look) == (0, 0)


# -- abort and pause -----------------------------------------------------------------------------------------


def test_an_aborted_request_answers_all_it_made_and_its_blocks_come_back(engine, old_model):
    free = engine.known_counter("kv_blocks_free")

    async def abort():
        task = asyncio.create_task(
            engine.agenerate(PROMPT, rid="victim", max_new_tokens=450, ignore_eos=True)
        )
        other = asyncio.create_task(
            engine.agenerate(PROMPT, rid="other", max_new_tokens=120, ignore_eos=True)
        )
        await engine.running(tokens=80)
        await engine.client.cancel([engine.url], ["victim", "unknown"])
        made = await asyncio.gather(task, other)
        met(made[0].finish == "abort")
        return made

    victim, other = engine.meet(abort)
    assert 20 <= len(victim.ids) < 450
    assert largest_difference(victim.log_probs, plain_log_probs(old_model, PROMPT, victim.ids)) < CLOSE
    assert other.finish == "length" and len(other.ids) == 120
    assert engine.known_counter("kv_blocks_free") == free == engine.known_counter("kv_blocks_total")


def test_abort_all_ends_waiting_requests_too(engine):
    async def abort():
        tasks = [
            asyncio.create_task(engine.agenerate(PROMPT, max_new_tokens=450, ignore_eos=True))
            for _ in range(10)
        ]
        await engine.running(tokens=20)
        await engine.abort_all()
        made = await asyncio.gather(*tasks)
        met({m.finish for m in made} == {"abort"})
        return made

    assert any(m.ids for m in engine.meet(abort))


def test_a_request_whose_connection_broke_is_sent_again_under_its_id(engine, old_model):
    """The engine may not have noticed, and still work on the first one: no mistake of ours."""

    async def scenario():
        first = asyncio.create_task(
            engine.agenerate(PROMPT, rid="again", max_new_tokens=400, ignore_eos=True)
        )
        await engine.running(tokens=5)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        client = EngineClient(engine.url, timeout_s=120)
        return await client.generate(engine.request(PROMPT, rid="again", max_new_tokens=40, ignore_eos=True))

    made = engine.meet(scenario)
    assert len(made.ids) == 40
    assert largest_difference(made.log_probs, plain_log_probs(old_model, PROMPT, made.ids)) < CLOSE


def test_a_client_that_hangs_up_frees_its_blocks(engine):
    engine.need(engine.is_strict, "to notice at once that a client hung up")

    async def hang_up():
        before = (await engine.control.info()).raw["num_generated_tokens"]
        task = asyncio.create_task(engine.agenerate(PROMPT, max_new_tokens=450, ignore_eos=True))
        await engine.running(tokens=5)
        task.cancel()
        await engine.idle()
        met((await engine.control.info()).raw["num_generated_tokens"] - before < 450)

    engine.meet(hang_up)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_request_freezes_and_then_ends_as_if_nothing_had_been(engine, mode):
    whole = engine.generate(PROMPT, temperature=0.0, max_new_tokens=150, ignore_eos=True)

    async def pause():
        task = asyncio.create_task(
            engine.agenerate(PROMPT, temperature=0.0, max_new_tokens=150, ignore_eos=True)
        )
        await engine.running(tokens=10)
        await engine.control.pause(mode)
        met(await engine.control.load() != (0, 0))
        before = (await engine.control.info()).raw
        await asyncio.sleep(0.2)
        after = (await engine.control.info()).raw
        assert not task.done()
        await engine.control.resume()
        return await task, before, after

    made, before, after = engine.meet(pause)
    assert made.ids == whole.ids
    assert before.get("num_generated_tokens") == after.get("num_generated_tokens")
    assert made.meta["num_retractions"] == (1 if mode == "retract" else 0)
    if mode == "retract" and "kv_blocks_free" in after:
        assert after["kv_blocks_free"] == after["kv_blocks_total"]


def test_pause_abort_answers_at_once_and_holds_what_comes_next(engine):
    async def pause():
        first = asyncio.create_task(engine.agenerate(PROMPT, max_new_tokens=450, ignore_eos=True))
        await engine.running(tokens=5)
        await engine.control.pause("abort")
        aborted = await first
        met(aborted.finish == "abort")
        held = asyncio.create_task(engine.agenerate(PROMPT, max_new_tokens=3, ignore_eos=True))
        await asyncio.sleep(0.2)
        assert not held.done()
        await engine.control.resume()
        return aborted, await held

    aborted, held = engine.meet(pause)
    assert 0 < len(aborted.ids) < 450
    assert held.finish == "length" and len(held.ids) == 3
