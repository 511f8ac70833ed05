"""Rewards are attacked before a run: hackable ones are named, honest ones are not."""

import json

import pytest
from patience import PATIENCE_S
from rewards_under_attack import HACKABLE, HONEST, LABELS
from tiny_model import make_tiny_model

from slime.cli.main import main
from slime.preflight.attacks import NUM_ROWS, attack
from slime.utils.types import Sample


def said_about(kind, function):
    labels = LABELS[kind]
    rows = [Sample(prompt=f"Question {n}: which one is it?", label=label) for n, label in enumerate(labels)]

    def score(row, response):
        return float(function(response, row.label))

    return list(attack(rows[:NUM_ROWS], list(dict.fromkeys(labels)), score, lambda row: row.label, 60.0))


def test_hackable_rewards_are_found_and_honest_ones_are_not():
    missed = [name for name, row in HACKABLE.items() if not said_about(*row)]
    alarms = {name: said for name, row in HONEST.items() if (said := said_about(*row))}
    assert len(HACKABLE) == len(HONEST) == 20
    assert len(missed) <= 3 and len(alarms) <= 1, (missed, alarms)


def doctor(tmp_path, reward, *flags):
    model = make_tiny_model(tmp_path / "model")
    rows = [{"input": f"{n}+{n}=", "label": str(2 * n)} for n in range(10, 30)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(f"def f(args, sample):\n    return float({reward})\n")
    words = ["--hf-checkpoint", str(model), "--prompt-data", str(tmp_path / "prompts.jsonl")]
    words += ["--label-key", "label", "--custom-rm-path", f"{tmp_path}/reward.py:f", "--num-rollout", "1"]
    words += ["--rollout-max-response-len", "8"]
    return main(["doctor", *words, "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", *flags])


@pytest.mark.parametrize("flags", [(), ("--attack-reward",)])
def test_doctor_attacks_the_reward(tmp_path, capsys, monkeypatch, flags):
    for name in ("_QUICK_S", "_ATTACK_S"):
        monkeypatch.setattr(f"slime.preflight.reward.{name}", PATIENCE_S)  # a busy machine is no slow reward
    code = doctor(tmp_path, "sample.label in sample.response", *flags)
    said = capsys.readouterr()
    assert "it pays 1 (the right answer earns 1) for all labels at once" in said.out + said.err
    assert code == (1 if flags else 0)
    assert ("2 kinds of responses are paid without a solution" in said.out) == bool(flags)


def test_a_reward_that_cannot_be_cheated_passes(tmp_path, capsys):
    assert doctor(tmp_path, "sample.response.strip() == sample.label", "--attack-reward") == 0
    assert "  0 kinds of responses are paid without a solution" in capsys.readouterr().out
