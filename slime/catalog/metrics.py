"""The glossary of metrics: every name that a run logs. `<stat>` is mean, median, max or min."""

import functools
import re
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Metric:
    """One row. Example: Metric("train/grad_norm", "norm of the gradient before clipping", "not 0")."""

    name: str
    what: str
    normal: str  # empty: nothing to look out for

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile("[^/]+".join(map(re.escape, re.split(r"<\w+>", self.name))))


_ROLLOUT = """
rollout/raw_reward: mean reward, as the reward function returned it = rises; flat at 0 or 1: nothing to learn
rollout/rewards: mean reward after comparison within groups = about 0 for grpo and similar estimators
rollout/reward/<name>: mean of one entry, where the reward is a dict
rollout/response_len/<stat>: tokens of a response, without masked ones = well below --rollout-max-response-len
rollout/correct_samples: responses with reward 1 (--log-correct-samples)
rollout/correct_response_len/<stat>: tokens of a response with reward 1
rollout/correct_entropy: mean entropy of the tokens of responses with reward 1 (--use-rollout-entropy)
rollout/response_lengths: mean response length in the training batch, masked tokens included
rollout/total_lengths: mean length of prompt and response together
rollout/truncated_ratio: share of responses that were truncated at the length limit = below 0.1
rollout/truncated: share of truncated responses in the training batch
rollout/special_ending_ratio: share of responses that end in a special token (custom reward functions only)
rollout/repetition_frac: share of responses that repeat themselves at the end = below 0.05; a rise: it loops
rollout/zero_std/count_<reward>: groups in which every response got this reward; they train nothing = few
rollout/groups/issued: prompt groups that were started
rollout/groups/kept: groups in the training batch = --rollout-batch-size
rollout/groups/filtered: groups that a filter dropped = issued = kept + filtered + failed + returned
rollout/groups/returned: groups that went back to the buffer unfinished
rollout/groups/failed: groups that failed for good; the log names the cause = 0
rollout/groups/stale: groups older than --max-weight-staleness, which are generated again (fully asynchronous)
rollout/waste/<cause>/samples: samples that trained nothing: aborted (ended before completion), stale
    (older than --max-weight-staleness), filtered (dropped by a filter), zero_variance (all rewards of the
    group are equal, in the batch or dropped), failed (no response or no reward) = small
rollout/waste/<cause>/tokens: tokens generated for samples wasted by this cause
rollout/waste/<cause>/seconds: seconds of the requests of these samples; concurrent requests are added up
rollout/waste/share: wasted tokens as a share of all generated ones = small; mostly zero_variance
rollout/groups/samples_failed: samples without a result = 0
rollout/groups/reward_<kind>: rewards that could not be computed, by the kind of failure = 0
rollout/groups/of_one: groups with a single response left, whose advantage is 0 = 0; all groups in SFT
rollout/groups/pool_before: groups in flight when the rollout began (fully asynchronous)
rollout/groups/pool_after: groups in flight when it ended (fully asynchronous)
rollout/dynamic_filter/drop_<reason>: groups dropped by --dynamic-sampling-filter-path, by its reason
rollout/reward_failure/<kind>: samples whose reward failed = 0
rollout/answers_not_compared: responses that were too large to compare, and count as wrong = 0
rollout/error_cat/<category>: share of samples by the entry that --log-reward-category names
rollout/prefix_cache_hit_rate: share of prompt tokens found in the engines' prefix cache = high for episodes
rollout/avg_cached_tokens_per_sample: prompt tokens found in the engines' prefix cache, per sample
rollout/agent/turns: turns of the policy per episode (this and the next: runs with episodes)
rollout/agent/tool_calls: tool calls per episode
rollout/agent/tool_errors: tool calls that failed or could not be parsed = falls as the format is learned
rollout/agent/forks: additional samples per episode, because its history was edited = 0
rollout/agent/untrained_turns: turns left out, because a client changed the sampling parameters = 0
rollout/agent/env_seconds: time in the environment or its tools, per episode
rollout/agent/engine_seconds: time until engines responded, per episode, queueing included
rollout/agent/env_share: env_seconds / (env_seconds + engine_seconds) = small; else engines wait for it
rollout/agent/trained_per_sampled: share of the sampled tokens that are trained = 1, minus masked tokens
rollout/spec_accept_rate: share of drafted tokens that speculative decoding accepted
rollout/spec_accept_length: tokens per verification of speculative decoding
rollout/top_p_kept_vocab_per_token: mean number of ids that top-p or top-k kept for a token
rollout/weight_version: number of weight syncs so far = one more each step
rollout/canary/mean_abs_diff: mean difference between trainer and engine in log-probs of fixed sentences
    = near 1e-5 in float32, below 0.1 in bfloat16; a jump: a weight sync did not arrive
rollout/canary/max_abs_diff: largest difference between trainer and engine in these log-probs
rollout/weight_version/<end>: oldest (min) and newest (max) weights that generated tokens of the batch
rollout/staleness/mean: mean age of the trained tokens in weight syncs = 0; about 1 in the asynchronous loop
rollout/staleness/max: age of the oldest trained token in weight syncs = at most --max-weight-staleness
rollout/staleness/<lag>: share of tokens of this age: lag_0, lag_1, ..., lag_4_or_more
rollout/versions_per_sample: mean number of weight versions that generated a sample = 1
rollout/mixed_version_frac: share of samples that several weight versions generated
rollout/num_samples: samples in the rollout
rollout/log_probs: mean log-prob of the trained tokens under the policy before the update = rises towards 0
rollout/rollout_log_probs: mean log-prob of these tokens as the engine reported it = near rollout/log_probs
rollout/ref_log_probs: mean log-prob of these tokens under the reference model
rollout/teacher_log_probs: mean log-prob of these tokens under the teacher
rollout/entropy: mean entropy of the policy before the update
rollout/kl: mean KL estimate to the reference = 0 without a reference; grows slowly
rollout/opd_reverse_kl: mean distance to the teacher on the sampled tokens = falls
rollout/advantages: mean advantage = about 0
rollout/returns: mean return; what a critic learns
rollout/values: mean value of the critic = follows rollout/returns
rollout/explained_variance: share of the variance of returns that the critic explains = rises towards 1
rollout/<kind>/skipped_<reason>: rows of SFT conversations (sft) or preference pairs (pairs) left out = 0
"""

