"""Names and call signatures of `slime.agent` that programs of slime users have."""

import inspect

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.adapters.common import BaseAdapter
from slime.agent.aiohttp_threaded import AppHandle, run_app_in_thread
from slime.agent.harness import BaseHarness, HarnessContext
from slime.agent.parsing import ParsedModelOutput, parse_model_output
from slime.agent.trajectory import TrajectoryManager, TurnRecord


def names(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_names_have_the_parameters_that_callers_give():
    wanted = ["tokenizer", "sglang_url", "tool_parser", "reasoning_parser", "max_turns_per_sid"]
    assert names(BaseAdapter.__init__)[:7] == [*wanted, "fork_threshold_tokens", "debug_callback"]
    assert names(BaseAdapter.open_session)[:3] == ["sid", "sampling_defaults", "max_context_tokens"]
    finish = ["sid", "base_sample", "reward", "extra_metadata", "wait_timeout"]
    assert names(BaseAdapter.finish_session)[:5] == finish
    assert issubclass(AnthropicAdapter, BaseAdapter) and issubclass(OpenAIAdapter, BaseAdapter)
    turn = ["prompt_ids", "output_ids", "finish_reason", "output_log_probs", "ill_formed"]
    assert names(TurnRecord)[:5] == turn
    recorded = ["sid", "turn", "prompt_messages", "response_message", "metadata"]
    assert names(TrajectoryManager.record_turn) == recorded
    told = ["sid", "base_sample", "reward", "extra_metadata", "max_sample_tokens"]
    assert names(TrajectoryManager.get_trajectory) == told
    assert TrajectoryManager().fork_threshold_tokens == 1024
    parsed = ["raw", "tools_schema", "tool_parser_name", "reasoning_parser_name"]
    assert names(parse_model_output)[:4] == parsed
    assert names(ParsedModelOutput) == ["reasoning", "text", "tool_uses", "ill_formed"]
    assert names(HarnessContext) == ["workdir", "session_id", "adapter_url", "model_label"]
    assert {"install_cli", "write_config", "launch_and_wait", "run"} <= set(dir(BaseHarness))
    assert names(run_app_in_thread)[:3] == ["app", "host", "port"] and {"host", "port", "stop"} <= set(
        dir(AppHandle)
    )
