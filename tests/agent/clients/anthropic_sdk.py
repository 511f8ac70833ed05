"""Run where the anthropic package is: an episode whole and one streamed; prints what it saw."""

import json
import sys

import anthropic

url, key = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
TOOLS = [{"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}]
seen = []


def episode(stream):
    messages = [{"role": "user", "content": f"stream {stream}"}]
    while True:
        options = {
            "model": "m",
            "max_tokens": 500,
            "messages": messages,
            "tools": TOOLS,
            "system": "Be brief.",
        }
        counted = client.messages.count_tokens(**{k: v for k, v in options.items() if k != "max_tokens"})
        if stream:
            with client.messages.stream(**options) as events:
                for _ in events:
                    pass
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**options)
        seen.append(
            {
                "kinds": [block.type for block in answer.content],
                "stop": answer.stop_reason,
                "tokens": answer.usage.output_tokens,
                "prompt": answer.usage.input_tokens,
                "counted": counted.input_tokens,
            }
        )
        messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return
        results = [
            {"type": "tool_result", "tool_use_id": c.id, "content": f"saw {c.input['at']}"} for c in calls
        ]
        messages.append({"role": "user", "content": results[::-1]})


episode(False)
episode(True)
try:
    anthropic.Anthropic(base_url=url, api_key="nobody", max_retries=0).messages.create(
        model="m", max_tokens=5, messages=[{"role": "user", "content": "x"}]
    )
except anthropic.AuthenticationError as error:
    seen.append({"error": error.body["error"]["type"]})
print(json.dumps(seen))