_TRAIN = """
train/loss: the loss that is minimised = no meaning of its own in RL; falls in SFT, DPO and reward models
train/pg_loss: the policy-gradient part of the loss = around 0
train/kl_loss: KL to the reference, before its coefficient (--use-kl-loss) = grows slowly
train/entropy_loss: mean entropy of the policy, in nats = falls slowly; near 0 within few steps: collapse
train/grad_norm: norm of the gradient before --clip-grad = of a stable order; 0: nothing to learn
train/lr-pg_<group>: learning rate of a group of parameters
train/global_batch_size: rollouts in the optimizer step
train/pg_clipfrac: share of tokens whose ratio was clipped = 0 with one step per rollout, or below 0.2
train/ppo_kl: mean log-prob of old minus new policy = about 0 in the first step on new samples
train/ppo_kl_abs: mean absolute difference between these log-probs = below 0.1
train/ois: mean ratio of new to old policy = about 1
train/ratio_bounded: share of tokens whose log-ratio was beyond 20 = 0
train/ess: effective sample size of the engine's tokens under the trainer, as a share = above 0.9
train/train_rollout_logprob_abs_diff: difference between the log-probs of trainer and engine, per token
    = below 0.001 in float32, about 0.01 in bfloat16; more: different weights or kernels
train/staleness/<lag>: share of tokens generated by weights of this age, in weight syncs (lag_0: current)
train/logprob_abs_diff/<lag>: difference between engine and trainer on tokens of this age = grows with it
train/tis: mean importance ratio of trainer to engine = about 1
train/tis_abs: mean distance of the importance ratio from 1 = below 0.1
train/tis_clipfrac: share of tokens whose importance weight was clipped at --tis-clip = below 0.05
train/tis_weight: mean importance weight after clipping = about 1
train/rs_rejected: share of tokens left out by --use-rs = below 0.1
train/rs_vetoed: share of tokens in samples that --rs-veto left out
train/opsm_clipfrac: share of tokens that --use-opsm left out
train/mis_kl: estimated KL of engine and trainer (k1), with --get-mismatch-metrics = about 0
train/mis_k3_kl: this KL by the k3 estimate, which is always positive = below 0.01
train/mis_chi2_token: chi-square distance per token = about 0
train/mis_chi2_seq: chi-square distance per response = grows with the length
train/mis_training_ppl: perplexity of the responses under the trainer
train/mis_rollout_ppl: perplexity of the responses under the engine = equal to mis_training_ppl
train/opd_reverse_kl: reverse KL to the teacher, which is minimised = falls
train/opd_forward_kl: forward KL to the teacher on its top ids, which is minimised = falls
train/accuracy: share of pairs in which the chosen response wins (DPO, reward model) = rises above 0.5
train/margin: reward of the chosen response minus that of the rejected one = rises
train/chosen_rewards: reward of the chosen response
train/rejected_rewards: reward of the rejected response
train/chosen_log_probs: log-prob of the chosen responses = if it falls far, DPO unlearns both responses
train/rejected_log_probs: log-prob of the rejected responses
train/critic-value_loss: error of the critic = falls
train/critic-value_clipfrac: share of values that were clipped
train/critic-values: mean value of the critic
train/critic-grad_norm: norm of the critic's gradient
train/critic-lr-pg_<group>: learning rate of the critic
train/critic-empty_steps: steps of the critic without a trained token = 0
train/critic-nonfinite_steps: steps of the critic that were skipped because a value was not finite = 0
train/empty_steps: optimizer steps without a trained token, which are not applied = 0
train/skipped_steps: optimizer steps that were skipped because the gradient overflowed in fp16 = 0, rarely 1
train/critic-skipped_steps: steps of the critic that were skipped because of an overflow in fp16 = 0, rarely 1
train/loss_scale: factor of the loss in fp16 = changes rarely
train/critic-loss_scale: factor of the critic's loss in fp16 = changes rarely
train/nonfinite_steps: optimizer steps that were skipped because a value was not finite = 0
train/moe_aux_loss: load-balancing loss of the experts = near the number of experts per token
train/moe_z_loss: z-loss of the routers
train/moe_load_max_over_mean: tokens of the busiest expert over the mean, mean over layers = near 1
train/moe_load_worst_layer: tokens of the busiest expert over the mean, in the worst layer
train/moe_idle_experts: share of experts without a token = 0
train/mtp_loss: loss of the heads that predict further tokens = falls
"""

