"""The command line and the files it names: precedence, sources, types, and mistakes that are told at once."""

import copy
import pickle
import subprocess
import sys

import pytest
from argument_helpers import base_argv, parse

from slime.arguments import Args, PluginArgs, RunInfo, parse_args, plugin_args
from slime.arguments.all_flags import GROUPS, Flags, all_specs
from slime.arguments.core.unbuilt import SYNONYMS, UNBUILT_FLAGS, why_idle


def write(tmp_path, text, name="run.yaml"):
    file = tmp_path / name
    file.write_text(text)
    return str(file)


def test_misspelt_flag_names_the_nearest_one():
    with pytest.raises(ValueError, match=r"--rollout-batch-sise; did you mean --rollout-batch-size\?"):
        parse("--rollout-batch-sise", "4")


def test_every_unknown_flag_is_told_at_once():
    with pytest.raises(ValueError, match=r"--lrr(.|\n)*--sede"):
        parse("--lrr=1", "--sede", "3")


def test_underscores_in_a_flag_are_told_the_right_spelling():
    with pytest.raises(ValueError, match="did you mean --rollout-batch-size"):
        parse("--rollout_batch_size", "4")


def test_abbreviated_flag_is_refused():
    with pytest.raises(ValueError, match="--rollout-batch-s"):
        parse("--rollout-batch-s", "4")


def test_word_without_a_flag_is_refused():
    with pytest.raises(ValueError, match="unexpected 'stray'"):
        parse("--seed", "3", "stray")


def test_a_settings_file_without_its_flag_is_told_alone():
    with pytest.raises(ValueError) as error:
        parse_args(["mytask/run.yaml"])
    assert str(error.value) == (
        "unexpected 'mytask/run.yaml': a file of settings is given by --config mytask/run.yaml"
    )


def test_value_after_a_switch_is_refused():
    with pytest.raises(ValueError, match="unexpected 'true' after --colocate, which takes no value"):
        parse("--colocate", "true")
    with pytest.raises(ValueError, match="--colocate is a switch and takes no value: 'true'"):
        parse("--colocate=true")


@pytest.mark.parametrize("flag", ["--load-forge-rollout-data", "--rampup-batch-size", "--lr-warmup-init"])
def test_known_flag_of_a_missing_feature_says_so(flag):
    with pytest.raises(ValueError, match=f"{flag} is a flag of slime's or Megatron's that this version does"):
        parse(flag, "1")


def test_a_flag_that_is_not_built_may_have_the_value_that_changes_nothing():
    parse("--lr-warmup-init", "0.0", "--weight-decay-incr-style", "constant")


def test_names_of_other_command_lines_are_taken_for_ours():
    args = parse("--recompute-activations", "--strict")
    assert args.activation_checkpointing == "selective"


def test_what_another_choice_of_the_user_leaves_out_is_told_and_what_a_default_leaves_out_is_refused():
    (block,) = parse("--min-lr", "1e-7", "--lr-decay-style", "constant").warnings
    assert "--min-lr is 1e-07, but it has an effect only without --lr-decay-style constant" in block
    with pytest.raises(
        ValueError, match="--min-lr is 1e-07, but it has an effect only without --lr-decay-style constant"
    ):
        parse("--min-lr", "1e-7")


def test_misspelt_declared_flag_with_a_pass_through_prefix_is_still_suggested():
    with pytest.raises(ValueError, match=r"did you mean --sglang-server-concurrency\?"):
        parse("--sglang-server-concurency", "8")


def test_names_of_other_trainers_lead_to_flags_that_exist():
    known = {option for spec in all_specs().values() for option in [spec.option, *spec.on_options]}
    assert {f"--{ours}" for ours in SYNONYMS.values()} - known == {"--sglang-mem-fraction-static"}
    assert not {f"--{theirs}" for theirs in SYNONYMS} & known
    with pytest.raises(
        ValueError, match="unknown flag --max_completion_length; it is called --rollout-max-r"
    ):
        parse("--max_completion_length", "8")


