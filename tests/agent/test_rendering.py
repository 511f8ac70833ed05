"""New messages are rendered behind what exists, and mean what the whole conversation would mean."""

import pytest
from chat_templates import CHATML, FAMILIES, SMOLLM2, byte_tokenizer

from slime.agent.rendering import Renderer, TemplateRefused

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
START = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello there"}]
USER = [{"role": "user", "content": "and now?"}]
RESULTS = [
    {"role": "tool", "tool_call_id": "c1", "content": "first result"},
    {"role": "tool", "tool_call_id": "c2", "content": "second result"},
]


def renderer_of(family, **options):
    _, kwargs, ends = FAMILIES[family]
    return Renderer(byte_tokenizer(family), template_kwargs=kwargs, **options), ends


def answered(renderer, family, answer, new, end):
    """(ids by extension, ids of the whole rendering), for an answer that the tokenizer chose itself."""
    tokenizer = renderer.tokenizer
    tools = None if family == "smollm2" else TOOLS
    prompt = renderer.first_prompt(START, tools)
    whole = renderer.first_prompt([*START, answer, *new], tools)
    shown = renderer.text([*START, answer], tools, answer_follows=False)
    said = renderer.encode(shown)[len(prompt) :]
    stop = tokenizer.convert_tokens_to_ids(end)
    if stop in said:
        said = said[: said.index(stop)]
    added = renderer.extension(new, stop_id=stop)
    return [*prompt, *said, stop, *added], whole


# Qwen3 writes an empty thought into its last answer, and none into earlier ones: it is left where it stands.
@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith("qwen3")])
def test_an_extended_prompt_is_the_rendering_of_the_whole_conversation(family):
    renderer, ends = renderer_of(family)
    answer = {"role": "assistant", "content": "fine"}
    extended, whole = answered(renderer, family, answer, USER, ends[0])
    assert extended == whole


@pytest.mark.parametrize("family", ["chatml", "qwen3", "glm", "deepseek"])
def test_results_of_several_calls_extend_as_they_would_be_rendered(family):
    renderer, ends = renderer_of(family)
    answer = {"role": "assistant", "content": "ok", "tool_calls": [CALL]}
    if family == "qwen3":
        answer["reasoning_content"] = "look first"
    extended, whole = answered(renderer, family, answer, RESULTS, ends[1] if family == "glm" else ends[0])
    assert extended == whole


def test_the_sampled_end_of_a_turn_stands_for_the_one_that_the_template_writes():
    renderer, _ = renderer_of("llama3")
    eom = renderer.tokenizer.convert_tokens_to_ids("<|eom_id|>")
    after_eom = renderer.extension(RESULTS, stop_id=eom)
    assert renderer.tokenizer.decode(after_eom).startswith("<|start_header_id|>ipython")


def test_an_answer_that_was_cut_is_closed_by_the_template():
    renderer, _ = renderer_of("chatml")
    text = renderer.tokenizer.decode(renderer.extension(USER, stop_id=None))
    assert text == "<|im_end|>\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"


def test_thoughts_that_a_template_drops_are_told():
    report = renderer_of("qwen3")[0].report()
    assert report.extends
    assert report.forks == ("a user message after an answer with thoughts",)
    assert renderer_of("chatml")[0].report().forks == ()
    renderer = renderer_of("qwen3")[0]
    assert renderer.rewrites(USER, has_thoughts=True) and not renderer.rewrites(USER, has_thoughts=False)
    assert not renderer.rewrites(RESULTS, has_thoughts=True)
    assert not renderer_of("qwen3", history="extend")[0].rewrites(USER, has_thoughts=True)


def test_a_template_without_a_place_for_tools_is_refused_by_name():
    with pytest.raises(TemplateRefused, match="no place for tools: it leaves out 'look'"):
        renderer_of("smollm2")[0].first_prompt(START, TOOLS)


def test_a_template_that_skips_a_role_is_refused():
    tokenizer = byte_tokenizer("chatml")
    renderer = Renderer(tokenizer)
    only_users = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
    tokenizer.chat_template = only_users
    try:
        with pytest.raises(TemplateRefused, match="leaves out a message of role 'tool'"):
            renderer.extension(RESULTS, stop_id=None)
    finally:
        tokenizer.chat_template = CHATML


def test_a_template_that_raises_is_told_in_its_own_words():
    tokenizer = byte_tokenizer("smollm2")
    tokenizer.chat_template = "{{ raise_exception('no system please') }}"
    try:
        with pytest.raises(TemplateRefused, match="no system please"):
            Renderer(tokenizer).first_prompt(START)
    finally:
        tokenizer.chat_template = SMOLLM2
