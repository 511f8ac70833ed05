"""`slime sft`, `dpo`, `reward-model`, `distill` and `eval`: preset flags are weaker than the user's."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from slime.cli.main import main
from slime.cli.tasks import TASKS
from slime.observability.tracking import read_metrics
from slime.utils.files.run_file import read_run, write_run


def talk(question: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


ROWS = {
    "talks": [{"messages": talk(f"{i}+1?", str(i + 1))} for i in range(20)],
    "completions": [{"prompt": f"{i}+1?", "completion": str(i + 1)} for i in range(4)],
    "text": [{"text": f"{i}+1={i + 1}"} for i in range(4)],
    "pairs": [{"chosen": talk(f"{i}?", "yes"), "rejected": talk(f"{i}?", "no")} for i in range(4)],
    "choices": [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(4)],
    "questions": [{"question": f"{i}+1?", "answer": str(i + 1), "level": 1} for i in range(4)],
    "asked": [{"prompt": talk(f"{i}+1?", "")[:1], "label": str(i + 1)} for i in range(4)],
    "odd": [{"doc": "a", "reply": "b"}],
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    make_tiny_model(folder / "model")
    make_tiny_model(folder / "teacher", seed=1)
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "broken.jsonl").write_text(
        '{"prompt": "a", "completion": "b"}\n' * 2 + '{"prompt": "a", "com\n'
    )
    return folder


@pytest.fixture(autouse=True)
def here(world, monkeypatch):
    monkeypatch.chdir(world)


def settings(capsys, command: str, *words: str) -> dict[str, tuple[str, str]]:
    """The settings of a command line: {name: (value, source)}."""
    with pytest.raises(SystemExit) as ended:
        main([command, *words, "--print-config"])
    assert ended.value.code == 0, capsys.readouterr().err
    lines = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith("#")]
    parts = [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]
    return {name: tuple(text.rsplit("  ", 1)) for name, text in parts}


def value(found: dict[str, tuple[str, str]], name: str) -> str:
    return found[name][0].strip()


def fails(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_flags_and_files_of_the_user_replace_presets(capsys, world):
    found = settings(capsys, "sft", "--model", "model", "--data", "talks.jsonl")
    assert value(found, "loss_type") == "sft_loss" and found["loss_type"][1].strip() == "preset"
    assert value(found, "save").endswith("runs/model-sft/checkpoints")
    (world / "run.yaml").write_text("lr: 0.5\nnum-rollout: 7\nprompt-data: talks.jsonl\n")
    words = ("--model=model", "--config", "run.yaml", "--seed", "3", "--out", "here", "--lora-rank", "2")
    found = settings(capsys, "sft", *words)
    assert (value(found, "lr"), value(found, "num_rollout"), value(found, "num_epoch")) == (
        "0.5",
        "7",
        "None",
    )
    assert value(found, "save_hf") == f"{world}/here/model-{{rollout_id}}"


@pytest.mark.parametrize(
    ("command", "data", "expected"),
    [
        ("sft", "talks", ("messages", "None", "qwen", "False")),
        ("sft", "completions", ("prompt", "completion", "qwen", "False")),
        ("sft", "questions", ("question", "answer", "qwen", "False")),
        ("sft", "text", ("text", "None", "text", "False")),
        ("dpo", "pairs", ("chosen", "rejected", "qwen", "False")),
        ("distill", "questions", ("question", "answer", "qwen", "False")),
        ("distill", "asked", ("prompt", "label", "qwen", "True")),
    ],
)
def test_usual_columns_are_found(capsys, command, data, expected):
    teacher = ("--teacher", "teacher") if command == "distill" else ()
    found = settings(capsys, command, "--model", "model", "--data", f"{data}.jsonl", *teacher)
    names = ("input_key", "label_key", "loss_mask_type", "apply_chat_template")
    assert tuple(value(found, name) for name in names) == expected


def test_text_is_trained_as_text_where_the_model_has_no_chat_template(capsys, world):
    make_tiny_model(world / "base")
    (world / "base" / "chat_template.jinja").unlink()
    for command, data in (("sft", "completions"), ("dpo", "choices")):
        found = settings(capsys, command, "--model", "base", "--data", f"{data}.jsonl")
        assert value(found, "loss_mask_type") == "text"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("sft --model model", "--data is required"),
        ("sft --data talks.jsonl", "--model is required"),
        ("sft --model gone/model --data talks.jsonl", "--model is gone/model: there is no such folder"),
        ("sft --hf-checkpoint gone/model --data talks.jsonl", "--hf-checkpoint is gone/model: there is no"),
        ("sft --model model --data gone.jsonl", "--data is gone.jsonl: there is no such file"),
        ("sft --model model --data odd.jsonl", "has the columns 'doc', 'reply', and none of these are there"),
        ("sft --model model --data broken.jsonl", "broken.jsonl, line 3: "),
        ("dpo --model model --data talks.jsonl", "chosen and rejected. Rename a column"),
        ("sft --model model --data talks.jsonl --outt x", "unknown flag --outt"),
        ("sft --model model --data talks.jsonl --out=", "--out is empty: name a folder"),
        ("sft --model= --data talks.jsonl", "--model is required"),
        (
            "sft --model model teacher --data talks.jsonl",
            "'teacher' after --model model: that flag takes one",
        ),
        ("eval --model model --data odd.jsonl --rm-type f1", "--data odd.jsonl has the columns 'doc'"),
        ("sft --model model --data talks.jsonl --teacher model", "unknown flag --teacher"),
        ("distill --model model --data questions.jsonl", "--teacher is required"),
        (
            "distill --model model --data questions.jsonl --teacher teacher --rm-url http://127.0.0.1:9",
            "--teacher teacher and --rm-url http://127.0.0.1:9 both name a teacher",
        ),
        ("eval --model model --data asked.jsonl", "no reward is given"),
        ("eval --model model --data a=asked.jsonl a=questions.jsonl --rm-type f1", "called 'a'"),
    ],
)
def test_a_mistake_names_the_option_that_was_typed(capsys, words, complaint):
    assert complaint in fails(capsys, *words.split())


def test_a_dry_run_checks_and_starts_nothing(capsys, world):
    words = ["--model", "model", "--data", "completions.jsonl", "--out", "dry", "--dry-run"]
    assert main(["sft", *words]) == 0
    assert "slime sft` with these flags can start" in capsys.readouterr().out
    assert not (world / "dry").exists()


def test_a_dry_run_names_an_unusable_folder_once(capsys, world, monkeypatch):
    (world / "file").write_text("")
    words = ["sft", "--model", "model", "--data", "completions.jsonl", "--dry-run", "--out"]
    assert main([*words, "file"]) == 2
    shown = capsys.readouterr()
    errors = [line for line in shown.out.splitlines() if "error:" in line]
    assert all("--out" in line and "--save" not in line for line in errors) and len(errors) == 1, shown.out


def test_a_folder_that_this_user_may_not_read_is_no_traceback(capsys, world, monkeypatch):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("slime.cluster.run_opening.has_finished", lambda folder, *_: refuse(folder))
    told = fails(capsys, "sft", "--model", "model", "--data", "completions.jsonl", "--out", "locked")
    assert "locked: Permission denied: choose another place, or ask for access to this one." in told
    monkeypatch.undo()
    monkeypatch.chdir(world)
    monkeypatch.setattr("slime.utils.files.run_file.is_used", refuse)
    told = fails(capsys, "sft", "--model", "model", "--data", "completions.jsonl", "--out", "locked")
    assert f"error: --out {world / 'locked'} cannot be read (Permission denied): choose another place" in told


def test_a_teacher_without_a_configuration_is_found_before_the_start(capsys, world):
    (world / "nothing").mkdir()
    (world / "nothing/config.json").write_text("{}")
    words = ["--model", "model", "--teacher", "nothing", "--data", "questions.jsonl", "--dry-run"]
    assert main(["distill", *words]) == 2
    assert f"--teacher: {world / 'nothing'}/config.json names no model_type" in capsys.readouterr().out


@pytest.mark.parametrize("command", TASKS)
def test_help_shows_the_few_options_first(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert text.index("--model MODEL") < text.index("Every flag of") and "--data" in text


def test_an_sft_is_evaluated_by_the_name_of_its_run(capsys):
    words = ["--data", "completions.jsonl", "--out", "sft", "--loss-mask-type", "text", "--lr", "0.01"]
    assert main(["sft", "--model", "model", *words]) == 0
    assert Path("sft/model/config.json").is_file() and Path("sft/model/tokenizer.json").is_file()
    assert main(["sft", "--model", "model", *words]) == 0  # the same command again
    assert "nothing is left to do: --out" in capsys.readouterr().out
    data = ["easy=asked.jsonl", "asked.jsonl@[0:2]"]
    limits = ["--rollout-max-response-len", "4", "--n-samples-per-eval-prompt", "2", "--out", "evaluated"]
    assert main(["eval", "--model", "sft", "--data", *data, "--rm-type", "f1", *limits]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert table[0] == ["dataset", "reward", "pass@1", "pass@2", "samples", "truncated"]
    assert [(row[0], row[4]) for row in table[1:]] == [("easy", "8"), ("asked", "4")]
    record = read_run(Path("evaluated"))
    assert record.last.settings["hf_checkpoint"]["value"].endswith("sft/model-0")
    again = ["eval", "--model", "sft", "--data", *data, "--rm-type", "f1", *limits]
    assert "belongs to run" in fails(capsys, *again)  # a finished evaluation stays
    write_run(Path("evaluated"), replace(record, last=replace(record.last, end=None, exit=None)))  # as killed
    assert "belongs to run" in fails(capsys, *again, "--seed", "7")  # another evaluation
    assert main(again) == 0
    after = read_run(Path("evaluated"))
    assert after.id != record.id and after.last.exit == "finished" and not after.earlier
    assert sum("eval/easy" in row for row in read_metrics(Path("evaluated"))) == 1


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sft", "--data text.jsonl"),
        ("dpo", "--data choices.jsonl"),
        ("reward-model", "--data pairs.jsonl"),
        ("distill", "--data questions.jsonl --teacher teacher --rollout-max-response-len 4"),
    ],
)
def test_a_task_trains_and_leaves_a_model(command, words, capsys):
    out = Path(f"out-{command}")
    assert main([command, "--model", "model", *words.split(), "--out", str(out), "--lr", "0.01"]) == 0
    assert (out / "model" / "config.json").is_file()
    rows = list(read_metrics(out))
    assert any("train/loss" in row for row in rows)
    assert all(row.get("rollout/waste/zero_variance/samples", 0) == 0 for row in rows)
    shown = capsys.readouterr().out
    assert f"finished: {'teacher KL' if command == 'distill' else 'loss'} " in shown
    assert ("  teacher    teacher" in shown) == (command == "distill")
    main_curve = "rollout/opd_reverse_kl" if command == "distill" else "train/loss"
    assert not any("rollout/raw_reward" in row for row in rows)  # a run without rewards shows none
    for reader in ("status", "plot", "samples"):
        assert main([reader, str(out)]) == 0
        text = capsys.readouterr().out
        assert "reward" not in text.replace("reward-model", "")
        assert reader != "plot" or text.startswith(f"{main_curve}\n")
        assert reader != "samples" or ("· rejected ·" in text) == (command in ("dpo", "reward-model"))
    assert f"trained with slime ({'distillation' if command == 'distill' else ''}" in (
        out / "model" / "README.md"
    ).read_text(encoding="utf-8")
