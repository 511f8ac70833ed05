"""`--megatron-config-path`: settings of the policy alone and of the critic alone."""

import pytest
from argument_helpers import parse

from slime.backends.shared.model_roles import critic_settings

PPO = ("--advantage-estimator", "ppo")


def write(tmp_path, text: str) -> str:
    file = tmp_path / "roles.yaml"
    file.write_text(text)
    return str(file)


def roles(tmp_path, *rows: str, estimator=PPO):
    text = "megatron:\n" + "".join(f"  - {row}\n" for row in rows)
    return parse("--megatron-config-path", write(tmp_path, text), *estimator)


def test_each_role_has_its_own_rates_and_optimizer(tmp_path):
    args = roles(
        tmp_path,
        "{name: a, role: actor, overrides: {lr: 1e-6, weight_decay: 0.2}}",
        "{name: b, role: critic, args: {lr: 1e-5, clip_grad: 0.5, adam_beta2: 0.9, num_nodes: 1}}",
    )
    assert (args.lr, args.weight_decay, args.critic_lr, args.clip_grad) == (1e-6, 0.2, 1e-5, 1.0)
    critic = critic_settings(args)
    assert (critic.lr, critic.weight_decay, critic.adam_beta2, critic.clip_grad) == (1e-5, 0.2, 0.9, 0.5)
    assert args.adam_beta2 != 0.9
    assert any("num_nodes in" in text and "processes of the policy" in text for text in args.warnings)


def test_a_critic_has_a_model_of_its_own(tmp_path):
    critic = critic_settings(roles(tmp_path, "{role: critic, overrides: {hf_checkpoint: owner/small}}"))
    assert critic.hf_checkpoint == critic.start_from == "owner/small"
    release = tmp_path / "small_torch_dist" / "release"
    release.mkdir(parents=True)
    (release / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (release / ".metadata").write_text("")
    settings = f"{{hf_checkpoint: owner/small, load: {release.parent}, lr: 0.001}}"
    critic = critic_settings(roles(tmp_path, f"{{role: critic, overrides: {settings}}}"))
    assert (critic.hf_checkpoint, critic.start_from, critic.lr) == ("owner/small", str(release), 0.001)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["{role: judge}"], r"megatron\[0\]: role is 'judge'; there are actor and critic"),
        (["{role: critic}", "{role: critic}"], "a second critic"),
        (["{role: critic, sizes: 3}"], "it may have name, role and overrides"),
        (["{role: critic, overrides: 3}"], "overrides are 3"),
        (["{role: critic, overrides: {no_such_flag: 3}}"], "no_such_flag"),
        (["{role: critic, overrides: {lr: fast}}"], "fast"),
        (
            ["{role: critic, overrides: {tensor_model_parallel_size: 2}}"],
            "critic's tensor_model_parallel_size is 2",
        ),
        (
            ["{role: critic, overrides: {global_batch_size: 64}}"],
            "critic's global_batch_size is 64, the policy's",
        ),
    ],
)
def test_what_a_role_cannot_have_is_refused_by_name(tmp_path, rows, said):
    with pytest.raises(ValueError, match=said):
        roles(tmp_path, *rows)


def test_a_critic_is_refused_where_none_trains(tmp_path):
    with pytest.raises(
        ValueError, match="settings of a critic, which is trained only with --advantage-estimator ppo"
    ):
        roles(tmp_path, "{role: critic, overrides: {lr: 0.1}}", estimator=())


@pytest.mark.parametrize("text", ["actor: {lr: 1}", "megatron: 3", "- 1", ": :"])
def test_a_file_of_another_form_is_named(tmp_path, text):
    with pytest.raises(ValueError, match=r"--megatron-config-path .*roles.yaml"):
        parse("--megatron-config-path", write(tmp_path, text), *PPO)
    with pytest.raises(ValueError, match="there is no such file"):
        parse("--megatron-config-path", str(tmp_path / "none.yaml"), *PPO)
