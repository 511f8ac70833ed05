"""What the algorithm flags imply and exclude: each combination gives a derived value or one clear error."""

import pickle

import pytest
from argument_helpers import parse

CUSTOM = {
    "loss_type": "custom_loss",
    "custom_loss_function_path": "a.b",
    "disable_compute_advantages_and_returns": True,
}


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({}, "policy_loss_type", "ppo"),
        ({"advantage_estimator": "gspo"}, "policy_loss_type", "gspo"),
        ({"advantage_estimator": "gspo", "policy_loss_type": "sapo"}, "policy_loss_type", "sapo"),
        ({}, "loss_reduction", "rollout_mean"),
        ({"calculate_per_token_loss": True}, "loss_reduction", "token_mean"),
        ({"loss_reduction": "token_mean"}, "calculate_per_token_loss", True),
        ({"advantage_estimator": "dr_grpo"}, "loss_reduction", "constant"),
        (
            {"advantage_estimator": "dr_grpo", "calculate_per_token_loss": True},
            "loss_reduction",
            "token_mean",
        ),
        ({"n_samples_per_prompt": 1, "loss_type": "sft_loss"}, "grpo_std_normalization", False),
        ({"n_samples_per_prompt": 1, "rollout_function_path": "a.b"}, "grpo_std_normalization", False),
        ({"n_samples_per_prompt": 1, "advantage_estimator": "remax"}, "rewards_normalization", True),
        ({"n_samples_per_prompt": 1, "debug_rollout_only": True}, "rewards_normalization", True),
        ({"use_rs": True, "rs_upper": 4.0}, "rs_lower", 0.25),
        ({"use_opsm": True, "num_steps_per_rollout": 2}, "use_opsm", True),
        ({"custom_advantage_function_path": "a.b", "kl_coef": 0.1}, "kl_coef", 0.1),
    ],
)
def test_a_value_follows_from_the_others(changes, name, value):
    assert getattr(parse(**changes), name) == value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"n_samples_per_prompt": 1},
            "--n-samples-per-prompt is 1 with .* grpo: .* no standard deviation to divide by",
        ),
        ({"n_samples_per_prompt": 1, "advantage_estimator": "rloo"}, "rloo: .* nothing to be compared with"),
        ({"use_tis": True, "use_rollout_logprobs": True}, "--use-tis corrects from the engine's policy"),
        ({"use_tis": True, "tis_clip_low": 3.0}, "--tis-clip-low is 3, above --tis-clip 2"),
        ({"use_rs": True, "rs_lower": 3.0}, "--rs-lower is 3, above --rs-upper 2"),
        ({"loss_reduction": "sample_mean", "calculate_per_token_loss": True}, "asks for token_mean"),
        (
            {
                "loss_reduction": "constant",
                "rollout_max_response_len": None,
                "custom_generate_function_path": "a.b",
            },
            "divides by --rollout-max-response-len",
        ),
        ({"overlong_buffer_len": 17}, "--overlong-buffer-len is 17, but --rollout-max-response-len is 16"),
        (
            {"kl_coef": 0.1, "advantage_estimator": "rloo"},
            "rloo never subtracts a KL from the reward; use --use-kl-loss",
        ),
        (
            {"disable_compute_advantages_and_returns": True},
            "leaves --loss-type policy_loss without advantages",
        ),
        (
            {**CUSTOM, "gamma": 0.9, "advantage_estimator": "ppo"},
            "--advantage-estimator is ppo, but it has an effect only without --disable-compute",
        ),
        (
            {**CUSTOM, "use_rollout_logprobs": True},
            "only with --loss-type policy_loss or without --disable-compute",
        ),
        ({"advantage_estimator": "maxrl", "overlong_buffer_len": 4}, "maxrl divides by the mean reward"),
        (
            {"gamma": 0.9, "strict": True},
            "--gamma is 0.9, but it has an effect only with --advantage-estimator ppo",
        ),
        (
            {"advantage_estimator": "rloo", "disable_grpo_std_normalization": True},
            "is set, but it has an effect only with --advantage-estimator grpo, gspo, cispo or gdpo",
        ),
        (
            {"advantage_estimator": "ppo", "disable_rewards_normalization": True},
            "--disable-rewards-normalization is set, but it has an effect only with --advantage-estimator",
        ),
        (
            {"custom_reward_post_process_path": "a.b", "disable_rewards_normalization": True},
            "only without --custom-reward-post-process-path",
        ),
        (
            {"loss_type": "sft_loss", "n_samples_per_prompt": 1, "advantage_estimator": "rloo"},
            "--advantage-estimator is rloo, but it has an effect only without --loss-type sft_loss",
        ),
        (
            {"loss_type": "custom_loss", "custom_loss_function_path": "a.b", "use_rollout_entropy": True},
            "only with --loss-type policy_loss",
        ),
        ({"lambd": 0.9}, "--lambd is 0.9, but it has an effect only with --advantage-estimator ppo"),
        ({"policy_loss_type": "sapo", "eps_clip": 0.1}, "only with --policy-loss-type ppo"),
        (
            {"policy_loss_type": "cispo", "eps_clip_c": 3.0},
            "only with --policy-loss-type ppo or gspo",
        ),
        ({"use_tis": True, "tis_mode": "truncate", "tis_clip_low": 0.5}, "only with --tis-mode clip or mask"),
        ({"custom_tis_function_path": "a.b"}, "only with --use-tis or --get-mismatch-metrics"),
        ({"opsm_delta": 0.1}, "only with --use-opsm"),
        (
            {"use_kl_loss": True, "kl_loss_coef": 0.01},
            r"--kl-loss-type k1 \(the default\): .* does not depend on the reference.*"
            r"--kl-loss-type k3.*--use-unbiased-kl",
        ),
        (
            {"use_kl_loss": True, "kl_loss_coef": -0.01, "kl_loss_type": "k1", "advantage_estimator": "ppo"},
            "--kl-loss-type k1: .* use --kl-loss-type k3",
        ),
        *(
            (
                {**loss, "loss_reduction": reduction},
                f"--loss-reduction is {reduction} .* one ratio per sample",
            )
            for loss in (
                {"advantage_estimator": "gspo"},
                {"policy_loss_type": "gspo"},
                {"policy_loss_type": "gmpo"},
            )
            for reduction in ("token_mean", "constant")
        ),
        (
            {"policy_loss_type": "gmpo", "calculate_per_token_loss": True},
            r"token_mean \(--calculate-per-token-loss\) with",
        ),
        ({"policy_loss_type": "gspo", "advantage_estimator": "dr_grpo"}, "--loss-reduction is constant"),
        (
            {"use_opsm": True},
            "--use-opsm is set, but it has an effect only with --num-steps-per-rollout above 1",
        ),
    ],
)
def test_a_combination_is_refused_with_its_reason(changes, message):
    with pytest.raises(ValueError, match=message):
        parse(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k3"},
        {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k2"},
        {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "low_var_kl"},
        {"use_kl_loss": True, "kl_loss_coef": 0.01, "use_unbiased_kl": True},
        {"kl_coef": 0.01, "advantage_estimator": "ppo"},  # in the reward k1 is the KL itself
        {
            "loss_type": "custom_loss",
            "custom_loss_function_path": "a.b",
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
        },
        {"loss_type": "custom_loss", "custom_loss_function_path": "a.b", "use_kl_loss": True},
        {"policy_loss_type": "gspo", "loss_reduction": "sample_mean"},
        {
            "policy_loss_type": "gspo",
            "loss_reduction": "token_mean",
            "custom_pg_loss_reducer_function_path": "a.b",
        },
        {"policy_loss_type": "ppo", "loss_reduction": "token_mean"},
        {"loss_type": "sft_loss", "n_samples_per_prompt": 1, "calculate_per_token_loss": True},
    ],
)
def test_these_pass_without_a_word(changes):
    assert parse(**changes).warnings == ()


@pytest.mark.parametrize("kind", ["k1", "k3", "low_var_kl"])
def test_a_kl_loss_of_weight_zero_starts_with_a_warning(kind, caplog):
    """As launch scripts of slime have it: --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl."""
    args = parse(use_kl_loss=True, kl_loss_coef="0.00", kl_loss_type=kind)
    assert args.use_kl_loss and args.kl_loss_coef == 0
    (warning,) = args.warnings
    assert warning in caplog.text and "--kl-loss-coef 0" in warning and "pulls on nothing" in warning
    assert pickle.loads(pickle.dumps(args)).warnings == args.replace(lr=1.0).warnings == args.warnings
