"""Formats in which model families write tool calls: the values of `tool_parser`."""

from dataclasses import dataclass, field

_PARSING = "slime.agent.parsing"
# Called with a tokenizer: what its chat template does to earlier turns of a conversation.
TEMPLATE_REPORT = "slime.agent.rendering.template_report"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format of tool calls in a response.

    `function(text, schemas)` takes a response without its reasoning and returns the plain text, the calls as
    `{"name", "input"}`, and whether it contains an incomplete or invalid call. A format is recognised if the
    model's chat template contains all of `marks`.
    """

    function: str
    help: str
    marks: tuple[str, ...] = field(default=(), repr=False)  # () : never recognised, only named
    sglang_name: str | None = None  # what SGLang calls it


# A chat template is compared with these in order.
TOOL_FORMATS: dict[str, ToolFormat] = {
    "deepseek": ToolFormat(
        f"{_PARSING}.formats.parse_deepseek",
        "DeepSeek V3, R1 and V3.1: special tokens around a name and JSON",
        marks=("<｜tool▁calls▁begin｜>",),
        sglang_name="deepseekv3",
    ),
    "glm": ToolFormat(
        f"{_PARSING}.formats.parse_glm",
        "GLM-4.5 and later: <tool_call>name, then <arg_key> and <arg_value>",
        marks=("<arg_key>",),
        sglang_name="glm45",
    ),
    "qwen3_coder": ToolFormat(
        f"{_PARSING}.formats.parse_qwen3_coder",
        "Qwen3-Coder: <tool_call> with <function=name> and <parameter=key>",
        marks=("<function=",),
        sglang_name="qwen3_coder",
    ),
    "hermes": ToolFormat(
        f"{_PARSING}.formats.parse_hermes",
        "Qwen 2.5 and 3, Hermes, SmolLM2 and 3: JSON between <tool_call> and </tool_call>",
        marks=("<tool_call>",),
        sglang_name="qwen25",
    ),
    "pythonic": ToolFormat(
        f"{_PARSING}.formats.parse_pythonic",
        "Llama 3.2 and 4: a list of calls in Python's syntax, [name(key=value)]",
        marks=("func_name1(params_name1",),
        sglang_name="pythonic",
    ),
    "llama3": ToolFormat(
        f"{_PARSING}.formats.parse_llama3",
        "Llama 3.1 to 3.3: a JSON object of name and parameters, with or without <|python_tag|>",
        marks=('"parameters": dictionary of argument name',),
        sglang_name="llama3",
    ),
    "plain": ToolFormat(f"{_PARSING}.formats.parse_plain", "no tool calls: everything is text"),
}


def recognised(chat_template: str) -> str:
    """Return the format that a chat template describes; "plain" if it describes none of these."""
    found = (n for n, row in TOOL_FORMATS.items() if row.marks and all(m in chat_template for m in row.marks))
    return next(found, "plain")
