"""Evaluation datasets: an entry's settings, then the file's defaults, then flags; others are errors."""

import pytest
from argument_helpers import parse

from slime.arguments.groups.eval_config import (
    EvalDatasetConfig,
    build_eval_dataset_configs,
    ensure_dataset_list,
)


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"input": "1+1"}\n')
    return str(file)


def write(tmp_path, text):
    file = tmp_path / "eval.yaml"
    file.write_text(text)
    return str(file)


def test_pairs_of_names_and_files_become_datasets(data):
    args = parse(
        "--eval-prompt-data", "one", data, "two", data, "--eval-temperature", "0", "--label-key", "answer"
    )
    assert [(d.name, d.path, d.temperature, d.label_key) for d in args.eval_datasets] == [
        ("one", data, 0.0, "answer"),
        ("two", data, 0.0, "answer"),
    ]
    assert args.eval_datasets[0].max_response_len == args.rollout_max_response_len


def test_single_file_is_called_aime(data):
    args = parse("--eval-prompt-data", data)
    assert args.eval_datasets[0].name == "aime"
    assert args.eval_prompt_data == ["aime", data]


def test_odd_number_of_words_is_refused(data):
    with pytest.raises(ValueError, match="--eval-prompt-data has 3 values"):
        parse("--eval-prompt-data", "one", data, "two")


def test_without_datasets_the_list_is_empty():
    assert parse().eval_datasets == []


def test_entry_wins_over_defaults_and_defaults_over_flags(tmp_path, data):
    config = write(
        tmp_path,
        f"""
eval:
  defaults: {{temperature: 0.5, n_samples_per_eval_prompt: 4}}
  datasets:
    - {{name: cold, path: {data}, temperature: 0.0, rm_type: math}}
    - {{name: warm, path: {data}}}
""",
    )
    cold, warm = parse(
        "--eval-config", config, "--eval-temperature", "0.9", "--eval-top-p", "0.7"
    ).eval_datasets
    assert (cold.temperature, warm.temperature) == (0.0, 0.5)
    assert (cold.n_samples_per_eval_prompt, cold.top_p, cold.rm_type, warm.rm_type) == (4, 0.7, "math", None)


def test_datasets_may_be_keyed_by_name_without_a_top_level(tmp_path, data):
    args = parse("--eval-config", write(tmp_path, f"datasets:\n  one: {{path: {data}}}\n"))
    assert args.eval_datasets[0].name == "one"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "datasets: [{name: a, path: P, temprature: 1}]",
            "'a': unknown key 'temprature'. Did you mean temperature",
        ),
        (
            "defaults: {temprature: 1}\ndatasets: [{name: a, path: P}]",
            "eval defaults: unknown key 'temprature'",
        ),
        (
            "datasets: [{name: a, path: P, app_service: 1}]",
            "app_service is a slime setting that this version does not build",
        ),
        ("datasets: [{name: a}]", "'a' has no path"),
        ("datasets: [{path: P}]", "has no name"),
        ("datasets: []", "no `datasets`"),
        ("datsets: []", "unknown key 'datsets'"),
        ("datasets: [a]", "must be a mapping with name and path"),
        ("datasets: [{name: a, path: P}, {name: a, path: P}]", "two evaluation datasets are called 'a'"),
        ("datasets: [{name: a, path: P, top_p: 2}]", "top_p is 2"),
        ("datasets: [{name: a, path: P, n_samples_per_eval_prompt: 0}]", "use at least 1"),
    ],
)
def test_mistakes_are_named(tmp_path, data, text, message):
    with pytest.raises(ValueError, match=message):
        parse("--eval-config", write(tmp_path, text.replace("P", data)))


def test_a_config_wins_over_pairs_which_are_told_of(tmp_path, data):
    config = write(tmp_path, f"datasets: [{{name: a, path: {data}}}]")
    args = parse("--eval-config", config, "--eval-prompt-data", "b", data)
    assert [dataset.name for dataset in args.eval_datasets] == ["a"]
    assert "--eval-prompt-data is set, but --eval-config names the evaluation datasets." in args.warnings[0]


def test_dataset_list_accepts_lists_and_mappings():
    assert ensure_dataset_list(None) == []
    assert ensure_dataset_list({"a": {"path": "x"}, "b": None}) == [{"name": "a", "path": "x"}, {"name": "b"}]
    assert ensure_dataset_list([{"name": "a"}]) == [{"name": "a"}]
    with pytest.raises(ValueError, match="must be a list or a mapping"):
        ensure_dataset_list("a")


def test_building_from_parsed_args_works_for_plug_ins(data):
    (config,) = build_eval_dataset_configs(parse(), [{"name": "a", "path": data}], {"top_k": 5})
    assert (config.top_k, config.input_key) == (5, "input")


def test_metadata_gets_the_reward_type_and_then_the_overrides():
    config = EvalDatasetConfig("a", "x", rm_type="math", metadata_overrides={"level": 2, "rm_type": "f1"})
    assert config.inject_metadata({"level": 1, "id": 7}) == {"level": 2, "id": 7, "rm_type": "f1"}
    assert config.inject_metadata(None)["level"] == 2


def test_cache_key_tells_datasets_apart():
    one = EvalDatasetConfig("a", "x", apply_chat_template_kwargs={"b": [1]})
    assert one.cache_key == EvalDatasetConfig("a", "x", apply_chat_template_kwargs={"b": [1]}).cache_key
    assert one.cache_key != EvalDatasetConfig("a", "y").cache_key
    assert hash(one.cache_key)
