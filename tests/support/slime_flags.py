"""Every flag that slime, Megatron's command line in its scripts, and older scripts have: names, no values."""

SLIME = """
    train-backend debug-rollout-only debug-train-only load-debug-rollout-data actor-num-nodes
    actor-num-gpus-per-node rollout-num-gpus rollout-num-gpus-per-engine num-gpus-per-node colocate
    offload offload-train no-offload-train offload-rollout no-offload-rollout distributed-backend
    distributed-timeout-minutes qwen-gdn-backend train-env-vars update-weight-mode
    update-weight-transport release-train save update-weight-disk-dir update-weight-disk-keep-files
    update-weight-delta-encoding update-weight-delta-checksum custom-update-weight-post-write-path
    update-weight-local-checkpoint-dir custom-model-provider-path recompute-loss-function
    log-probs-chunk-size only-train-params-name-list freeze-params-name-list freeze-indexer
    allgather-cp hf-checkpoint model-name rollout-function-path rollout-temperature rollout-top-p
    rollout-top-k rollout-max-context-len rollout-max-prompt-len rollout-max-response-len
    rollout-skip-special-tokens rollout-stop rollout-stop-token-ids rollout-shuffle rollout-seed
    over-sampling-batch-size dynamic-sampling-filter-path partial-rollout
    mask-offpolicy-in-partial-rollout custom-generate-function-path rollout-sample-hook-path
    custom-rollout-log-function-path custom-eval-rollout-log-function-path buffer-filter-path
    update-weight-buffer-size update-weights-interval keep-old-actor rollout-data-postprocess-path
    rollout-data-transport rollout-external-engine-addrs use-fault-tolerance
    rollout-health-check-interval rollout-health-check-timeout rollout-health-check-first-wait
    num-rollout num-epoch disable-rollout-global-dataset data-source-path prompt-data
    apply-chat-template apply-chat-template-kwargs input-key label-key multimodal-keys metadata-key
    tool-key start-rollout-id rollout-batch-size n-samples-per-prompt global-batch-size
    num-steps-per-rollout micro-batch-size balance-data balance-by-flops use-dynamic-batch-size
    max-tokens-per-gpu log-probs-max-tokens-per-gpu eval-function-path eval-interval
    eval-prompt-data eval-config skip-eval-before-train eval-input-key eval-label-key eval-tool-key
    n-samples-per-eval-prompt eval-temperature eval-max-prompt-len eval-max-context-len ref-load
    ref-ckpt-step load save-interval async-save no-save-optim save-hf seed clip-grad
    calculate-per-token-loss lr num-critic-only-steps megatron-config-path eps-clip eps-clip-high
    eps-clip-c value-clip kl-coef loss-type custom-loss-function-path kl-loss-type
    advantage-estimator disable-compute-advantages-and-returns custom-advantage-function-path
    use-kl-loss kl-loss-coef use-unbiased-kl ref-update-interval entropy-coef gamma lambd
    normalize-advantages disable-grpo-std-normalization disable-rewards-normalization
    use-rollout-entropy get-mismatch-metrics reset-optimizer-states use-stateless-adam
    use-rollout-logprobs use-tis tis-clip tis-clip-low custom-tis-function-path
    custom-pg-loss-reducer-function-path use-routing-replay use-rollout-routing-replay use-opsm
    opsm-delta use-opd opd-type opd-kl-coef opd-teacher-load opd-teacher-ckpt-step use-wandb
    wandb-mode wandb-dir wandb-key wandb-host wandb-team wandb-group wandb-project wandb-run-id
    disable-wandb-random-suffix wandb-always-use-train-step log-multi-turn log-passrate
    log-correct-samples log-reward-category use-tensorboard tb-project-name tb-experiment-name
    save-debug-rollout-data load-forge-rollout-data load-debug-rollout-data-subsample
    save-debug-train-data dump-details memory-snapshot-dir memory-snapshot-num-steps memory-recorder
    record-memory-history profile-target check-weight-update-equal http-proxy use-distributed-post
    rm-type reward-key eval-reward-key group-rm rm-url custom-rm-path
    custom-reward-post-process-path custom-convert-samples-to-train-data-path rollout-buffer-url
    fetch-trajectory-retry-times min-batch-collection-ratio rollout-task-type loss-mask-type
    data-pad-size-multiplier rollout-sample-filter-path rollout-all-samples-process-path
    mtp-num-layers mtp-loss-scaling-factor enable-mtp-training ci-test ci-disable-kl-checker
    ci-train-rollout-logprob-abs-diff-threshold ci-save-grad-norm ci-load-grad-norm
    custom-megatron-init-path custom-megatron-before-log-prob-hook-path
    custom-megatron-before-train-step-hook-path megatron-deepgemm-forward-layers
    megatron-deepgemm-moe-forward-layers custom-config-path padded-vocab-size sglang-router-ip
    sglang-router-port sglang-router-request-timeout-secs sglang-server-concurrency
    prefill-num-servers sglang-config
""".split()  # noqa: SIM905 - a paragraph is easier to scan