_EVAL = """
eval/<dataset>: mean reward on a data set of --eval-prompt-data or --eval-config = rises
eval/<dataset>-truncated_ratio: share of its responses that were truncated = below 0.1
eval/<dataset>-failed: rewards that could not be computed; not part of the mean = 0
eval/<dataset>-samples: responses with a score
eval/<dataset>-pass@<k>: probability that one of k responses is correct (--log-passrate)
eval/<dataset>/<of_samples>: as `rollout/<of_samples>`: lengths, repetition, cache hits, ...
eval/<dataset>/reward_failures: samples whose reward failed = 0
eval/<dataset>/weight_versions: number of weight versions that generated responses = 1
multi_turn/<part>/<stat>: tokens of whole responses (raw_response_length), of text from tools or users in them
    (observation_length), and turns of the policy (round_number) (--log-multi-turn)
passrate/pass@<k>: probability that one of k responses to a prompt is correct (--log-passrate) = rises
"""

_PERF = """
perf/step_time: seconds of one iteration of the loop, everything included
perf/rollout_time: seconds of the rollout
perf/train_wait_time: seconds in which the trainer waited for samples = little in the asynchronous loop
perf/train_time: seconds of training on the batch, all passes
perf/actor_train_time: seconds of the policy's forward, backward and optimizer steps
perf/log_probs_time: seconds to compute log-probs of the old policy = absent with one step per rollout
perf/ref_log_probs_time: seconds to compute log-probs of the reference
perf/teacher_log_probs_time: seconds to compute log-probs of the teacher
perf/values_time: seconds to compute the critic's values
perf/optimizer_time: seconds of the optimizer alone
perf/<pass>_tflops: TFLOP/s of one rank in this pass; operations that are not executed do not count
perf/actor_train_tok_per_s: tokens trained per second, all ranks
perf/tokens_per_gpu_per_sec: response tokens per second of the rollout and GPU (or engine host)
perf/effective_tokens_per_gpu_per_sec: tokens the model generated per second of the rollout and GPU
perf/longest_sample_tokens_per_sec: length of the longest response over the time of the rollout
perf/longest_effective_sample_tokens_per_sec: most generated tokens of a response over the rollout's time
perf/engine_forward_time: seconds that engines spent in forward passes (embedded engine)
perf/non_generation_time/<stat>: seconds of a sample in tools and rewards = small compared with rollout_time
perf/request/e2e_latency/<stat>: seconds of a request, as reported by the engine
perf/request/queue_time/<stat>: seconds a request waited in the engine's queue = small
perf/decode/throughput/<stat>: tokens per second of a request
perf/update_weights_time: seconds of a weight sync
perf/update_weights_pause_time: seconds for which a weight sync paused the engines
perf/update_weights_engine_time: seconds in which engines loaded the weights
perf/update_weights_check_time: seconds in which the loaded weights were checked
perf/canary_time: seconds of a check of the canary (--canary-interval)
perf/update_weights_bytes: size of the weights
perf/update_weights_rank_bytes: bytes that the busiest trainer rank sent in a live push
perf/update_weights_rank_bytes/<rank>: bytes that the first rank of a pipeline stage sent in a live push
perf/update_weights_wire_bytes: bytes sent, with deltas = a few percent of update_weights_bytes
perf/update_weights_density: share of the values that changed, with deltas
perf/engines_evicted: engines that a weight sync removed from the fleet = 0
perf/engines_missed: engines that a weight sync did not reach = 0
perf/save_model_time: seconds of a checkpoint
perf/peer_copy_time: seconds of a copy of the trainer's state in shared memory (--peer-copies)
perf/peak_memory_<phase>_gib: peak device memory of a phase (rollout, offload, train, push) = GiB are free
"""

