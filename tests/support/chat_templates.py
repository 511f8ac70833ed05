"""Chat templates in the manner of families of models, and a byte-level tokenizer that knows their tokens."""

# ruff: noqa: E501 - templates are read line by line as their authors write them

import functools

CHATML = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Results of tools are grouped in one user turn; thoughts are shown only behind the last question.
QWEN3 = (
    "{%- if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    '<tool_call>{"name": ...}</tool_call><|im_end|>\n{%- endif %}'
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role in ('user', 'system') %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "{{- '<think>\n' + (m.reasoning_content or '').strip('\n') + '\n</think>\n\n' }}{%- endif %}"
    "{{- m.content or '' }}"
    "{%- for c in m.tool_calls or [] %}{{- '\n<tool_call>\n' + (c.function | tojson) + '\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{%- if tools %}<|start_header_id|>system<|end_header_id|>\n\nGive "
    '{"name": function name, "parameters": dictionary of argument name and its value}.\n'
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|eot_id|>{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{%- elif m.tool_calls %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{%- for c in m.tool_calls %}{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{%- endfor %}<|eot_id|>"
    "{%- else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# No end of a turn: the token of the next role is the end, and the model samples it.
GLM = (
    "[gMASK]<sop>{%- if tools %}<|system|>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}<|assistant|>{{ '\n' + (m.content or '') }}"
    "{%- for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name }}{% for k, v in c.function.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>{%- endfor %}"
    "{%- elif m.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{%- endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- else %}<|{{ m.role }}|>{{ '\n' + m.content }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{{ '\n' }}{%- endif %}"
)
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEEPSEEK = (
    "{%- set ns = namespace(tool=false) -%}<｜begin▁of▁sentence｜>"
    "{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{%- if tools %}Use <｜tool▁calls▁begin｜>.{% endif %}"
    "{%- for m in messages %}{%- if m.role == 'system' %}{{ m.content }}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}{%- set ns.tool = false %}<｜User｜>{{ m.content }}"
    "{%- elif m.role == 'tool' %}{%- if not ns.tool %}<｜tool▁outputs▁begin｜>{%- endif %}{%- set ns.tool = true %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{%- elif m.role == 'assistant' %}{%- if ns.tool %}<｜tool▁outputs▁end｜>{%- else %}<｜Assistant｜>{%- endif %}"
    "{%- set ns.tool = false %}{{ (m.content or '').split('</think>') | last }}"
    "{%- if m.tool_calls %}<｜tool▁calls▁begin｜>{%- for c in m.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    "{{ c.function.name }}\n```json\n{{ c.function.arguments | tojson }}\n```<｜tool▁call▁end｜>{%- endfor %}"
    "<｜tool▁calls▁end｜>{%- endif %}<｜end▁of▁sentence｜>{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{%- if ns.tool %}<｜tool▁outputs▁end｜>{%- else %}<｜Assistant｜>{%- endif %}"
    "{%- endif %}"
)

# Name -> template, its arguments, the tokens by which a model ends its turn.
FAMILIES = {
    "chatml": (CHATML, {}, ("<|im_end|>",)),
    "qwen3": (QWEN3, {}, ("<|im_end|>",)),
    "qwen3_no_thoughts": (QWEN3, {"enable_thinking": False}, ("<|im_end|>",)),
    "llama3": (LLAMA3, {}, ("<|eot_id|>", "<|eom_id|>")),
    "glm": (GLM, {}, ("<|user|>", "<|observation|>", "<|endoftext|>")),
    "smollm2": (SMOLLM2, {}, ("<|im_end|>",)),
    "deepseek": (DEEPSEEK, {}, ("<｜end▁of▁sentence｜>",)),
}
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "[gMASK]", "<sop>", "<|system|>"),
    *("<|user|>", "<|assistant|>", "<|observation|>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    *(
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
    ),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@functools.cache
def byte_tokenizer(family: str = "chatml"):
    """One token per byte, some pairs of letters merged, so that text has more than one tokenisation."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in "aeiot" for b in "nrst"]
    vocabulary = {c: i for i, c in enumerate([*alphabet, *(a + b for a, b in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template, _, ends = FAMILIES[family]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=ends[0], pad_token="<|endoftext|>")
    fast.add_tokens(list(SPECIAL), special_tokens=True)
    fast.add_tokens(list(PLAIN))
    fast.chat_template = template
    return fast
