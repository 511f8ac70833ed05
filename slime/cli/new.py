"""`slime new NAME`: create a folder for your own task that runs at once: prompts, reward, settings, test."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from slime.cli.quickstart import tiny
from slime.utils.machine.own_command import as_typed

_REWARD = '''"""The reward of this task. Change it; `python test_reward.py` tests it on a few responses."""


def reward(args, sample):
    """Score one response: here, the share of its characters that are in the label.

    `sample.response` is what the model wrote, `sample.label` the label of the prompt's row.
    Return a number, or a dict of numbers; `reward-key` in run.yaml names the one to train on.
    """
    answer = sample.response.replace("<eos>", "")
    if not answer:
        return 0.0
    return sum(character in sample.label for character in answer) / len(answer)
'''

_TEST = '''"""Tests the reward on responses whose score is known: `python test_reward.py`, or pytest."""

from reward import reward

from slime.utils.types import Sample


def score(response, label="aeiou"):
    return reward(None, Sample(prompt="vowels>", response=response, label=label))


def test_a_right_response_scores_well():
    assert score("aeiouaeiou") == 1.0


def test_a_wrong_response_scores_badly():
    assert score("xyz") == 0.0
    assert score("") == 0.0


def test_one_in_between():
    assert score("abab") == 0.5


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"{name}: ok")
'''

_GENERATE = '''"""An agent of two turns: it responds, sees its score, and responds again."""

from slime.agent.session import Session


def score(text, label):
    return sum(character in label for character in text) / len(text) if text else 0.0


async def generate(args, sample, sampling_params):
    """Run one episode. `turn` takes the whole conversation; only the model's tokens are trained.

    Tools go between the turns. Without `reward=` the function of `custom-rm-path` in run.yaml scores
    `sample.response`, which holds all turns.
    """
    session = Session.of_run(args, sample, sampling_params)
    messages = [{"role": "user", "content": sample.prompt}]
    scores = []
    for _ in range(2):
        answer = await session.turn(messages)
        scores.append(score(answer.text, sample.label))
        messages += [answer.message, {"role": "user", "content": f" {scores[-1]:.1f}>"}]
    return session.samples(sample, reward=sum(scores) / len(scores))
'''

_RUN = """# {slime} train --config {config}
# You can set every flag of `{slime} train --help` here.
hf-checkpoint: {model}          # a Hugging Face folder, or a name on the hub
prompt-data: {prompts}
input-key: prompt
label-key: label
{template}custom-rm-path: {reward}
{generate}
num-rollout: 15                # steps
rollout-batch-size: 16         # prompts per step
n-samples-per-prompt: 8        # responses per prompt
rollout-max-response-len: {max_len}
advantage-estimator: grpo
lr: {lr}
lr-decay-style: constant
{precision}
run-dir: {run}           # --run-dir OTHER starts a second run
save: "{{run_dir}}/checkpoints"
load: "{{run_dir}}/checkpoints" # the same command resumes after any end
save-interval: 15
save-hf: "{{run_dir}}/model-{{rollout_id}}" # the trained model, as a Hugging Face folder
"""

_README = """# {name}

    {slime} doctor --config {config}       # check everything
    {slime} train --config {config}        # train
    {slime} samples {run} --best 5           # read the best responses
    {slime} plot {run}                       # did the reward rise?

Change `prompts.jsonl` (one JSON object per line), `reward.py` (a number for one response), and then
`hf-checkpoint` in `run.yaml`. The model in `model/` has random weights and writes single
characters: with it the folder runs without a download.
"""


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    folder = Path(options.name)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            print(f"error: {folder} already exists; give another name.", file=sys.stderr)
            return 2
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, options.model, with_generate=options.generate)
    except OSError as error:
        files = [path for path in folder.parents if path.is_file()]
        why = f"{files[0]} is a file" if files else error.strerror
        print(f"error: {folder} cannot be created: {why}; give another name.", file=sys.stderr)
        return 2
    print(f"created {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    print(f"next: {as_typed('train', '--config', folder / 'run.yaml')}")
    return 0


def _write(folder: Path, model: str | None, *, with_generate: bool) -> None:
    rows = [{"prompt": f"{number} vowels>", "label": "aeiou"} for number in range(200)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(_REWARD)
    (folder / "test_reward.py").write_text(_TEST)
    typed = {"slime": as_typed(), "config": shlex.quote(f"{folder}/run.yaml")}
    readme = _README.format(name=folder.name, run=shlex.quote(f"{folder}/run"), **typed)
    (folder / "README.md").write_text(readme)
    if with_generate:
        (folder / "generate.py").write_text(_GENERATE)
    own = model is None
    if own:
        tiny.make_checkpoint(folder / "model", seed=0)
    path = f"custom-generate-function-path: {_yaml(f'{folder}/generate.py:generate')}"
    text = _RUN.format(
        **typed,
        prompts=_yaml(f"{folder}/prompts.jsonl"),
        reward=_yaml(f"{folder}/reward.py:reward"),
        run=_yaml(f"{folder}/run"),
        model=_yaml(f"{folder}/model" if model is None else model),
        # An agent's session applies the chat template itself.
        template="" if own or with_generate else "apply-chat-template: true\n",
        generate=path if with_generate else f"# {path}",
        max_len=16 if own else 512,
        lr="5.0e-3" if own else "1.0e-6",
        precision="dtype: float32" if own else "",
    )
    (folder / "run.yaml").write_text(text)


def _yaml(text: str) -> str:
    """Return a text as a YAML value, in quotes if it has special characters."""
    return text if re.fullmatch(r"[\w./][\w./: {}-]*", text) and ": " not in text else json.dumps(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("slime new", description=__doc__, allow_abbrev=False)
    parser.add_argument("name", metavar="NAME", help="the folder to create")
    parser.add_argument(
        "--model", metavar="MODEL", help="a model folder or hub name; default: a new tiny model"
    )
    parser.add_argument(
        "--generate", action="store_true", help="add an agent: a generate function with several turns"
    )
    return parser
