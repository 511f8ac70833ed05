"""Every algorithm flag, in many runs: it changes what the trainer computes, or
it is refused. Never accepted and ignored.
"""

import dataclasses

import pytest
import torch
from argument_helpers import parse
from tiny_model import make_tiny_model
from trainer_helpers import random_samples

from slime.arguments.groups.algorithm import AlgorithmFlags
from slime.arguments.groups.objectives import CriticFlags, DistillationFlags, KeptPolicyFlags, PreferenceFlags
from slime.arguments.groups.off_policy import OffPolicyFlags
from slime.backends.fsdp import create_backend
from slime.backends.fsdp.model import gather_full
from slime.backends.shared.old_policy import old_policy_of
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.catalog.estimators import ESTIMATORS
from slime.catalog.policy_losses import POLICY_LOSSES
from slime.step.training_step import TrainingStep

pytestmark = pytest.mark.usefixtures("process_group")

PLUGINS = '''
"""One function of each kind; each reads the flags that a function in its place may read."""
import torch


def knobs(args, *names):
    return 1 + sum(float(getattr(args, name) or 0) for name in names)


def advantages(args, rollout_data):
    scale = knobs(args, "gamma", "lambd", "kl_coef") * 0.1
    signs = [1 if i % 2 else -1 for i in range(len(rollout_data["response_lengths"]))]
    kl = rollout_data["kl"]
    rollout_data["advantages"] = [scale * s + k.new_zeros(len(k)) for s, k in zip(signs, kl)]
    rollout_data["advantages"] = [a + r for a, r in zip(rollout_data["advantages"], rollout_data["rewards"])]
    rollout_data["returns"] = rollout_data["advantages"]


def policy(args, inputs):
    scale = knobs(args, "eps_clip", "eps_clip_high", "eps_clip_c") + sum(args.policy_loss_args.values())
    return -(inputs.log_probs - inputs.old_log_probs) * inputs.advantages * scale, {}


def reducer(total_lengths, response_lengths, loss_masks, per_token):
    return lambda values: values.sum() / 100


def weights(args, *, pg_loss, loss_masks, **_):
    return pg_loss * knobs(args, "tis_clip", "tis_clip_low"), loss_masks, {"halved": torch.ones_like(pg_loss)}


def loss(args, batch, logits, reduce):
    lists = ("log_probs", "ref_log_probs", "values", "advantages", "returns", "rewards")
    used = [torch.as_tensor(v).abs().sum() for key in lists for v in batch.get(key, ())]
    clips = ("eps_clip", "eps_clip_high", "eps_clip_c")
    scale = knobs(args, *clips, "entropy_coef", "kl_loss_coef", "use_unbiased_kl")
    scale = scale + len(args.kl_loss_type) * args.use_kl_loss * ord(args.kl_loss_type[1])
    masked = reduce(torch.cat(batch["loss_masks"]).float())
    return logits.square().mean() * (scale + sum(used)) + masked * 0.1, {}


def rewards(args, samples):
    return [s.reward for s in samples], [s.reward * 0.5 + 0.1 for s in samples]
'''

