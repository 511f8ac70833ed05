"""Flags that scripts of slime carry along: translated, reported in one block, or refused."""

from pathlib import Path

import pytest
import yaml
from argument_helpers import base_argv, parse

from slime.rollout.dumps import dump_path


def reported(*words, **changes):
    """The one block of flags without effect, as lines."""
    blocks = [w for w in parse(*words, **changes).warnings if "nothing here (--strict refuses such)" in w]
    assert len(blocks) == 1, "flags without effect are reported in one block"
    return blocks[0]


WITHOUT_EFFECT = [
    ("--kl-loss-coef", "0.001"),
    ("--gamma", "0.95"),
    ("--ckpt-step", "7"),
    ("--train-memory-margin-bytes", "3221225472"),
    ("--update-weight-encoding", "deltas_zstd"),
    ("--teacher-port", "7999"),
    ("--teacher-warmup-port", "7999"),
    ("--teacher-warmup-timeout-s", "3000"),
    ("--teacher-sample-reduction-chunk-size", "4096"),
    ("--teacher-label-reduction-chunk-size", "4096"),
    ("--megatron-server-max-length", "0"),
    ("--megatron-server-update-timeout-s", "3600"),
    ("--megatron-server-warmup",),
    ("--no-megatron-server-warmup",),
]


@pytest.mark.parametrize("words", WITHOUT_EFFECT, ids=" ".join)
def test_a_flag_that_has_no_effect_in_slime_either_is_reported_and_the_run_starts(words):
    assert words[0] in reported(*words)
    with pytest.raises(ValueError, match=words[0]):
        parse(*words, "--strict")


def test_all_of_them_share_one_block():
    both = [word for words in WITHOUT_EFFECT for word in words if words[0] != "--no-megatron-server-warmup"]
    block = reported(*both)
    assert all(words[0] in block for words in WITHOUT_EFFECT[:-1])


def test_a_coefficient_without_its_term_does_not_count_the_kl_twice():
    changes = dict(kl_coef=0.1, kl_loss_coef=0.1, advantage_estimator="ppo")
    assert "--kl-loss-coef" in reported(**changes)
    with pytest.raises(ValueError, match="the KL would count twice"):
        parse(use_kl_loss=True, kl_loss_type="k3", **changes)


@pytest.mark.parametrize(
    ("words", "alternative"),
    [
        (("--use-dynamic-global-batch-size",), "--num-steps-per-rollout 1"),
        (("--teacher-model-path", "/models/teacher"), "--opd-teacher-load"),
        (("--teacher-url", "http://host:7999"), "--rm-url"),
    ],
)
def test_a_flag_that_would_change_what_is_trained_is_refused_with_the_alternative(
    words, alternative, tmp_path
):
    with pytest.raises(ValueError, match=alternative):
        parse(*words)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({words[0].removeprefix("--"): words[1] if words[1:] else True}))
    with pytest.raises(ValueError, match=alternative):
        parse("--config", str(file))


@pytest.mark.parametrize("equals", [False, True], ids=["two words", "one word"])
def test_the_folder_of_deltas_has_its_new_name(equals, tmp_path):
    old = ["--update-weight-delta-dir=shared"] if equals else ["--update-weight-delta-dir", "shared"]
    args = parse(*old, "--update-weight-delta-keep-files", update_weight_transport="disk")
    assert (Path(args.update_weight_disk_dir).name, args.update_weight_disk_keep_files) == ("shared", True)
    assert not args.warnings


def test_older_names_are_read_from_a_file_of_settings_too(tmp_path):
    file = tmp_path / "run.yaml"
    older = {"update-weight-delta-dir": "shared", "update_weight_transport": "disk"}
    file.write_text(yaml.safe_dump(older | {"gradient-checkpointing": True}))
    args = parse("--config", str(file))
    assert (Path(args.update_weight_disk_dir).name, args.activation_checkpointing) == ("shared", "full")


