"""Flags that slime recipes use and this version does not build: refused by name, never ignored."""

UNBUILT_FLAGS = frozenset(
    """
    actor-num-cpus allgather-cp ci-disable-kl-checker ci-load-grad-norm ci-save-grad-norm ci-test
    ci-train-rollout-logprob-abs-diff-threshold
    data-pad-size-multiplier dump-details
    fetch-trajectory-retry-times freeze-indexer
    http-proxy load-forge-rollout-data log-correct-samples log-multi-turn
    log-probs-max-tokens-per-gpu memory-recorder memory-snapshot-dir memory-snapshot-num-steps
    min-batch-collection-ratio model-name
    padded-vocab-size
    profile-target qwen-gdn-backend recompute-loss-function
    record-memory-history release-train
    rollout-buffer-url sglang-router-ip sglang-router-policy
    rollout-data-transport
    rollout-task-type save-debug-train-data spec
    train-env-vars use-distributed-post
    use-pytorch-profiler use-stateless-adam
    wandb-always-use-train-step
    """.split()  # noqa: SIM905 - a paragraph is easier to scan than ninety quoted lines
)


def is_unbuilt(name: str) -> bool:
    """Whether `use-tis` (no dashes in front) is a flag of slime that this version refuses as not built."""
    return name in UNBUILT_FLAGS