# A value of each flag that is meant to do something. FOLDER stands for a folder of the test.
VALUES = {
    "loss_type": "sft_loss",
    "custom_loss_function_path": "FOLDER/plugins.py:loss",
    "advantage_estimator": "rloo",
    "custom_advantage_function_path": "FOLDER/plugins.py:advantages",
    "policy_loss_type": "sapo",
    "custom_policy_loss_function_path": "FOLDER/plugins.py:policy",
    "loss_reduction": "sample_mean",
    "custom_pg_loss_reducer_function_path": "FOLDER/plugins.py:reducer",
    "compute_advantages_and_returns": False,
    "normalize_advantages": True,
    "rewards_normalization": False,
    "grpo_std_normalization": False,
    "gamma": 0.5,
    "lambd": 0.5,
    "eps_clip": 0.02,
    "eps_clip_high": 0.01,
    "eps_clip_c": 1.02,
    "policy_loss_args": "sapo_tau_pos=3,sapo_tau_neg=4",
    "entropy_coef": 0.2,
    "kl_coef": 0.3,
    "use_kl_loss": True,
    "kl_loss_coef": 0.3,
    "kl_loss_type": "k2",
    "use_unbiased_kl": True,
    "use_rollout_logprobs": True,
    "use_rollout_entropy": True,
    "use_tis": True,
    "tis_clip": 1.01,
    "tis_clip_low": 0.99,
    "tis_level": "geometric",
    "tis_mode": "mask",
    "custom_tis_function_path": "FOLDER/plugins.py:weights",
    "use_rs": True,
    "rs_level": "sequence",
    "rs_upper": 1.05,
    "rs_lower": 0.95,
    "rs_veto": 0.9,
    "use_opsm": True,
    "opsm_delta": 0.5,
    "get_mismatch_metrics": True,
    "ref_update_interval": 1,
    "keep_old_actor": True,
    "reset_optimizer_states": True,
    "use_stateless_adam": True,
    "critic_load": "FOLDER/other",
    "critic_lr": 0.5,
    "critic_lr_warmup_iters": 2,
    "value_clip": 1e-3,
    "num_critic_only_steps": 1,
    "use_opd": True,
    "opd_type": "trainer",
    "opd_kl": "full",
    "opd_kl_coef": 0.2,
    "opd_top_k": 3,
    "opd_teacher_load": "FOLDER/third",
    "opd_teacher_ckpt_step": 3,
    "dpo_beta": 0.7,
    "overlong_buffer_len": 12,
    "custom_reward_post_process_path": "FOLDER/plugins.py:rewards",
}
# These act only when something goes wrong.
GUARDS = {
    "skip_on_policy_check",
    "logprob_diff_threshold",
    "nonfinite_action",
}
# A recipe of supervised losses may say what holds for them anyway.
SAID = {("sft", "compute_advantages_and_returns"), ("dpo", "compute_advantages_and_returns")}
# A file of other flags: what it says of a role is read with them.
FILES = {"megatron_config_path"}
GROUPS = (AlgorithmFlags, OffPolicyFlags, KeptPolicyFlags, CriticFlags, DistillationFlags, PreferenceFlags)

WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
PAIRS = {"n_samples_per_prompt": 1, "rollout_batch_size": 8}
CUSTOM = {"loss_type": "custom_loss", "custom_loss_function_path": "FOLDER/plugins.py:loss"}
OPD = {"use_opd": True, "opd_type": "trainer", "opd_teacher_load": "FOLDER/other"}
RUNS = {
    # gdpo needs rewards with components, see tests/batch/test_gdpo.py
    **{n: {"advantage_estimator": n} for n in ESTIMATORS if "reinforce" not in n and n != "gdpo"},
    **{name: {"advantage_estimator": name, "normalize_advantages": True} for name in WHITENED},
    **{f"loss {name}": {"policy_loss_type": name} for name in POLICY_LOSSES},
    "constant": {"loss_reduction": "constant"},
    "kl loss": {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3"},
    "unbiased kl loss": {"use_kl_loss": True, "kl_loss_coef": 0.2, "use_unbiased_kl": True},
    "weights": {"use_tis": True},
    "custom weights": {"use_tis": True, "custom_tis_function_path": "FOLDER/plugins.py:weights"},
    "custom policy": {"custom_policy_loss_function_path": "FOLDER/plugins.py:policy"},
    "rejection": {"use_rs": True},
    "sequence mask": {"use_opsm": True},
    "engine's old policy": {"use_rollout_logprobs": True},
    "long": {"overlong_buffer_len": 12},
    "custom advantages": {"custom_advantage_function_path": "FOLDER/plugins.py:advantages"},
    "ppo with kl": {"advantage_estimator": "ppo", "kl_coef": 0.1},
    "distillation": OPD,
    "sft": {"loss_type": "sft_loss", **PAIRS},
    "dpo": {"loss_type": "dpo_loss", **PAIRS},
    "custom": CUSTOM,
    "custom without advantages": {**CUSTOM, "compute_advantages_and_returns": False},
    "custom with kl": {**CUSTOM, "use_kl_loss": True},
    "custom ppo": {**CUSTOM, "advantage_estimator": "ppo"},
}
QUICK = ("weights", "custom ppo", "sft")  # "weights" is GRPO and accepts what "grpo" does


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("effects")
    for name, seed in (("model", 0), ("other", 1), ("third", 2)):
        make_tiny_model(path / name, layers=1, hidden=16, seed=seed, init_std=0.3)
    (path / "plugins.py").write_text(PLUGINS)
    return path


def words(folder, settings):
    """The settings as a command line has them."""
    found = []
    for name, value in settings.items():
        option = "--" + name.replace("_", "-")
        if value is False:
            found.append(option.replace("--", "--disable-", 1))
        else:
            found += [option] if value is True else [option, str(value).replace("FOLDER", str(folder))]
    return found


def settings_of(folder, settings):
    base = {"hf_checkpoint": folder / "model", "dtype": "float32", "num_steps_per_rollout": 2, "lr": 0.05}
    base |= {name: settings[name] for name in PAIRS if name in settings}
    rest = {name: value for name, value in settings.items() if name not in base}
    return parse("--micro-batch-size", "8", "--strict", *words(folder, rest), **base)


def samples_for(args):
    """Four groups of two with siblings among them, or eight answers or pairs; the
    engine's log-probs are near the trainer's.
    """
    pairs = args.loss_type == "dpo_loss"
    samples = random_samples(8, 2 if pairs else 1) if args.n_samples_per_prompt == 1 else random_samples(4, 2)
    generator = torch.Generator().manual_seed(3)
    for i, sample in enumerate(samples):
        noise = torch.randn(sample.response_length, generator=generator)
        sample.rollout_log_probs = (-5.0 + noise.clamp(-3, 3)).tolist()
        sample.version_spans = [("run:1", 0, sample.response_length)]
        sample.metadata = {"greedy_reward": 0.5}
        sample.rollout_id = i // 2 if pairs else i
        sample.reward = 1.0 - i % 2 if pairs else (0.0, 2.0, 1.0, 0.0, 2.0, 0.0, 1.0, 2.0)[i]
    if not pairs:
        samples.append(
            dataclasses.replace(samples[0], index=99, tokens=[*samples[0].tokens[:-1], 7, 8], reward=2.0)
        )
        samples[-1].response_length = samples[0].response_length + 1
        samples[-1].rollout_log_probs = [-4.0] * samples[-1].response_length
        samples[-1].loss_mask = None
        samples[-1].version_spans = [("run:1", 0, samples[-1].response_length)]
    return samples


def outcome(args):
    """All that two rollouts on the same samples, of two optimizer steps each, tell and leave behind."""
    torch.manual_seed(0)
    backend = create_backend(args, rank=0, world_size=1, device="cpu")
    kept = old_policy_of(args, backend)
    if kept is not None:
        kept.note_push(1)
    found = []
    for rollout_id in range(2):
        data = split_for_ranks(args, samples_to_batch(args, samples_for(args)), 1)[0]
        metrics = TrainingStep(backend, args, rollout_id, data, kept=kept).run().summary
        found.append({name: value for name, value in metrics.items() if not name.startswith("perf/")})
    models = [backend.model.lm, *([backend.critic.model.lm] if backend.critic is not None else [])]
    weights = torch.cat([gather_full(p.data).flatten() for lm in models for p in lm.parameters()])
    return found, weights.tolist()


def test_every_algorithm_flag_has_a_value_here():
    declared = {field.name for group in GROUPS for field in dataclasses.fields(group)} - {
        "calculate_per_token_loss"
    }
    assert declared - VALUES.keys() - GUARDS - FILES == set()


@pytest.mark.parametrize(
    "run", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in RUNS]
)
def test_a_flag_changes_what_is_computed_or_is_refused(folder, run):
    settings = RUNS[run]
    expected = outcome(settings_of(folder, settings))
    ignored, accepted = [], []
    for name, value in VALUES.items():
        if name in settings:
            continue
        try:
            args = settings_of(folder, {**settings, name: value})
        except ValueError:
            continue
        accepted.append(name)
        if outcome(args) == expected and (run, name) not in SAID:
            ignored.append(name)
    assert ignored == []
    assert len(accepted) > 3  # else the comparison would be empty
