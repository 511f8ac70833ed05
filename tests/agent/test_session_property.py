"""Random conversations with edits, over templates of many families: what is trained is what was sampled."""

import asyncio
import json
import random

import pytest
from chat_templates import FAMILIES, byte_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_policy import ScriptedPolicy

from slime.agent.parsing import parser_for
from slime.agent.rendering import Renderer
from slime.agent.session import Session
from slime.utils.types import Sample

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}},
    }
]
WORDS = ["note", "stone", "a rat in oats", "Ünïcode", "x\ny", '"quoted"', "  spaced ", "1+1=2", "</b>"]
EDITS = (
    "none",
    "none",
    "none",
    "shorten",
    "change_answer",
    "same_again",
    "drop_thoughts",
    "side_question",
    "new_alone",
)


def make_answer(family, rng, calls):
    """Raw text of an answer as this family writes it, with thoughts and calls or without."""
    text = rng.choice(WORDS)
    if family in ("qwen3", "deepseek") and rng.random() < 0.5:
        text = f"<think>\n{rng.choice(WORDS)}\n</think>\n\n{text}"
    if not calls:
        return text
    if family == "llama3":
        return json.dumps({"name": "look", "parameters": {"at": rng.choice(WORDS)}})
    if family == "glm":
        return f"{text}<tool_call>look<arg_key>at</arg_key><arg_value>it</arg_value></tool_call>"
    if family == "deepseek":
        call = (
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"at": "it"}\n```<｜tool▁call▁end｜>'
        )
        return f"{text}<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"
    call = json.dumps({"name": "look", "arguments": {"at": rng.choice(WORDS)}})
    return f"{text}\n<tool_call>\n{call}\n</tool_call>"


def tokenised_oddly(tokenizer, text, rng):
    """Tokens as a model may sample them: not the ones that the tokenizer would choose for this text."""
    ids = []
    at = 0
    while at < len(text):
        size = rng.randint(1, 6)
        special = next((t for t in tokenizer.get_added_vocab() if text.startswith(t, at)), None)
        piece = special or text[at : at + size]
        ids += tokenizer.encode(piece, add_special_tokens=False)
        at += len(piece)
    return ids


def replies(answer, rng):
    """What a client says to an answer: results of its calls, else another question."""
    if not answer.tool_calls:
        return [{"role": "user", "content": rng.choice(WORDS)}]
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": rng.choice(WORDS)}
        for call in answer.tool_calls
    ]


async def play(family, seed, history):
    rng = random.Random(seed)
    _, kwargs, ends = FAMILIES[family]
    tokenizer = byte_tokenizer(family)
    has_tools = family != "smollm2"

    def answer(prompt):
        ids = tokenised_oddly(tokenizer, make_answer(family, rng, has_tools and rng.random() < 0.5), rng)
        if rng.random() < 0.15:
            return ids[: max(1, len(ids) // 2)], "length", None
        stop = tokenizer.convert_tokens_to_ids(rng.choice(ends))
        return [*ids, stop], "stop", stop

    policy = ScriptedPolicy(answer)
    session = Session(
        policy, Renderer(tokenizer, template_kwargs=kwargs, history=history), parser=parser_for(tokenizer)
    )
    tools = TOOLS if has_tools else None
    messages = [{"role": "system", "content": "Be brief."}] if rng.random() < 0.5 else []
    messages.append({"role": "user", "content": rng.choice(WORDS)})
    seen = []
    for _ in range(rng.randint(1, 7)):
        got = await session.turn([dict(m) for m in messages], tools)
        seen.append(got)
        following = replies(got, rng)
        messages += [dict(got.message), *following]
        edit = rng.choice(EDITS)
        if edit == "new_alone":
            got = await session.turn(following, tools, after=got)
            seen.append(got)
            messages += [dict(got.message), *replies(got, rng)]
        elif edit == "shorten":
            messages = [{"role": "user", "content": "Summary: " + rng.choice(WORDS)}]
        elif edit == "change_answer":
            place = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
            messages = [
                *messages[:place],
                {"role": "assistant", "content": "other"},
                {"role": "user", "content": "so"},
            ]
        elif edit == "same_again":
            seen.append(await session.turn([dict(m) for m in messages], tools))
        elif edit == "drop_thoughts":
            messages = [{**m, "reasoning_content": ""} if m["role"] == "assistant" else m for m in messages]
        elif edit == "side_question":
            seen.append(await session.turn([{"role": "user", "content": "a title?"}], None))
    return tokenizer, policy, session, seen


def check(tokenizer, policy, session, seen):
    samples = session.samples(Sample(index=7, group_index=3, prompt="p"), reward=1.0)
    trained = {}
    for sample in samples:
        assert sample.rollout_id == 7 and sample.reward == 1.0
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
        start_of_response = len(sample.tokens) - sample.response_length
        masked = set()
        for turn in sample.metadata["turns"]:
            start, end = turn["start"], turn["end"]
            made, prompt = policy.made[turn["turn"]], policy.prompts[turn["turn"]]
            # The engine saw exactly what stands before the answer, and said exactly what stands there.
            assert sample.tokens[: start_of_response + start] == prompt
            assert sample.tokens[start_of_response + start : start_of_response + end] == made.ids
            assert sample.loss_mask[start:end] == [int(turn["trained"])] * (end - start)
            if turn["trained"]:
                assert turn["turn"] not in trained
                trained[turn["turn"]] = True
                assert sample.rollout_log_probs[start:end] == made.log_probs
                masked |= set(range(start, end))
                versions = [(s["version"], s["start"] + start, s["end"] + start) for s in made.spans]
                assert all(span in sample.version_spans for span in versions)
        assert [i for i, bit in enumerate(sample.loss_mask) if bit] == sorted(masked)
        assert all(
            sample.rollout_log_probs[i] == 0.0 for i in range(sample.response_length) if i not in masked
        )
    assert sorted(trained) == list(range(len(policy.made)))  # every turn trains, once
    for got in seen:
        # The client saw what was sampled: text and calls are all of the answer that is not syntax.
        raw = session.text_of(got.made)
        assert got.text.strip() in raw or got.parsed.tool_uses
        assert tokenizer.decode(got.made.ids, skip_special_tokens=False).startswith(raw)


@pytest.mark.parametrize("history", ["template", "extend"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**9))
def test_what_is_trained_is_what_the_engine_returned_at_that_position(family, history, seed):
    check(*asyncio.run(play(family, seed, history)))


def test_new_messages_behind_an_answer_make_the_prompt_that_the_whole_conversation_makes():
    async def inner():
        tokenizer = byte_tokenizer("qwen3")
        stop = tokenizer.eos_token_id
        policy = ScriptedPolicy(lambda prompt: ([*tokenizer.encode("yes"), stop], "stop", stop))
        session = Session(policy, Renderer(tokenizer), parser=parser_for(tokenizer))
        first = await session.turn([{"role": "user", "content": "one"}])
        new = [{"role": "user", "content": "two"}]
        whole = session.ask([{"role": "user", "content": "one"}, first.message, *new])
        alone = session.ask(new, after=first)
        assert list(whole.prompt_ids) == list(alone.prompt_ids) and whole.parent is alone.parent
        with pytest.raises(ValueError, match="needs the tools of that response"):
            session.ask(new, TOOLS, after=first)
        with pytest.raises(ValueError, match="not a response of this session"):
            Session(policy, Renderer(tokenizer)).ask(new, after=first)

    asyncio.run(inner())


@pytest.mark.parametrize("history, num_samples", [("template", 8), ("extend", 1)])
def test_a_template_that_drops_thoughts_gives_a_sample_for_each_user_message(history, num_samples):
    """Eight user messages, each after a response with thoughts; `extend` keeps the episode whole."""

    async def inner():
        tokenizer = byte_tokenizer("qwen3")
        stop = tokenizer.eos_token_id
        said = [*tokenizer.encode("<think>\nI add.\n</think>\n\nyes"), stop]
        policy = ScriptedPolicy(lambda prompt: (said, "stop", stop))
        renderer = Renderer(tokenizer, history=history)
        session = Session(policy, renderer, parser=parser_for(tokenizer))
        messages = []
        for number in range(8):
            messages.append({"role": "user", "content": f"question {number}"})
            messages.append((await session.turn(messages)).message)
        return session.samples(Sample(index=0, prompt="p"), reward=1.0)

    assert len(asyncio.run(inner())) == num_samples
