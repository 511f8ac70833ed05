"""Real agent programs in front of the adapter, each compared token by token with the scripted engine.

`make test-agents` installs them and runs this file.
"""

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest
from agent_world import agent_world, check_exact

from slime.agent.harness import CodexHarness
from slime.utils.types import Sample

pytestmark = pytest.mark.agents
ROOT = Path(__file__).parent.parent.parent
SDKS = ROOT / ".venv-agents" / "bin" / "python"
MINI = ROOT / ".venv-agents-mini" / "bin" / "mini"
CLIS = ROOT / ".venv-agents" / "node" / "node_modules" / ".bin"
HERE = Path(__file__).parent / "clients"
KEY = "key-1"
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


def call(name, **arguments):
    return CALL % (name, json.dumps(arguments))


def needs(path):
    if not path.exists():
        pytest.skip(f"{path.name} is not installed: `make test-agents` does that")


def run(command, cwd, **env):
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**kept, "HOME": str(cwd), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def finish(world, **options):
    return asyncio.run(world.adapter.finish_session(KEY, base_sample=Sample(index=5), reward=1.0, **options))


def by_results(prompt):
    """Two calls first, then an end: the number of results since the last question decides."""
    since = prompt.rpartition("<|im_start|>user")[2]
    if "saw there" in since or since.count("saw ") >= 2:
        return "all seen"
    return "I look. " + call("look", at="here") + call("look", at="there")


def test_the_openai_sdk_chats_and_responds_whole_and_streamed(tmp_path):
    needs(SDKS)
    with agent_world(by_results) as world:
        code, out, err = run([SDKS, HERE / "openai_sdk.py", world.url, KEY], tmp_path)
        assert code == 0, err
        seen = json.loads(out)
        answers = [one for one in seen if "api" in one]
        assert [one["text"].strip() for one in answers] == ["I look.", "all seen"] * 4
        assert seen[-3:] == [
            {"error": "BadRequestError", "code": None},
            {"error": None},
            {"error": "AuthenticationError", "code": "invalid_api_key"},
        ]
        samples = finish(world)
        assert len(samples) == 4  # four conversations of one session
        check_exact(world, samples, num_turns=8)
        by_order = {turn["turn"]: (s, turn) for s in samples for turn in s.metadata["turns"]}
        for number, one in enumerate(answers):
            sample, turn = by_order[number]
            assert turn["end"] - turn["start"] == one["tokens"]
            if "logprobs" in one:
                assert one["logprobs"] == sample.rollout_log_probs[turn["start"] : turn["end"]]


def test_the_anthropic_sdk_whole_and_streamed_with_a_count_that_counts(tmp_path):
    needs(SDKS)
    with agent_world(by_results) as world:
        code, out, err = run([SDKS, HERE / "anthropic_sdk.py", world.url, KEY], tmp_path)
        assert code == 0, err
        *answers, error = json.loads(out)
        assert error == {"error": "authentication_error"}
        assert [one["kinds"] for one in answers] == [["text", "tool_use", "tool_use"], ["text"]] * 2
        assert [one["stop"] for one in answers] == ["tool_use", "end_turn"] * 2
        assert all(one["prompt"] == one["counted"] for one in answers)
        samples = finish(world)
        assert len(samples) == 2
        check_exact(world, samples, num_turns=4)


def test_openai_agents_run_with_a_tool(tmp_path):
    needs(SDKS)

    def answer(prompt):
        return "all seen" if "saw it" in prompt.rpartition("<|im_start|>user")[2] else call("look", at="it")

    with agent_world(answer) as world:
        code, out, err = run([SDKS, HERE / "openai_agents_run.py", world.url, KEY], tmp_path)
        assert code == 0, err
        told = json.loads(out)
        assert told == {"outputs": ["all seen"] * 4, "looked": ["it"] * 4}
        samples = finish(world)
        assert len(samples) == 4
        check_exact(world, samples, num_turns=8)


def test_mini_swe_agent_works_through_a_task(tmp_path):
    needs(MINI)
    answers = [
        "First. " + call("bash", command="echo hello > made.txt"),
        "no call at all",  # it drops such an answer and complains: history is edited
        call("bash", command="cat made.txt"),
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]
    with agent_world(answers) as world:
        command = [MINI, "-m", "openai/policy", "-t", "make a file", "-y", "--exit-immediately"]
        code, out, err = run(
            [*command, "-o", "traj.json", "-c", "mini.yaml", "-c", "agent.step_limit=8"],
            tmp_path,
            OPENAI_API_KEY=KEY,
            OPENAI_API_BASE=f"{world.url}/v1",
            MSWEA_CONFIGURED="true",
            MSWEA_COST_TRACKING="ignore_errors",
            MSWEA_SILENT_STARTUP="1",
            LITELLM_LOCAL_MODEL_COST_MAP="True",
            MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT="2",
        )
        assert code == 0, out + err
        assert (tmp_path / "made.txt").read_text() == "hello\n"
        samples = finish(world)
        check_exact(world, samples, num_turns=len(world.engine.requests))
        assert len(samples) == 2  # the dropped answer is a leaf of its own


def test_claude_code_edits_a_file_and_its_three_results_come_in_any_order(tmp_path):
    needs(CLIS / "claude")
    answers = [
        "Three at once." + "".join(call("Bash", command=f"echo result {n}", description="d") for n in "abc"),
        call("Write", file_path=str(tmp_path / "made.txt"), content="hello"),
        call("Read", file_path=str(tmp_path / "made.txt")),
        call("Edit", file_path=str(tmp_path / "made.txt"), old_string="hello", new_string="bye"),
        "All done.",
    ]
    with agent_world(answers) as world:
        env = {"ANTHROPIC_BASE_URL": world.url, "ANTHROPIC_API_KEY": KEY, "ANTHROPIC_MODEL": "policy"}
        command = [CLIS / "claude", "-p", "change the file", "--output-format", "stream-json", "--verbose"]
        code, out, err = run(
            [*command, "--max-turns", "30", "--allowedTools", "Bash Read Edit Write"],
            tmp_path,
            **env,
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            CLAUDE_CODE_MAX_RETRIES="3",
        )
        assert code == 0, out[-3000:] + err
        assert (tmp_path / "made.txt").read_text() == "bye"
        assert json.loads(out.splitlines()[-1])["result"] == "All done."
        samples = finish(world)
        check_exact(world, samples, num_turns=5)
        assert len(samples) == 1, [s.metadata["turns"] for s in samples]


def test_codex_runs_commands(tmp_path):
    needs(CLIS / "codex")
    answers = [
        "I write." + call("exec_command", cmd="echo hello > made.txt"),
        call("exec_command", cmd="cat made.txt") + call("exec_command", cmd="echo second"),
        "All done.",
    ]
    with agent_world(answers) as world:
        home = tmp_path / "codex_home"
        home.mkdir()
        (home / "config.toml").write_text(CodexHarness.config_text(f"{world.url}/v1", "policy"))
        command = [CLIS / "codex", "exec", "--json", "--skip-git-repo-check", "-s", "danger-full-access"]
        code, out, err = run([*command, "make a file"], tmp_path, CODEX_HOME=str(home), SLIME_AGENT_KEY=KEY)
        assert code == 0, out[-3000:] + err
        assert (tmp_path / "made.txt").read_text() == "hello\n"
        samples = finish(world)
        check_exact(world, samples, num_turns=3)
        assert len(samples) == 1 and "hello" in samples[0].response
