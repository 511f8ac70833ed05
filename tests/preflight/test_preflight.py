"""Each mistake that can be known before the start is found there, with everything else that is wrong."""

import json
import shutil

import pytest
from argument_helpers import parse
from tiny_model import make_tiny_model

from slime.preflight import Finding, Report, preflight
from slime.preflight.run import CHECKS

ROWS = [{"input": f"{n}+{n}=", "label": str(2 * n), "metadata": {}} for n in range(20)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def look(model, tmp_path):
    def run(*words, rows=ROWS, **changes):
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {
            "hf_checkpoint": str(model),
            "prompt_data": str(file),
            "rollout_global_dataset": True,
            "label_key": "label",
            "rm_type": "f1",
            "run_dir": str(tmp_path / "run"),
        }
        return preflight(parse(*words, **(settings | changes)))

    return run


def errors(report):
    return [str(finding) for finding in report.of("error")]


def test_a_run_that_is_right_has_notes_alone(look):
    report = look()
    assert errors(report) == [] and report.of("warning") == []
    assert any("20 prompts" in str(note) for note in report.of("note"))
    assert any("it gives 1 for '0'" in str(note) for note in report.of("note"))
    report.raise_errors()


REWARDS = {
    "returns_none": "def f(args, sample):\n    return None\n",
    "returns_text": "def f(args, sample):\n    return 'good'\n",
    "returns_nan": "def f(args, sample):\n    return float('nan')\n",
    "raises": "def f(args, sample):\n    return 1 / 0\n",
    "returns_a_list": "def f(args, sample):\n    return [1.0, 2.0]\n",
}


@pytest.mark.parametrize("name", REWARDS)
def test_a_custom_reward_that_cannot_work_is_found(look, tmp_path, name):
    (tmp_path / f"{name}.py").write_text(REWARDS[name])
    [error] = errors(look(custom_rm_path=f"{tmp_path / name}.py:f", rm_type=None))
    assert "--custom-rm-path" in error and (f"{name}.py" in error or "no score" in error)


def test_a_reward_that_gives_the_right_answer_nothing_is_a_warning(look, tmp_path):
    (tmp_path / "zero.py").write_text("async def f(args, sample):\n    return 0.0\n")
    report = look(custom_rm_path=f"{tmp_path / 'zero.py'}:f", rm_type=None)
    assert errors(report) == []
    [warning] = report.of("warning")
    assert "does the right answer score well?" in str(warning)


def test_no_reward_at_all(look):
    [error] = errors(look(rm_type=None))
    assert "no reward is given" in error


def test_all_prompts_too_long(look):
    [error] = errors(look(rollout_max_prompt_len=1))
    assert "all 20 prompts" in error and "--rollout-max-prompt-len (1)" in error


def test_a_wrong_label_key(look):
    [error] = errors(look(label_key="answer"))
    assert "answer" in error and "prompts.jsonl" in error


def test_no_rows(look):
    assert any("no rows" in error or "empty" in error for error in errors(look(rows=[])))


@pytest.fixture
def changed_model(model, tmp_path):
    """A copy of the model whose config.json says something else."""

    def make(**changes):
        folder = tmp_path / "changed"
        shutil.copytree(model, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        return folder

    return make


def test_a_model_without_a_chat_template(look, changed_model):
    folder = changed_model()
    for file in folder.glob("chat_template*"):
        file.unlink()
    rows = [{"input": [{"role": "user", "content": "hi"}], "label": "1"}]
    [error] = errors(look(apply_chat_template=True, rows=rows, hf_checkpoint=str(folder)))
    assert "has no chat template" in error and "--apply-chat-template" in error


def test_an_unknown_architecture(look, changed_model):
    folder = changed_model(model_type="never_heard_of")
    assert any("knows no model_type 'never_heard_of'" in e for e in errors(look(hf_checkpoint=str(folder))))


def test_a_tokenizer_of_another_model(look, changed_model):
    [error] = errors(look(hf_checkpoint=str(changed_model(vocab_size=3))))
    assert "vocabulary ends at 2" in error


def test_missing_packages(look, monkeypatch):
    monkeypatch.setattr("slime.preflight.packages.is_installed", lambda name: False)
    found = errors(look(rm_type="math", use_tensorboard=True))
    assert any("--rm-type math" in e and "pip install 'slime[math]'" in e for e in found)
    assert any("--use-tensorboard" in e for e in found)


def test_everything_wrong_is_listed_at_once(look, changed_model, monkeypatch):
    monkeypatch.setattr("slime.preflight.packages.is_installed", lambda name: False)
    report = look(
        label_key="answer", use_tensorboard=True, hf_checkpoint=str(changed_model(model_type="odd"))
    )
    assert len(report.of("error")) >= 3
    with pytest.raises(ValueError, match=r"things keep this run from starting:\n  1\. "):
        report.raise_errors()


def test_a_check_that_needs_what_is_missing_is_left_out(look):
    found = errors(look(label_key="answer"))
    assert len(found) == 1, found


def test_the_checks_need_only_what_comes_before_them():
    seen = []
    for _, check, needed in CHECKS:
        assert set(needed) <= set(seen)
        seen.append(check)


def test_lines_begin_with_errors():
    report = Report((Finding("note", "a", "x"), Finding("error", "b", "y"), Finding("warning", "c", "z")))
    assert report.lines() == ["error: b: y", "warning: c: z", "note: a: x"]
