"""Every command in the docs is tried: those about a run, a plan or a new task are run; others are read by the
parser that would run them, their files and targets looked for.

A block that cannot be tried says why, as `title="not tried by the tests: ..."` after ```bash.
"""

import argparse
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from docs_world import ROOT, make_run, make_world, provide, provide_model, provide_settings, read_settings
from plugin_checks import check_plugins

from slime.arguments.core.draft import ASYNCHRONOUS, SYNCHRONOUS
from slime.arguments.parser import build_parser, known_options
from slime.cli.main import COMMANDS
from slime.cli.main import main as run_slime
from slime.cli.quickstart.command import parse_options
from slime.cli.simulate import split_flags
from slime.cli.tasks import TASKS

PAGES = [
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "recipes/README.md")),
]
FENCE = re.compile(r"^```(?:bash|sh|console)\b([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
REASON = re.compile(r'title="not tried by the tests: \S.*"')
# What `...` in a command stands for: the flags that every run needs.
ANY_RUN = (
    "--hf-checkpoint MODEL --prompt-data prompts.jsonl --rollout-batch-size 4 --num-rollout 2 "
    "--n-samples-per-prompt 2 --rollout-max-response-len 16 --custom-rm-path reward.py:reward"
)
RUNS = (
    *("RUN", "mytask/run", "mytask/second", "mytask/third", "myagent/run", "after", "after-5"),
    "runs/examples/retool/rl",
)
EXECUTED = ("help", "new", "plan", "plot", "samples", "status", "watch")
MODELS = ("DIR", "MODEL", "MODEL_DIR", "SAVED", "runs/examples/retool/warm-up/model")
OUTSIDE = (
    "apt-get",
    "ray",
    "docker",
    "kubectl",
    "sbatch",
    "sky",
)  # programs of others; the files that they name are ours


@dataclass(frozen=True)
class Command:
    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"

    @property
    def words(self) -> list[str]:
        """Without comments and settings of the environment; [optional] parts are given, a|b is a."""
        plain = re.sub(r"(?<=\w)\|\w+", "", self.text.replace("[RUN...]", "").partition(" > ")[0])
        plain = re.sub(r"(?<!\w)\[|\](?!\w)", "", plain) if "'" not in plain else _outside_quotes(plain)
        words = shlex.split(plain, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            del words[0]
        return [w for word in words for w in (ANY_RUN.split() if word == "..." else [word])]


def _outside_quotes(text: str) -> str:
    parts = text.split("'")
    parts[::2] = [re.sub(r"(?<!\w)\[|\](?!\w)", "", part) for part in parts[::2]]
    return "'".join(parts)


def commands() -> Iterator[Command]:
    for path in PAGES:
        for title, block in FENCE.findall(path.read_text(encoding="utf-8")):
            if REASON.search(title):
                continue
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip() and not line.startswith("#"):
                    yield Command(str(path.relative_to(ROOT)), " ".join(line.split()))


class Parsed(Exception):
    """Raised in place of what a command would do after its words were read."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = make_world(tmp_path_factory.mktemp("docs"))
    for name in MODELS:
        provide_model(folder / name)
    for name in RUNS:
        make_run(folder / name)
    provide(folder, ["reward.py", "prompts.jsonl", "mytask/prompts.jsonl", "mytask/reward.py", "run.yaml"])
    run = {
        "hf-checkpoint": "MODEL",
        "prompt-data": "mytask/prompts.jsonl",
        "input-key": "prompt",
        "custom-rm-path": "mytask/reward.py:reward",
        "rollout-batch-size": 4,
        "n-samples-per-prompt": 2,
        "num-rollout": 2,
        "rollout-max-response-len": 16,
        "run-dir": "new-run",
        "save": "{run_dir}/checkpoints",
    }
    for name in ("run.yaml", "mytask/run.yaml", "myagent/run.yaml"):
        (folder / name).write_text(yaml.safe_dump(run))
    [evaluation] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/evaluate.md").read_text(), re.DOTALL)
    (folder / "eval.yaml").write_text(evaluation)
    provide(folder, re.findall(r"\S+\.jsonl", evaluation))
    return folder


@pytest.mark.parametrize("command", sorted(set(commands()), key=str), ids=str)
def test_a_command_of_the_docs_is_one(command, world, monkeypatch, tmp_path):
    monkeypatch.chdir(world)
    words = command.words
    provide(world, words)
    program = words[0].removeprefix(".venv/bin/")
    if program == "slime":
        if words[1] == "new":
            monkeypatch.chdir(tmp_path)
        _slime(words[1], words[2:], world, monkeypatch)
    elif program == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words[1]
    elif program in ("python", "pytest"):
        _python(["-m", *words] if program == "pytest" else words[1:], world)
    elif program == "pip":
        _pip(words)
    elif program.endswith(".sh"):
        assert (ROOT / program).stat().st_mode & 0o100, f"{program} cannot be run"
    else:
        assert program in OUTSIDE, f"no rule how to try {program}; add one, or say why not in the fence"
        for word in words[1:]:
            if word.startswith(("launchers/", "recipes/")):
                assert (ROOT / word).is_file(), word


def _slime(name, words, world, monkeypatch):
    if name in ("train", "train-async", "doctor"):
        settings = [word for word in words if name != "doctor" or word != "--hosts"]
        _train(settings, world, ASYNCHRONOUS if name == "train-async" else SYNCHRONOUS)
    elif name in TASKS:
        provide(world, [word.rpartition("=")[2] for word in words])
        with pytest.raises(SystemExit) as ended:
            run_slime([name, *words, "--print-config"])
        assert ended.value.code == 0
    elif name in EXECUTED and "--expert-model-parallel-size" not in words:  # the model here has no experts
        assert run_slime([name, *words]) == 0
    elif name == "quickstart":
        _known_flags(parse_options(words).extra)
    elif name == "simulate":
        _known_flags(split_flags(words)[1])
    else:
        if name == "sweep":
            run = words[words.index("--") + 1 :]
            _slime(run[0], run[1:], world, monkeypatch)
        _stop_after_parsing(monkeypatch)
        with pytest.raises(Parsed):
            importlib.import_module(COMMANDS[name]).main(words)


def _train(words, world, loop):
    if "--config" in words:
        values = yaml.safe_load((world / words[words.index("--config") + 1]).read_text())
        provide_settings(world, values)
    words = [word.replace("/shared/", "shared/").replace("/volume/", "volume/") for word in words]
    check_plugins(read_settings(words, training_loop=loop))


def _python(words, world):
    """`words` follow `python`."""
    if words[:2] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), words
    elif words[0] == "-m":
        module = importlib.util.find_spec(f"{words[1]}.__main__")
        assert module, words[1]
        _flags_in_source(Path(module.origin).parent, words)
    elif words[0] in ("train.py", "train_async.py"):
        _train(words[1:], world, ASYNCHRONOUS if "async" in words[0] else SYNCHRONOUS)
    else:
        _flags_in_source(ROOT / words[0], words)


def _flags_in_source(path, words):
    source = "".join(file.read_text() for file in ([path] if path.is_file() else path.glob("*.py")))
    for word in words:
        if word.startswith("--"):
            assert word in source or word[2:].replace("-", "_") in source, f"{path} has no {word}"


def _known_flags(words):
    known = set(known_options(build_parser(None)[0]))
    unknown = [word for word in words if word.startswith("--") and word not in known]
    assert not [word for word in unknown if not word.startswith("--tensor-model")], unknown


def _pip(words):
    assert words[1] == "install", words
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in re.findall(r"slime-rl\[([\w,]+)\]", " ".join(words)):
        assert set(name.split(",")) <= set(extras), name


def _stop_after_parsing(monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, *args, **kwargs):
        parse(parser, *args, **kwargs)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)


def test_blocks_that_are_not_tried_say_why():
    for path in PAGES:
        for title, _ in FENCE.findall(path.read_text(encoding="utf-8")):
            assert not title.strip() or REASON.search(title), f"{path.name}: ```bash{title}"


def test_no_command_hides_in_an_indented_block():
    for path in PAGES:
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        hidden = re.findall(r"(?<=\n\n)    (?:slime|python|make|pip|pytest) [^\n]*", text)
        assert not hidden, f"{path.name}: {hidden}: put commands into ```bash"
