"""What harnesses do to a box, seen by a double of it that runs nothing."""

import asyncio

import pytest

from slime.agent.harness import BaseHarness, ClaudeCodeHarness, CodexHarness, HarnessContext

CONTEXT = HarnessContext("/work dir", session_id="s-1", adapter_url="http://10.0.0.1:8000")


class RecordingBox:
    """Says yes to every command, but for those in `codes`."""

    def __init__(self, codes=None):
        self.codes, self.commands, self.files = codes or {}, [], {}

    async def exec(self, cmd, **options):
        self.commands.append(cmd)
        code = next((code for start, code in self.codes.items() if cmd.startswith(start)), 0)
        return code, "out", "no network"

    async def write_file(self, path, content, *, user="root"):
        self.files[path] = content

    async def read_file(self, path, *, user="root"):
        return "7" if path.endswith(".exit") else ""


def test_a_harness_is_one_object_in_a_process():
    assert ClaudeCodeHarness() is ClaudeCodeHarness() and CodexHarness() is not ClaudeCodeHarness()
    with pytest.raises(TypeError):
        BaseHarness()


def test_claude_code_is_told_its_endpoint_and_its_session_is_the_key(monkeypatch):
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ARGS", "--max-turns 9")
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ENVS", "A=1 B='two words'")
    box = RecordingBox()
    assert asyncio.run(ClaudeCodeHarness().run(box, CONTEXT, "it's a task", 60)) == 7
    (script,) = box.files.values()
    for part in (
        "cd '/work dir' && env ",
        "ANTHROPIC_BASE_URL=http://10.0.0.1:8000",
        "ANTHROPIC_AUTH_TOKEN=s-1",
        "ANTHROPIC_MODEL=slime-actor",
        "B='two words'",
        "--max-turns 9",
        "'it'\"'\"'s a task'",
    ):
        assert part in script


def test_codex_gets_its_endpoint_in_a_file():
    box = RecordingBox()
    asyncio.run(CodexHarness().run(box, CONTEXT, "task", 60))
    config = box.files["/work dir/.codex-s-1/config.toml"]
    assert 'base_url = "http://10.0.0.1:8000/v1"' in config and 'wire_api = "responses"' in config
    script = next(text for path, text in box.files.items() if path.endswith(".sh"))
    assert "SLIME_AGENT_KEY=s-1" in script and "codex exec" in script


def test_a_program_that_is_missing_is_installed_and_a_failure_says_what_helps(monkeypatch, tmp_path):
    box = RecordingBox({"command -v claude": 1})
    asyncio.run(ClaudeCodeHarness().install_cli(box))
    assert "npm install -g --fetch-retries=5 @anthropic-ai/claude-code" in box.commands
    tarball = tmp_path / "package.tgz"
    monkeypatch.setenv("SLIME_AGENT_CC_TARBALL", str(tarball))
    asyncio.run(ClaudeCodeHarness().install_cli(box))
    assert tarball in box.files.values()
    failing = RecordingBox({"command -v claude": 1, "npm install": 1})
    with pytest.raises(
        RuntimeError, match="no network; use an image that has it, or set SLIME_AGENT_CC_TARBALL"
    ):
        asyncio.run(ClaudeCodeHarness().install_cli(failing))