def test_no_declared_flag_is_listed_as_missing():
    declared = {
        option.removeprefix("--")
        for spec in all_specs().values()
        for option in [spec.option, *spec.on_options]
    }
    assert not declared & UNBUILT_FLAGS
    assert not [name for name in declared if why_idle(name)]


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (("--use-mopd",), "--use-mopd: several teachers are servers here: --use-opd"),
        (("--mopd_alpha", "0.5"), "--mopd_alpha: it belongs to --use-mopd"),
        (("--use-opd", "--opd-type", "self"), "--opd-type is 'self': choose from engine, trainer"),
        (("--opsd-beta", "0.5"), "--opsd-beta: it belongs to --opd-type self"),
        (("--save-lora", "adapters"), "--save-lora: .*--save-hf"),
        (("--lora-target-preset", "dense_mlp"), "--lora-target-preset: .*--lora-target-modules"),
        (("--int4-params-rollout",), "--int4-params-rollout: .*--rollout-quantization int4"),
    ],
)
def test_flags_of_forks_are_refused_with_what_to_use_instead(words, instead):
    with pytest.raises(ValueError, match=instead):
        parse(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rollout-batch-size", "four"), "'four': expected a whole number"),
        (("--rollout-batch-size", "2.5"), "expected a whole number"),
        (("--rollout-batch-size", "0"), "must be at least 1"),
        (("--rollout-top-p", "1.5"), "must be at most 1"),
        (("--adam-beta1", "1"), "must be less than 1"),
        (("--lr", "nan"), "not a finite number"),
        (("--lr", "1e400"), "not a finite number"),
        (("--loss-type", "huber"), "choose from policy_loss"),
        (("--apply-chat-template-kwargs", "[1]"), "expected a JSON object"),
        (("--lr",), "expected one argument"),
    ],
)
def test_bad_value_is_named_with_its_flag(words, message):
    with pytest.raises(ValueError, match=message) as error:
        parse(*words)
    assert words[0] in str(error.value)


def test_values_have_their_declared_types():
    args = parse(
        *(
            "--lr",
            "1e-5",
            "--apply-chat-template-kwargs",
            '{"enable_thinking": false}',
            "--rollout-stop",
            "a",
            "b",
        ),
        *("--seed=7", "--rollout-stop-token-ids", "1", "2"),
    )
    assert args.lr == 1e-5
    assert args.apply_chat_template_kwargs == {"enable_thinking": False}
    assert args.rollout_stop == ["a", "b"]
    assert args.rollout_stop_token_ids == [1, 2]
    assert args.seed == 7


def test_repeatable_flag_collects_all_paths():
    args = parse("--rollout-sample-hook-path", "a.b", "--rollout-sample-hook-path", "c.d")
    assert args.rollout_sample_hook_path == ["a.b", "c.d"]
    assert parse().rollout_sample_hook_path == []


def test_one_prompt_file_is_text_and_several_are_a_list(tmp_path):
    files = [write(tmp_path, "", f"{name}.jsonl") for name in "ab"]
    assert parse("--prompt-data", files[0]).prompt_data == files[0]
    assert parse("--prompt-data", *files).prompt_data == files


def test_default_on_switch_is_turned_off_by_its_disable_flag():
    assert parse().rewards_normalization is True
    assert parse("--disable-rewards-normalization").rewards_normalization is False


def test_command_line_wins_over_the_file_and_the_file_over_the_default(tmp_path):
    config = write(tmp_path, "lr: 1e-4\nclip_grad: 0.5\n")
    args = parse("--config", config, "--lr", "3e-4")
    assert (args.lr, args.clip_grad, args.weight_decay) == (3e-4, 0.5, 0.01)
    assert args.sources["lr"] == "command line"
    assert args.sources["clip_grad"] == f"file {config}"
    assert args.sources["weight_decay"] == "default"


def test_command_line_can_turn_off_what_the_file_turned_on(tmp_path):
    config = write(tmp_path, "use_kl_loss: true\n")
    assert parse("--config", config).use_kl_loss is True
    assert parse("--config", config, "--no-use-kl-loss").use_kl_loss is False


