"""The small model that the examples with tools start from: three layers, one token per character.

Marks of tool calls (`<tool_call>{"name": "` and the like) are one token each, so that a call is short. The
chat template writes calls and results as Qwen and Hermes do; everything else of it is left out.
"""

import json
from pathlib import Path

from slime.cli.quickstart import tiny
from slime.cli.quickstart.tiny import widen_readers

CONTEXT_LEN = 384
MARKS = (
    *("<tool_call>", "</tool_call>", "<result>", "</result>", "[tools]", "<task>", "</task>"),
    *('{"name": "', '", "arguments": {"', '": "', '"}}', '", "', "\\n"),
)
TEMPLATE = (
    "{% if tools %}[tools]{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}<result>{{ message.content }}</result>"
    "{% elif message.role == 'assistant' %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<eos>"
    "{% else %}<task>{{ message.content }}</task>{% endif %}{% endfor %}"
)


def make_tokenizer(folder: str | Path, *, words: tuple[str, ...] = ()) -> int:
    """Write the tokenizer and return its number of tokens; `words` are tokens of their own, too."""
    from tokenizers import AddedToken

    tokenizer = tiny.build_tokenizer()
    tokens = [AddedToken(text, normalized=False, special=False) for text in ("\n", *MARKS, *words)]
    tokenizer.add_tokens(tokens)
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = CONTEXT_LEN
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def make(folder: str | Path, *, words: tuple[str, ...] = (), seed: int = 7) -> None:
    """Write a model with random weights and its tokenizer."""
    import torch
    from transformers import Qwen3ForCausalLM

    Path(folder).mkdir(parents=True, exist_ok=True)
    config = tiny.build_config()
    config.vocab_size = make_tokenizer(folder, words=words)
    config.max_position_embeddings = CONTEXT_LEN
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    widen_readers(Path(folder))


def call(name: str, **arguments: str) -> str:
    """A tool call as the model writes it."""
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tell(run_dir: str, names: tuple[str, ...]) -> None:
    """The first and the last evaluation of a run, and the curve between, which also goes to curve.json."""
    rows = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    curves = {name: {row["step"]: round(row[name], 4) for row in rows if name in row} for name in names}
    for name, curve in curves.items():
        values = list(curve.values())
        if values:
            shown = " ".join(f"{value:.2f}" for value in values)
            print(f"{name}: {values[0]:.3f} before, {values[-1]:.3f} after   {shown}")
    Path(run_dir, "curve.json").write_text(json.dumps(curves) + "\n")