_LINE = """
time: seconds since 1970
run: id of the run
start: number of the start of the run: 2 after one resume
step_key: which of the next three is the x-axis of this line
step: the value of `step_key`
rollout/step: number of the rollout
train/step: number of the optimizer step
eval/step: rollout at which the evaluation was made
"""


def _read(text: str) -> tuple[Metric, ...]:
    rows = re.findall(r"^(\S+): (.*(?:\n    .*)*)", text, re.MULTILINE)
    found = []
    for name, words in rows:
        what, _, normal = " ".join(words.split()).partition(" = ")
        found.append(Metric(name, what, normal))
    return tuple(found)


METRICS: dict[str, tuple[Metric, ...]] = {
    "Rollout": _read(_ROLLOUT),
    "Training": _read(_TRAIN),
    "Evaluation": _read(_EVAL),
    "Performance": _read(_PERF),
    "In every line": _read(_LINE),
}


def find_metric(name: str) -> Metric | None:
    """Return the row of a logged name, the most specific one if several match; None: there is none."""
    rows = [row for group in METRICS.values() for row in group if row.pattern.fullmatch(name)]
    if not rows and name.startswith("eval/"):
        return find_metric(re.sub("^eval/[^/]+/", "rollout/", name))
    return max(rows, key=lambda row: len(re.sub("<.*?>", "", row.name)), default=None)


@functools.lru_cache(maxsize=4096)
def is_eval_score(name: str) -> bool:
    """Return whether a metric is the score of an evaluation, and not another number about its responses."""
    row = find_metric(name) if name.startswith("eval/") else None
    return row is not None and row.name == "eval/<dataset>"
