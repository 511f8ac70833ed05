"""What `slime train` refuses before any process starts and before anything is written, one mistake a test;
and runs that are right, however odd, which it lets through.
"""

import json
import shutil

import pytest
from loop_helpers import flags, make_world
from patience import PATIENCE_S

from slime.cli import doctor, train, train_async
from slime.rollout.rm_hub.workers.check_pool import close_pools

REWARDS = """
def none(args, sample):
    return None


def text(args, sample):
    return "good"


def nan(args, sample):
    return float("nan")


def upside_down(args, sample):
    return float(sample.response != sample.label)


def three_of_four(args, samples):
    return [1.0] * 3


def fine(args, sample):
    return float(sample.response == sample.label)


def reads_what_generate_left(args, sample):
    return sample.metadata["turns"][-1]["score"]


async def generate(args, sample, sampling_params):
    return sample


class Source:
    def __init__(self, args): ...
    def get_samples(self, n): ...
    def add_samples(self, groups): ...
    def save(self, rollout_id): ...
    def load(self, rollout_id): ...


def rollout(args, rollout_id, data_source, evaluation=False): ...
    """


class Started(Exception):
    """The run got to the point where its first process would start."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = make_world(tmp_path_factory.mktemp("before"))
    (folder / "rewards.py").write_text(REWARDS)
    yield folder
    close_pools()


@pytest.fixture
def start(world, tmp_path, monkeypatch, capsys):
    """`start(**flags)`: the exit code and what was printed; Started where processes would be."""

    def no_process(*args):
        raise Started

    monkeypatch.setattr("slime.cluster.start.create_runtime", no_process)
    monkeypatch.setattr("slime.cluster.start.configure_logger", lambda **options: None)  # caplog has the log
    monkeypatch.setattr("slime.preflight.reward.DEADLINE_S", PATIENCE_S)
    monkeypatch.setattr("slime.preflight.reward.WORKER_DEADLINE_S", PATIENCE_S)

    def run(*words, main=train.main, **changes):
        argv = [*flags(world, "run", **{"run_dir": tmp_path / "run", **changes}), *words]
        try:
            code = main(argv)
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        if code:
            assert not (tmp_path / "run").exists(), "something was written"
        return code, printed.out + printed.err

    return run


def passes(start, **changes):
    with pytest.raises(Started):
        print(start(**changes))


def rewarded(world, name, **changes):
    return {"custom_rm_path": f"{world}/rewards.py:{name}", **changes}


def test_a_run_that_is_right_gets_to_its_first_process(start, world):
    passes(start, **rewarded(world, "fine"))


# ---- mistakes ----------------------------------------------------------------------------------------------


def refused(start, *parts, **changes):
    code, printed = start(**changes)
    assert code == 2 and "Traceback" not in printed
    for part in parts:
        assert part in printed, printed


def changed_model(world, tmp_path, *, without=(), **config):
    folder = tmp_path / "model"
    shutil.copytree(world / "model", folder)
    for pattern in without:
        for file in folder.glob(pattern):
            file.unlink()
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    return folder


def test_no_reward(start):
    refused(start, "no reward is given", custom_rm_path=None)


def test_an_unknown_architecture(start, world, tmp_path):
    folder = changed_model(world, tmp_path, model_type="never_heard_of")
    refused(start, "knows no model_type 'never_heard_of'", hf_checkpoint=folder)


def test_no_tokenizer_in_the_folder(start, world, tmp_path):
    refused(start, "has no tokenizer", hf_checkpoint=changed_model(world, tmp_path, without=["tokenizer*"]))


def test_no_chat_template(start, world, tmp_path):
    folder = changed_model(world, tmp_path, without=["chat_template*"])
    refused(start, "has no chat template", hf_checkpoint=folder, apply_chat_template=True)


@pytest.mark.parametrize("flag", ["label_key", "input_key"])
def test_a_wrong_key(start, flag):
    refused(start, "no column 'nothere'", "['input', 'label']", **{flag: "nothere"})


def test_all_prompts_too_long(start):
    refused(start, "all 40 prompts", rollout_max_prompt_len=2)


def test_no_prompt_fits_the_context(start, world, tmp_path):
    folder = changed_model(world, tmp_path, max_position_embeddings=4)
    refused(start, "the model's context is 4", hf_checkpoint=folder)


@pytest.mark.parametrize("name, why", [("none", "None"), ("text", "str 'good'"), ("nan", "nan")])
def test_a_reward_that_is_no_number(start, world, name, why):
    refused(start, f"reward is {why}", f"{world}/rewards.py", **rewarded(world, name))


def test_a_reward_of_the_wrong_number(start, world):
    changes = rewarded(world, "three_of_four", group_rm=True)
    refused(start, "returned 3 rewards for 4 samples", **changes)


def test_a_reward_that_dislikes_the_right_answer_is_told_and_starts(start, world, caplog):
    passes(start, **rewarded(world, "upside_down"))
    assert "does the right answer score well?" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"rm_type": "math", "custom_rm_path": None},
        {"use_wandb": True, "wandb_mode": "offline"},
        {"use_tensorboard": True, "tb_project_name": "p"},
    ],
)
def test_a_missing_package(start, monkeypatch, changes):
    monkeypatch.setattr("slime.preflight.packages.is_installed", lambda name: False)
    monkeypatch.setattr("slime.preflight.reward.is_installed", lambda name: False)
    refused(start, "which is not installed: pip install", **changes)


def test_more_devices_than_there_are(start, monkeypatch):
    monkeypatch.setattr("slime.preflight.machine.device_count", lambda: 2)
    sizes = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2, "num_gpus_per_node": 8}
    refused(start, "4 GPUs; this machine shows 2", **sizes)


def test_more_ranks_than_cores_bear(start, monkeypatch):
    monkeypatch.setattr("slime.preflight.machine.device_count", lambda: 0)
    monkeypatch.setattr("slime.preflight.machine.num_cores", lambda: 2)
    refused(
        start,
        "processes on 2 core(s)",
        actor_num_gpus_per_node=64,
        global_batch_size=64,
        rollout_batch_size=16,
    )


def test_a_flag_of_the_other_loop(start):
    refused(start, "--update-weights-interval", "train-async", update_weights_interval=2)
    refused(start, "--colocate", "use train.py", colocate=True, main=train_async.main)


def test_a_plug_in_with_another_signature(start, world):
    refused(
        start,
        "expected fn(args, sample)",
        **rewarded(world, "Source"),
    )


def test_everything_wrong_at_once(start, world, tmp_path):
    folder = changed_model(world, tmp_path, model_type="odd")
    wrong = {"label_key": "nothere", "hf_checkpoint": folder, "update_weights_interval": 3}
    parts = ("4 problems found", "settings:", "model:", "data:", "'odd'", "'nothere'", "absent.py")
    refused(start, *parts, custom_rm_path=f"{world}/absent.py:f", **wrong)


# ---- no false refusals -------------------------------------------------------------------------------------

SFT = {"rollout_function_path": "slime.rollout.sft_rollout.generate_rollout", "loss_type": "sft_loss"}


def conversations(tmp_path, **extra):
    file = tmp_path / "talk.jsonl"
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    file.write_text(json.dumps({"input": talk, **extra}) + "\n")
    return file


def test_prompts_that_a_template_makes_of_the_columns_of_a_table(start, world, tmp_path):
    table = tmp_path / "gsm.csv"
    table.write_text('question,answer\n"6 x 7?","6 x 7\n#### 42"\n')
    made = {"prompt_data": table, "prompt_template": "Q: {question} A:", "label_key": "answer"}
    refused(start, "no column 'questoin' (--prompt-template)", **made | {"prompt_template": "Q: {questoin}"})
    passes(start, **rewarded(world, "fine", **made, label_pattern="#### (.+)"))


def test_supervised_training_needs_no_reward_and_no_label(start, tmp_path):
    no_engine = {"debug_train_only": True, "rollout_max_response_len": None}
    no_engine |= {"n_samples_per_prompt": 1, "global_batch_size": 4}
    passes(
        start, **SFT, **no_engine, prompt_data=conversations(tmp_path), custom_rm_path=None, label_key=None
    )


def test_rows_that_supervised_training_leaves_out_are_counted_before_the_start(start, tmp_path, caplog):
    def rows(*numbers_of_turns):
        talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho" * 5000}]
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps({"input": talk[:n]}) + "\n" for n in numbers_of_turns))
        return dict(SFT, prompt_data=file, custom_rm_path=None, label_key=None, debug_train_only=True)

    flags = {"rollout_max_response_len": None, "n_samples_per_prompt": 1, "global_batch_size": 4}
    refused(start, "2 of 2 rows are left out (no assistant token: 2)", **rows(1, 1), **flags)
    passes(start, **rows(1, 2), **flags)
    assert "1 of 2 rows are left out" in caplog.text
    assert "1 of 1 texts are longer than the model's context" in caplog.text


def test_preference_pairs(start, tmp_path):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}]
    passes(
        start,
        rollout_function_path="slime.rollout.preference_rollout.generate_rollout",
        loss_type="dpo_loss",
        prompt_data=conversations(tmp_path, rejected=talk),
        label_key="rejected",
        custom_rm_path=None,
        debug_train_only=True,
        rollout_max_response_len=None,
        n_samples_per_prompt=1,
        global_batch_size=4,
    )


def test_a_teacher_that_is_not_up_yet(start):
    passes(
        start,
        custom_rm_path="slime.rollout.on_policy_distillation.reward_func",
        use_opd=True,
        opd_type="engine",
        rm_url="http://127.0.0.1:9/generate",
    )


def test_a_judge_that_is_not_up_yet(start):
    passes(start, custom_rm_path=None, rm_type="remote_rm", rm_url="http://127.0.0.1:9/judge")


def test_a_generate_function_that_makes_its_own_prompts_and_rewards(start, world, tmp_path, caplog):
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"input": {"task": "x" * 5000}, "label": "1"}) + "\n")
    own = {"prompt_data": file, "custom_generate_function_path": f"{world}/rewards.py:generate"}
    passes(start, **own, **rewarded(world, "reads_what_generate_left"))
    caplog.clear()
    passes(start, **own, custom_rm_path=None)  # it may set sample.reward itself
    assert "has no reward" not in caplog.text


def test_a_data_source_of_ones_own(start, world):
    passes(
        start,
        data_source_path=f"{world}/rewards.py:Source",
        prompt_data=None,
        label_key=None,
        **rewarded(world, "none"),
    )


def test_a_rollout_function_of_ones_own(start, world):
    passes(
        start,
        rollout_function_path=f"{world}/rewards.py:rollout",
        disable_rollout_global_dataset=True,
        rollout_shuffle=None,
        label_key=None,
        prompt_data=None,
        custom_rm_path=None,
        num_rollout=1,
    )


def test_only_generating_and_only_training(start, world, tmp_path):
    passes(start, debug_rollout_only=True, **rewarded(world, "fine"))
    passes(start, load_debug_rollout_data=str(tmp_path / "{rollout_id}.pt"), custom_rm_path=None)


def test_engines_that_somebody_else_runs(start, world):
    passes(start, rollout_external_engine_addrs=["127.0.0.1:9"], **rewarded(world, "fine"))


def test_a_run_that_resumes_itself(start, world, tmp_path):
    passes(start, save=tmp_path / "kept", load=tmp_path / "kept", save_interval=1, **rewarded(world, "fine"))


def test_the_asynchronous_loop(start, world):
    passes(start, main=train_async.main, update_weights_interval=2, **rewarded(world, "fine"))


# ---- --dry-run and doctor ----------------------------------------------------------------------------------


def tree(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("main", [train.main, train_async.main])
def test_a_dry_run_says_that_a_run_can_start_and_writes_nothing(start, world, tmp_path, main):
    before = tree(tmp_path)
    code, printed = start(
        "--dry-run", main=main, save=tmp_path / "kept", save_interval=1, **rewarded(world, "fine")
    )
    assert code == 0 and "ready: `" in printed and "slime train" in printed and "40 prompts" in printed
    assert tree(tmp_path) == before


def test_a_dry_run_of_a_wrong_run_lists_everything_and_fails(start, world, tmp_path):
    before = tree(tmp_path)
    code, printed = start("--dry-run", label_key="nothere", update_weights_interval=2)
    assert code == 2 and tree(tmp_path) == before
    assert "'nothere'" in printed and "--update-weights-interval" in printed
    assert "2 problems found; nothing was started." in printed
    told = start(label_key="nothere", update_weights_interval=2, main=doctor.main)
    assert told[0] == 2 and "2 problems found; nothing was started." in told[1]


def test_a_dry_run_leaves_the_folder_of_an_earlier_run_alone(start, world, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    before = tree(tmp_path)
    assert start("--dry-run", **rewarded(world, "fine"))[0] == 0
    assert tree(tmp_path) == before


def test_a_dry_run_says_which_folders_the_run_would_not_get(start, tmp_path):
    (tmp_path / "empty").mkdir()
    before = tree(tmp_path)
    code, printed = start(
        "--dry-run", load=tmp_path / "empty", skip_preflight=["reward", "lengths", "machine"]
    )
    assert code == 2 and "1 problem found; nothing was started." in printed
    assert f"--load {tmp_path / 'empty'} holds no complete checkpoint" in printed
    assert tree(tmp_path) == before