MEGATRON = """
    train-iters exit-interval num-workers finetune ckpt-step no-load-optim no-load-rng no-save-rng
    no-masked-softmax-fusion no-gradient-accumulation-fusion overlap-grad-reduce enable-experimental
    experimental-attention-variant dsa-indexer-n-heads dsa-indexer-head-dim dsa-indexer-topk
    dsa-indexer-loss-coeff log-num-zeros-in-grad no-bias-swiglu-fusion no-bias-gelu-fusion
    no-bias-dropout-fusion tp-comm-overlap recompute-activations enable-gloo-process-groups
    disable-gloo-process-groups init-method-std lr-warmup-iters lr-decay-iters lr-warmup-init
    lr-wsd-decay-style lr-wsd-decay-iters lr-warmup-samples lr-decay-samples min-lr adam-eps
    override-opt_param-scheduler use-checkpoint-opt_param-scheduler start-weight-decay
    end-weight-decay weight-decay-incr-style rerun-mode cross-entropy-loss-fusion
    cross-entropy-fusion-impl rotary-seq-len-interpolation-factor fp8-format fp8-recipe
    fp8-param-gather fp8 transformer-impl eod-mask-loss data-cache-path split mock-data
    dataloader-type reset-position-ids moe-router-padding-for-fp8 moe-pad-expert-input-to-capacity
    grad-reduce-in-bf16 no-persist-layer-norm cp-comm-type enable-cuda-graph cuda-graph-scope
    external-cuda-graph exit-on-missing-checkpoint no-initialization use-tp-pp-dp-mapping use-sharp
    muon-momentum optimizer qk-clip moe-shared-expert-overlap moe-shared-expert-gate
    moe-router-force-load-balancing moe-apply-probs-on-input moe-layer-recompute moe-extended-tp
    moe-use-legacy-grouped-gemm delay-wgrad-compute overlap-moe-expert-parallel-comm
    batch-p2p-communication overlap-p2p-communication no-overlap-p2p-communication
    microbatch-group-size-per-virtual-pipeline-stage num-layers-per-virtual-pipeline-stage
    num-virtual-stages-per-pipeline-rank pipeline-model-parallel-layout
    decoder-first-pipeline-num-layers account-for-embedding-in-pipeline-split loss-scale
    initial-loss-scale attention-softmax-in-fp32 apply-query-key-layer-scaling te-rng-tracker
    inference-rng-tracker deterministic-mode use-ring-exchange-p2p ddp-bucket-size ddp-num-buckets
    ddp-average-in-collective distribute-saved-activations no-async-tensor-model-parallel-allreduce
    log-params-norm log-validation-ppl-to-tensorboard log-memory-to-tensorboard
    log-timers-to-tensorboard log-throughput log-interval tensorboard-dir wandb-exp-name
    wandb-save-dir wandb-entity profile profile-step-start profile-step-end profile-ranks
    use-pytorch-profiler memory-snapshot-path skip-train ckpt-format ckpt-fully-parallel-save
    ckpt-fully-parallel-load dist-ckpt-format use-dist-ckpt dist-ckpt-strictness
    no-ckpt-fully-parallel-save async-strategy use-persistent-ckpt-worker ckpt-convert-format
    non-persistent-save-interval save-retain-interval auto-detect-ckpt-format use-mcore-models
    use-legacy-models use-flash-attn fp16 bf16 main-grads-dtype main-params-dtype exp-avg-dtype
    exp-avg-sq-dtype optimizer-offload-fraction optimizer-cpu-offload
    use-torch-optimizer-for-cpu-offload decoupled-weight-decay high-priority-stream-groups
    use-megatron-fsdp init-model-with-meta-device distributed-timeout-seconds-after-init
    is-hybrid-model mamba-state-dim mamba-num-heads window-size window-attn-skip-freq softmax-type
    glu-linear-offset activation-func-clamp-value quick-geglu enable-yarn yarn-rotary-scaling-factor
    yarn-original-max-position-embeddings original-max-position-embeddings rotary-scaling-factor
    beta-fast beta-slow rope-type cache-mla-latents mla-down-proj-fusion qk-l2-norm no-rope-freq
    attention-output-gate linear-attention-type linear-num-key-heads linear-conv-kernel-dim
    squared-relu untie-embeddings-and-output-weights decoder-last-pipeline-num-layers
    moe-permute-fusion moe-router-fusion moe-enable-deepep moe-flex-dispatcher-backend
    moe-deepep-num-sms moe-hybridep-num-sms moe-expert-capacity-factor moe-z-loss-coeff
    moe-input-jitter-eps moe-per-layer-logging use-rope-scaling attention-dropout norm-epsilon
    layernorm-epsilon fp8-param first-last-layers-bf16 num-layers-at-start-in-bf16 fp8-margin
    fp8-amax-history-len fp8-amax-compute-algo fp32-residual-connection hidden-dropout vocab-size
    seq-length max-position-embeddings tokenizer-type tokenizer-model trust-remote-code
    log-straggler disable-straggler-on-startup eval-iters train-samples rampup-batch-size
    ckpt-assume-constant-structure no-mmap-bin-files num-dataset-builder-threads
    nccl-communicator-config-path nccl-ub use-custom-fsdp data-parallel-sharding-strategy
    data-parallel-random-init sgd-momentum adam-beta1 log-loss-scale-to-tensorboard timing-log-level
    timing-log-option barrier-with-L1-time manual-gc manual-gc-interval manual-gc-eval
    empty-unused-memory-level keep-fp8-weight-transpose-cache fine-grained-activation-offloading
    offload-modules recompute-modules
""".split()  # noqa: SIM905

OLDER = """
    critic-lr critic-load critic-lr-warmup-iters sglang-router-policy megatron-to-hf-mode
    use-slime-router slime-router-middleware-paths slime-router-timeout actor-num-cpus
    use-hf-config-for-megatron router-policy gradient-checkpointing attn-implementation fsdp-cpu-offload
    fsdp-full-params fsdp-state-dict-cpu-offload fsdp-cpu-backend qkv-format true-on-policy-mode use-lora
""".split()  # noqa: SIM905