def test_file_keys_may_be_written_like_flags(tmp_path):
    text = "clip-grad: 0.5\ndisable-rewards-normalization: true\nrollout_stop: [a, b]\n"
    text += "backend: fsdp\nsave_interval: null\n"
    args = parse("--config", write(tmp_path, text))
    assert args.clip_grad == 0.5
    assert args.rewards_normalization is False
    assert args.rollout_stop == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "rollout_batch_sise: 4\n",
            r"run.yaml: unknown key 'rollout_batch_sise'; did you mean 'rollout_batch_size'\?",
        ),
        (
            "load_forge_rollout_data: a\n",
            "load_forge_rollout_data is a flag of slime's or Megatron's that this version does not build yet",
        ),
        ("lr: fast\n", "lr in .*run.yaml is 'fast': expected a number"),
        ("seed: [1, 2]\n", "expected one value, found a list"),
        ("colocate: 3\n", "expected true or false"),
        ("lr: 1\nlr: 2\n", "key 'lr' is written twice"),
        ("lr: [1\n", "is not valid YAML"),
        ("- lr\n", "run.yaml is a list"),
        ("config: other.yaml\n", "only be given on the command line"),
    ],
)
def test_mistake_in_a_file_names_the_file(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as error:
        parse("--config", write(tmp_path, text))
    assert "run.yaml" in str(error.value)


def test_missing_config_file_is_told():
    with pytest.raises(ValueError, match=r"--config is nowhere.yaml: there is no such file"):
        parse("--config", "nowhere.yaml")
    with pytest.raises(ValueError, match=r"--config is /: it is a folder; give a file"):
        parse("--config", "/")


@pytest.mark.parametrize(
    "text", ["lr: [1\n", "- lr\n", "lr: 1\nlr: 2\n", "num-rollout: 3.0\n", "nun-rollout: 3\n"]
)
def test_what_follows_from_a_mistake_in_a_file_is_not_told_beside_it(tmp_path, text):
    with pytest.raises(ValueError, match=r"run\.yaml") as error:
        parse_args([*base_argv(num_rollout=None), "--config", write(tmp_path, text)])
    assert "--num-rollout nor --num-epoch" not in str(error.value)


def test_without_a_config_file_its_flags_are_not_called_missing():
    with pytest.raises(ValueError) as error:
        parse_args(["--config", "nowhere.yaml", "--lrr", "1"])
    assert [line.strip() for line in str(error.value).splitlines()] == [
        "2 problems found; nothing was started.",
        "Command line:",
        "unknown flag --lrr; did you mean --lr?",
        "--config:",
        "--config is nowhere.yaml: there is no such file.",
    ]


def test_paths_below_the_home_folder_are_written_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    file = write(
        tmp_path, "run-dir: ~/run\nsave: $SCRATCH/a\nload: ${SCRATCH}/a\nrollout-stop: ['$', '$x']\n"
    )
    args = parse("--config", file, "--dump-details=~/d")
    assert (args.run_dir, args.save, args.load) == (f"{tmp_path}/run", "/scratch/me/a", "/scratch/me/a")
    assert args.dump_details == f"{tmp_path}/d"
    assert args.rollout_stop == ["$", "$x"]


def test_a_path_from_a_variable_that_is_not_set_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("SCRATCH", raising=False)
    with pytest.raises(
        ValueError, match=r"run-dir in .* is '\$SCRATCH/run': the variable SCRATCH is not set"
    ):
        parse("--config", write(tmp_path, "run-dir: $SCRATCH/run\n"))


def test_custom_config_adds_attributes_for_plug_ins(tmp_path):
    config = write(tmp_path, "tool_budget: 3\nlr: 1e-5\n")
    args = parse("--custom-config-path", config)
    assert args.tool_budget == 3
    assert args.lr == 1e-5
    assert args.sources["tool_budget"] == f"file {config}"


def test_custom_config_is_applied_before_the_rules(tmp_path):
    config = write(tmp_path, "rollout_temperature: 0\n")
    with pytest.raises(ValueError, match="--rollout-temperature is 0"):
        parse("--custom-config-path", config)


def test_custom_config_that_contradicts_the_command_line_is_refused(tmp_path):
    config = write(tmp_path, "lr: 1e-5\n")
    with pytest.raises(ValueError, match="keep one of them"):
        parse("--custom-config-path", config, "--lr", "1e-4")


def test_custom_config_cannot_shadow_what_args_needs(tmp_path):
    with pytest.raises(ValueError, match="'sources' is a name that args uses itself"):
        parse("--custom-config-path", write(tmp_path, "sources: 1\n"))


def add_tool_flags(parser):
    parser.add_argument("--tool-budget", type=int, default="3", help="calls per sample")
    parser.add_argument("--tool-server", required=True)
    return parser


def test_custom_arguments_have_defaults_sources_and_file_keys(tmp_path):
    config = write(tmp_path, "tool_server: http://here\n")
    args = parse_args([*base_argv(), "--config", config], add_custom_arguments=add_tool_flags)
    assert (args.tool_budget, args.tool_server) == (3, "http://here")
    assert (args.sources["tool_budget"], args.sources["tool_server"]) == ("default", f"file {config}")
    args = parse_args(
        [*base_argv(), "--tool-budget", "5", "--tool-server", "x"], add_custom_arguments=add_tool_flags
    )
    assert (args.tool_budget, args.sources["tool_budget"]) == (5, "command line")


def test_required_custom_argument_is_required():
    with pytest.raises(ValueError, match="--tool-server is required"):
        parse_args(base_argv(), add_custom_arguments=add_tool_flags)


def test_custom_argument_that_slime_already_has_is_refused():
    with pytest.raises(ValueError, match="a flag that slime already has"):
        parse_args(base_argv(), add_custom_arguments=lambda parser: parser.add_argument("--lr"))


def test_args_cannot_be_changed():
    args = parse()
    with pytest.raises(AttributeError, match=r"args.lr cannot be set.*args.replace\(lr="):
        args.lr = 1.0
    with pytest.raises(AttributeError):
        del args.lr


def test_args_survive_pickle_and_copy():
    args = parse()
    for twin in (pickle.loads(pickle.dumps(args)), copy.deepcopy(args)):
        assert twin == args
        assert twin.sources == args.sources


def test_replace_makes_a_copy_and_refuses_unknown_names():
    args = parse()
    assert args.replace(lr=1.0).lr == 1.0
    assert args.lr == 1e-6
    with pytest.raises(ValueError, match="args has no lrr"):
        args.replace(lrr=1.0)


def test_vars_of_args_are_exactly_the_settings():
    assert set(vars(parse())) == set(all_specs()) | {
        "eval_datasets",
        "sglang_options",
        "router_options",
        "engine_topology",
        "start_from",
        "critic_overrides",
        "megatron_config",
    }


def test_args_knows_every_flag_group():
    assert all(issubclass(Args, group) and issubclass(PluginArgs, group) for group in GROUPS)


def test_plug_ins_get_a_copy_with_the_facts_of_the_run():
    args = parse()
    info = RunInfo("run", "runs/x", "127.0.0.1", 4000, ("http://127.0.0.1:4001",), 9, 2, 1, 512, 128)
    seen = plugin_args(args, info)
    assert (seen.sglang_router_ip, seen.sglang_router_port, seen.rollout_num_engines) == (
        "127.0.0.1",
        4000,
        1,
    )
    assert (seen.num_rollout, seen.start_rollout_id, seen.run_dir) == (9, 2, "runs/x")
    assert (seen.engine_urls, seen.vocab_size, seen.max_context_len) == (["http://127.0.0.1:4001"], 512, 128)
    seen.lr = 5.0
    seen.rollout_sample_hook_path.append("a.b")
    assert args.lr == 1e-6
    assert args.rollout_sample_hook_path == []


def test_print_config_shows_every_value_and_its_source(capsys, tmp_path):
    config = write(tmp_path, "clip_grad: 0.5\n")
    with pytest.raises(SystemExit) as stop:
        parse("--config", config, "--print-config", "--use-wandb", "--wandb-key", "hush")
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    lines = {line.split()[0]: line for line in shown.splitlines() if line and not line.startswith("#")}
    assert set(lines) == set(all_specs()) | {
        "eval_datasets",
        "sglang_options",
        "router_options",
        "engine_topology",
        "start_from",
        "critic_overrides",
        "megatron_config",
    }
    assert "0.5" in lines["clip_grad"] and f"file {config}" in lines["clip_grad"]
    assert lines["rollout_batch_size"].split()[1:] == ["4", "command", "line"]
    assert "derived: same as eps_clip" in lines["eps_clip_high"]
    assert "hush" not in shown


def test_secrets_are_hidden_where_args_are_written_down():
    args = parse("--use-wandb", "--wandb-key", "hush")
    assert args.to_dict()["wandb_key"] == "hush"
    assert args.to_dict(hide_secrets=True)["wandb_key"] == "********"
    assert "hush" not in repr(args)


def test_parsing_does_not_load_torch():
    code = (
        "import sys; from slime.arguments import parse_args; parse_args(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, *base_argv()], check=True)


def test_flags_that_a_run_always_has_a_value_of_are_never_none():
    args = parse()
    assert [name for name in vars(Flags)["__annotations__"] if getattr(args, name) is None] == []


def test_help_with_words_lists_the_flags_that_mention_all_of_them(capsys):
    with pytest.raises(SystemExit) as end:
        parse_args(["--help", "lora", "rank"])
    shown = capsys.readouterr().out
    assert end.value.code == 0 and "--lora-rank" in shown and "--lr " not in shown
    with pytest.raises(SystemExit):
        parse_args(["--help", "xyzzy"])
    assert "No flag mentions xyzzy" in capsys.readouterr().out
