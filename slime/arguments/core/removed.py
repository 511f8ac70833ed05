"""Flags that were removed from slime, with the error text that names the replacement."""

_DEADLINES = """
    custom-generate generate reward env episode judge worker-silence host hang engine-start engine-silence
    no-engine update-weight
"""
_LIMITS = {
    "group-max-attempts": "group-attempts",
    "reward-retries": "reward-retries",
    "reward-failure-limit": "reward-failures",
    "reward-num-workers": "reward-workers",
    "judge-num-requests": "judge-requests",
    "judge-max-tokens": "judge-tokens",
    "sandbox-num-boxes": "sandboxes",
    "engine-restart-limit": "engine-restarts",
    "rollout-health-check-failures": "probe-failures",
    "embedded-max-running-requests": "embedded-requests",
    "embedded-max-total-tokens": "embedded-tokens",
    "tracker-samples": "tracker-samples",
}

_LOSS_ARGS = ("sapo-tau-pos", "sapo-tau-neg", "dppo-delta")
_COVARIANCE_ARGS = ("clip-cov-ratio", "clip-cov-low", "clip-cov-high", "kl-cov-ratio", "kl-cov-coef")

REMOVED_FLAGS: dict[str, str] = {
    **{f"{name}-timeout-s": f"give it as --timeouts {name}=SECONDS" for name in _DEADLINES.split()},
    "restart-wait-s": "give it as --timeouts restart-wait=SECONDS",
    **{old: f"give it as --limits {name}=NUMBER" for old, name in _LIMITS.items()},
    **{name: f"give it as --policy-loss-args {name.replace('-', '_')}=NUMBER" for name in _LOSS_ARGS},
    **dict.fromkeys(_COVARIANCE_ARGS, "the policy losses clip_cov and kl_cov were removed; remove it"),
    **{
        f"critic-{name}": f"give {name.replace('-', '_')} to the role critic of --megatron-config-path"
        for name in ("min-lr", "lr-decay-style", "clip-grad")
    },
    "tis-batch-normalize": "importance weights are not divided by their mean; remove it",
    "router-aux-loss-coef": "only --train-backend megatron balances experts: --moe-aux-loss-coeff",
    "loss-denominator": "--loss-reduction constant always divides by --rollout-max-response-len; remove it",
    "dpo-label-smoothing": "DPO takes every preference as it is; remove it",
    "engine-restart-window-s": "the window of --limits engine-restarts is always 600 seconds; remove it",
    "show-sample-every": "a sample is always shown every 5 steps (none with --quiet); remove it",
    "env-num-items": "an environment makes 10000 items; --prompt-data env:NAME#train:N has another number",
    "log-sft-entropy": "the entropy of supervised tokens is no longer measured; remove it",
    "logits-memory-gib": "the backward pass always computes logits again; remove it",
    "weight-copies": "copies of weights are always kept in host memory; remove it",
    "no-load-verify": "checkpoints are always verified when they are loaded; remove it",
    "hub-public": "models are pushed to private repositories; make one public in its settings on the hub",
    "embedded-device": "the embedded engine runs on the GPU it was given, else on the CPU; remove it",
    "embedded-dtype": "the embedded engine computes in --dtype; remove it",
    "record-max-days": "samples leave the record by size alone: --record-max-mib",
    "record-sync": "the record is always synced to disk after each rollout and step; remove it",
    "overlong-penalty-factor": "the penalty of --overlong-buffer-len is always 1 at full length; remove it",
    "eval-env": "evaluate in another environment with --eval-prompt-data NAME env:FAMILY:TASK#heldout:N",
    "router-python": "install sglang-router into .venv-router (`make sglang-env`) or into this Python",
    "megatron-config": "give each field as a flag of its own, such as --moe-z-loss-coeff 0.001",
    "trackio-project": "set the environment variable TRACKIO_PROJECT",
    "trackio-space": "set the environment variable TRACKIO_SPACE_ID",
    "spare-samples-per-prompt": "give --over-sampling-batch-size or --partial-rollout for long tails",
    "adaptive-concurrency": "the limit is --sglang-server-concurrency per engine; remove it",
    "mlflow-tracking-uri": "set the environment variable MLFLOW_TRACKING_URI",
    "mlflow-experiment": "set the environment variable MLFLOW_EXPERIMENT_NAME",
}
