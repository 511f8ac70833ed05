"""Each mistake that can be known before the start is found there, with everything else that is wrong."""

import json
import shutil
import socket
import sys

import pytest
from argument_helpers import parse
from external_router import OtherRouter
from patience import PATIENCE_S
from tiny_model import make_tiny_model, make_tiny_tokenizer

from slime.engines.sglang import environment
from slime.preflight import packages
from slime.preflight.all_checks import CHECKS, preflight
from slime.preflight.findings import Finding, Report
from slime.preflight.machine import weights_bytes
from slime.utils.machine import shm

ROWS = [{"input": f"{n}+{n}=", "label": str(2 * n), "metadata": {}} for n in range(20)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def look(model, tmp_path, monkeypatch):
    monkeypatch.setattr("slime.preflight.reward.DEADLINE_S", PATIENCE_S)  # a busy machine is no slow reward
    monkeypatch.setattr("slime.preflight.reward.WORKER_DEADLINE_S", PATIENCE_S)

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
    "asks_for_what_no_sample_has": "def f(args, sample):\n    return sample.answer == sample.label\n",
    "misspelt": "async def f(args, sample):\n    return lenght(sample.response)\n",
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
    assert "all 20 prompts" in error and "--rollout-max-prompt-len 1;" in error


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


def test_a_family_that_was_not_compared_needs_a_flag(look, changed_model):
    folder = changed_model(model_type="doge")
    [error] = errors(look(hf_checkpoint=str(folder)))
    assert f"--hf-checkpoint: {folder} is a doge: slime's training of this family was never compared" in error
    assert f"slime verify-model --hf-checkpoint {folder}" in error and "--allow-unverified-model" in error
    assert errors(look(hf_checkpoint=str(folder), allow_unverified_model=True)) == []
    assert errors(look(hf_checkpoint=str(folder), debug_rollout_only=True)) == []


def test_a_tokenizer_of_another_model(look, changed_model):
    [error] = errors(look(hf_checkpoint=str(changed_model(vocab_size=3))))
    assert "vocabulary ends at 2" in error


def test_a_value_of_the_config_that_no_model_has_is_no_fault_of_the_tokenizer(look, changed_model):
    [error] = errors(look(hf_checkpoint=str(changed_model(dtype="float7"))))
    assert "config.json is refused by transformers" in error and "float7" in error


def test_weights_that_are_not_there_or_not_whole(look, changed_model):
    folder = changed_model()
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for content, why in (
        (whole[:-1], "is not a complete safetensors file"),
        (b"", "is not a complete safetensors file"),
        (b"\xff" * 200, "is not a complete safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "pointer of git-lfs"),
    ):
        file.write_bytes(content)
        [error] = errors(look(hf_checkpoint=str(folder)))
        assert "model.safetensors" in error and why in error
    file.unlink()
    [error] = errors(look(hf_checkpoint=str(folder)))
    assert "holds no weights" in error
    names = {"a": "model-00001-of-00001.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    [error] = errors(look(hf_checkpoint=str(folder)))
    assert "00001-of-00001.safetensors: there is no such file" in error


def make_interpreter(folder, *packages):
    """Make a Python that has these packages, each `name==version`, and no others."""
    folder.mkdir()
    for name, _, version in (package.partition("==") for package in packages):
        (made := folder / f"{name.replace('-', '_')}-{version}.dist-info").mkdir()
        (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize(
    ("theirs", "changes", "refused"),
    [
        ("nvidia-nccl-cu13==2.29.1", {}, True),
        ("nvidia-nccl-cu12==2.28.9", {}, False),
        ("torch==2.14.1", {}, False),  # a torch with an NCCL of its own: nothing is known
        ("nvidia-nccl-cu13==2.29.1", {"update_weight_transport": "distributed"}, True),
        (
            "nvidia-nccl-cu13==2.29.1",
            {"update_weight_transport": "disk", "update_weight_disk_dir": "weights"},
            False,
        ),
        ("nvidia-nccl-cu13==2.29.1", {"colocate": True}, False),
    ],
)
def test_two_versions_of_nccl_are_refused_where_both_would_be_in_one_group(
    theirs, changes, refused, tmp_path, monkeypatch
):
    for module in (environment, packages):
        monkeypatch.setattr(module, "visible_gpus", lambda: 2)
    other = make_interpreter(tmp_path / "theirs", theirs, "sglang==9.9.9")
    args = parse(rollout_engine="sglang", sglang_python=other, **changes)
    ours = make_interpreter(tmp_path / "ours", "nvidia-nccl-cu13==2.28.9")
    monkeypatch.setattr(environment.sys, "executable", ours)
    found = [str(finding) for finding in packages.check_engine_packages(args)]
    assert len(found) == refused
    if refused:
        assert "nvidia-nccl-cu13==2.28.9) and SGLang (nvidia-nccl-cu13==2.29.1)" in found[0]
        assert (
            found[0].startswith("--update-weight-transport: ") and "disk --update-weight-disk-dir" in found[0]
        )


def test_engines_that_prefill_need_a_package_that_sends_their_cache_and_on_a_cpu_tcp(tmp_path, monkeypatch):
    def found(python: str, gpus: int, backend: str | None = None) -> list[str]:
        monkeypatch.setattr(environment, "visible_gpus", lambda: gpus)
        args = parse(rollout_engine="sglang", sglang_python=python, rollout_num_gpus=2, prefill_num_servers=1)
        vars(args)["sglang_disaggregation_transfer_backend"] = backend  # as the flag does
        return [str(finding) for finding in packages.check_engine_packages(args)]

    # Neither SGLang nor its router is asked for its flags.
    for name in ("need_router_python", "read_router_flags", "_check_overrides"):
        monkeypatch.setattr(f"slime.arguments.groups.topology.{name}", lambda *given: [])
    without = make_interpreter(tmp_path / "without", "sglang==9.9.9")
    has_it = make_interpreter(tmp_path / "has_it", "mooncake-transfer-engine-cuda13==0.3", "sglang==9.9.9")
    assert found(has_it, 2) == []
    assert found(has_it, 0)[0].endswith(
        "by mooncake, which needs GPUs; on a CPU add --sglang-disaggregation-transfer-backend mooncake_tcp, "
        "or use regular engines"
    )
    assert found(has_it, 0, "mooncake_tcp") == []
    assert found(without, 2)[0].endswith(f"lacks: `{without} -m pip install mooncake-transfer-engine`")
    assert found(without, 0, "mooncake_tcp")[0].endswith("pip install mooncake-transfer-engine-non-cuda`")


def test_missing_packages(look, monkeypatch):
    monkeypatch.setattr("slime.preflight.packages.is_installed", lambda name: False)
    found = errors(look(rm_type="math", use_tensorboard=True))
    assert any("--rm-type math" in e and "pip install 'slime-rl[math]'" in e for e in found)
    assert any("--use-tensorboard" in e for e in found)


def test_everything_wrong_is_listed_at_once(look, changed_model, monkeypatch):
    monkeypatch.setattr("slime.preflight.packages.is_installed", lambda name: False)
    report = look(
        label_key="answer", use_tensorboard=True, hf_checkpoint=str(changed_model(model_type="odd"))
    )
    assert len(report.of("error")) >= 3
    with pytest.raises(ValueError, match=r"problems found; nothing was started:\npackages:\n  error: "):
        report.raise_errors()


def test_a_check_that_needs_what_is_missing_is_left_out(look):
    found = errors(look(label_key="answer"))
    assert len(found) == 1, found


def test_the_checks_need_only_what_comes_before_them():
    seen = []
    for name, row in CHECKS.items():
        assert set(row.needs) <= set(seen)
        seen.append(name)


def test_lines_are_grouped_and_begin_with_errors():
    found = (
        Finding("note", "a", "x", "data"),
        Finding("error", "b", "y", "data"),
        Finding("warning", "c", "z", "m"),
    )
    assert Report(found).lines() == ["data:", "  error: b: y", "  note: a: x", "m:", "  warning: c: z"]


# ---- rewards that cannot be tried, or must not be ----------------------------------------------------------


def reward_file(tmp_path, code):
    (tmp_path / "own_reward.py").write_text(code)
    return {"custom_rm_path": f"{tmp_path}/own_reward.py:f", "rm_type": None}


def test_a_reward_that_does_not_answer_is_given_up_with_a_warning(look, tmp_path, monkeypatch):
    code = "import threading\n\ndef f(args, sample):\n    threading.Event().wait()\n"
    own = reward_file(tmp_path, code)
    monkeypatch.setattr("slime.preflight.reward.DEADLINE_S", 0.05)
    report = look(**own)
    assert errors(report) == []
    assert "did not return in time" in str(report.of("warning")[0])
    assert "--skip-preflight reward" in str(report.of("warning")[0])


@pytest.mark.parametrize(
    "code",
    [
        "async def f(args, sample):\n    raise ConnectionError('judge is down')\n",
        "from slime.utils.types import infra_error\ndef f(args, sample):\n    return infra_error('down')\n",
        "def f(args, sample):\n    return float(sample.response.split('####')[1])\n",
    ],
)
def test_a_reward_that_may_work_in_the_run_is_a_warning(look, tmp_path, code):
    report = look(**reward_file(tmp_path, code))
    assert errors(report) == [] and len(report.of("warning")) == 1


@pytest.mark.parametrize(
    "code",
    [
        "def f(args, sample):\n    return 1.0 / args.sglang_router_port\n",
        "from slime.rollout.sglang_rollout import get_model_url\n"
        "async def f(args, sample):\n    return len(get_model_url(args, 'judge'))\n",
        "def f(args, sample):\n    return args.max_context_len - 1\n",
    ],
)
def test_a_reward_that_asks_the_engines_of_the_run_is_left_to_the_run(look, tmp_path, code):
    report = look(**reward_file(tmp_path, code))
    assert errors(report) == [] and report.of("warning") == []
    assert any("which only a run knows" in str(note) for note in report.of("note"))


def test_what_a_reward_writes_into_the_run_folder_goes_elsewhere(look, tmp_path):
    code = "def f(args, sample):\n    open(args.run_dir + '/x', 'w').close()\n    return len(sample.prompt)\n"
    assert errors(look(**reward_file(tmp_path, code))) == []
    assert not (tmp_path / "run").exists()


def test_a_reward_that_must_not_be_called_is_not(look, tmp_path):
    code = f"def f(args, sample):\n    open('{tmp_path}/paid', 'w').close()\n"
    report = look("--skip-preflight", "reward", **reward_file(tmp_path, code))
    assert errors(report) == [] and not (tmp_path / "paid").exists()


def test_a_group_reward_of_the_wrong_number(look, tmp_path):
    own = reward_file(tmp_path, "def f(args, samples):\n    return [1.0]\n")
    [error] = errors(look(group_rm=True, **own))
    assert "returned 1 rewards for 2 samples" in error
    own = reward_file(
        tmp_path, "def f(args, samples):\n    return [float(s.response == s.label) for s in samples]\n"
    )
    (tmp_path / "own_reward.py").rename(tmp_path / "second.py")
    own["custom_rm_path"] = f"{tmp_path}/second.py:f"
    report = look(group_rm=True, **own)
    assert report.of("error") == report.of("warning") == []


def test_a_defect_of_a_look_keeps_no_run_from_starting(look, monkeypatch):
    monkeypatch.setattr("slime.preflight.prompts.measure", lambda args, count: 1 / 0)
    report = look()
    assert errors(report) == []
    assert "ZeroDivisionError" in str(report.of("warning")[0])


def test_both_keys_that_are_wrong_are_told(look):
    found = errors(look(label_key="answer", input_key="question"))
    assert [error.split(":")[0] for error in found] == ["--input-key", "--label-key"]


def test_the_first_prompts_of_a_long_file_are_no_reason_to_refuse_it(look, monkeypatch):
    monkeypatch.setattr("slime.preflight.prompts.LOOKED_AT", 5)
    report = look(rollout_max_prompt_len=1)
    assert errors(report) == [] and "all 5 prompts" in str(report.of("warning")[0])


def test_a_taken_port(look):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        [error] = errors(look(sglang_router_port=taken.getsockname()[1]))
    assert "--sglang-router-port" in error


def test_a_folder_that_ray_removes_with_its_job(look, tmp_path):
    folder = tmp_path / "session_1/runtime_resources/working_dir_files/_ray_pkg_1"
    [error] = errors(look(run_dir=f"{folder}/runs/a", save=str(tmp_path / "kept")))
    assert "--run-dir" in error and "is removed with this job: give an absolute path" in error


def test_shared_memory_too_small_for_two_versions_of_the_weights_is_a_warning(look, model, monkeypatch):
    disk, size = shutil.disk_usage("/")._replace(free=1 << 40), weights_bytes(str(model))
    for share, told in ((2.1, []), (1.5, ["--update-weight-transport"])):
        memory = disk._replace(free=int(share * size))
        usage = {shm.FOLDER: memory}
        monkeypatch.setattr("slime.preflight.machine.shutil.disk_usage", lambda f, u=usage: u.get(f, disk))
        assert [finding.subject for finding in look().of("warning")] == told


def test_more_gpus_than_there_are(look, monkeypatch):
    monkeypatch.setattr("slime.preflight.machine.device_count", lambda: 2)
    assert errors(look()) == []
    [error] = errors(look(rollout_num_gpus=2))
    assert "are 3 GPUs; this machine shows 2" in error


def test_more_ranks_than_any_core_bears(look, monkeypatch):
    monkeypatch.setattr("slime.preflight.machine.num_cores", lambda: 2)
    [error] = errors(look(actor_num_gpus_per_node=64, num_gpus_per_node=64))
    assert "65 processes on 2 core(s)" in error


def test_an_added_token_beyond_the_vocabulary_is_a_warning(look, changed_model):
    folder = changed_model(vocab_size=100)
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(["<|never used|>"])
    tokenizer.save_pretrained(folder)
    report = look(hf_checkpoint=str(folder))
    assert errors(report) == []
    assert "token ids up to 100" in str(report.of("warning")[0])


def test_a_dict_needs_its_key(look, tmp_path):
    own = reward_file(
        tmp_path, "def f(args, sample):\n    return {'score': float(sample.response == sample.label)}\n"
    )
    assert "--reward-key is not set" in errors(look(**own))[0]
    assert errors(look(reward_key="score", **own)) == []


def test_a_reward_that_an_end_token_confuses(look, tmp_path):
    own = reward_file(tmp_path, "def f(args, sample):\n    return float(sample.response == sample.label)\n")
    [warning] = look(**own).of("warning")
    assert "it gives 1 for '0' and 0 for '0<|im_end|>'" in str(warning)
    assert look("--rollout-skip-special-tokens", **own).of("warning") == []


def test_a_router_of_others_must_be_there_and_have_no_engines_of_others(look):
    given = {"rollout_engine": "sglang", "sglang_python": sys.executable, "sglang_router_ip": "127.0.0.1"}
    with OtherRouter() as other:
        given["sglang_router_port"] = other.port
        assert errors(look(**given)) == []
        other.workers["http://a:1"] = {"url": "http://a:1", "id": "0"}
        (found,) = errors(look(**given))
        assert "has engines already (http://a:1), whose answers would mix with" in found
    (found,) = errors(look(**given))
    assert found.startswith("--sglang-router-ip: no router replies at 127.0.0.1:")