def test_a_dump_without_a_number_keeps_the_last_rollout_and_says_so(tmp_path):
    args = parse(save_debug_rollout_data="dumps/last.pt")
    assert args.save_debug_rollout_data.endswith("dumps/last.pt")
    assert any("dumps/last.pt" in w and "{rollout_id}" in w for w in args.warnings)
    assert dump_path("dumps/last.pt", 3).name == "last.pt"
    assert dump_path("dumps/last.pt", "eval_3").name == "eval_last.pt"
    assert dump_path("dumps/{rollout_id}.pt", "eval_3").name == "eval_3.pt"
    with pytest.raises(ValueError, match="every rollout would use the same path"):
        parse(save_debug_train_data="dumps/last.pt")


@pytest.mark.parametrize(
    ("value", "layers"),
    [
        ("'[0]*1+[1]*2'", [0, 1, 1]),
        ('"[0]*1+[1]*2"', [0, 1, 1]),
        ("'([0]*1+[1]*2)'", [0, 1, 1]),
        ("([0]*1 + [1]*2)", [0, 1, 1]),
        ("'2'", 2),
    ],
)
def test_quoted_layer_patterns_are_read(value, layers):
    from slime.arguments.passthrough.megatron_flags import Field, _read

    assert _read(Field("moe_layer_freq", int, False), "--moe-layer-freq", [value], None) == layers


@pytest.mark.parametrize(
    "value", ["[0]*3+print()", "[1]*10**9", "[1]*99999999", "[2]", "[1]*-1", "()", "[[1]]", "0", ""]
)
def test_a_layer_pattern_that_is_none_is_refused_with_its_form(value):
    from slime.arguments.passthrough.megatron_flags import Field, _read

    with pytest.raises(ValueError, match=r"--moe-layer-freq is .*such as \[0\]\*3\+\[1\]\*58"):
        _read(Field("moe_layer_freq", int, False), "--moe-layer-freq", [value], None)


def eval_file(folder, **content):
    prompts = folder / "aime.jsonl"
    prompts.write_text('{"text": "1+1", "label": "2"}\n')
    file = folder / "eval.yaml"
    datasets = [{"name": "aime", "path": str(prompts)}]
    file.write_text(yaml.safe_dump({"eval": {"datasets": datasets} | content}))
    return str(file)


SERVICES = [{"name": "skills", "url": "http://127.0.0.1:9050"}]


def test_evaluation_services_in_the_file_are_left_to_the_evaluation_function(tmp_path):
    file = eval_file(tmp_path, delegate=SERVICES)
    own = parse(eval_config=file, eval_interval=1, eval_function_path="mine.evaluate")
    assert [dataset.name for dataset in own.eval_datasets] == ["aime"] and not own.warnings
    assert "delegate" in reported(eval_config=file, eval_interval=1)


def test_a_file_of_evaluation_services_alone_needs_a_function_that_asks_them(tmp_path):
    file = eval_file(tmp_path, delegate=SERVICES, datasets=[])
    args = parse(eval_config=file, eval_interval=1, eval_function_path="mine.evaluate")
    assert args.eval_datasets == []
    with pytest.raises(ValueError, match="no `datasets`"):
        parse(eval_config=file, eval_interval=1)


def test_an_engine_teacher_may_judge_samples_of_another_temperature(tmp_path):
    args = parse("--use-opd", "--opd-type", "engine", rollout_temperature=0.8)
    assert args.rollout_temperature == 0.8
    assert any("temperature 1" in w and "--rollout-temperature 0.8" in w for w in args.warnings)


def test_other_flags_that_are_ignored_stay_errors():
    for words in (("--ref-ckpt-step", "3"), ("--rs-upper", "3"), ("--teacherport", "1"), ("--gama", "1")):
        with pytest.raises(ValueError):
            parse(*words)


def test_a_run_that_resumes_by_itself_does_not_go_back_to_a_step_of_no_effect(tmp_path, monkeypatch):
    from slime.arguments.groups import run

    monkeypatch.setattr(run, "is_unfinished", lambda *given: True)
    args = parse("--ckpt-step", "7", save=str(tmp_path / "out"), run_dir=str(tmp_path / "run"))
    assert (args.load, args.ckpt_step) == (str(tmp_path / "out"), None)


def test_a_flag_of_the_users_own_keeps_its_name():
    from slime.arguments import parse_args

    def add(parser):
        parser.add_argument("--teacher-port", type=int)
        return parser

    args = parse_args([*base_argv(), "--teacher-port", "1"], add_custom_arguments=add)
    assert args.teacher_port == 1
