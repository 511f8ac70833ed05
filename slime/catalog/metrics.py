"""The glossary of metrics: every name that a run logs; `<stat>` is mean, median, max or min."""

import functools
import re
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Metric:
    """One row. Example: Metric("train/grad_norm", "length of the gradient before it is cut", "not 0")."""

    name: str
    what: str
    normal: str  # empty: nothing to look out for

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile("[^/]+".join(map(re.escape, re.split(r"<\w+>", self.name))))


_ROLLOUT = """
rollout/raw_reward: mean of the values of the reward function = rises; flat at 0 or 1: nothing can be learnt
rollout/rewards: mean of the rewards after comparison within groups = about 0 for grpo and its kin
rollout/reward/<name>: mean of one entry of rewards that are dicts
rollout/response_len/<stat>: tokens of the answers, less masked ones = well below --rollout-max-response-len
rollout/correct_samples: answers with reward 1 (--log-correct-samples)
rollout/correct_response_len/<stat>: tokens of these
rollout/correct_entropy: mean entropy of their tokens, where it is recorded (--use-rollout-entropy)
rollout/response_lengths: mean length of the answers of the batch, masked tokens included
rollout/total_lengths: mean length of prompt and answer
rollout/truncated_ratio: share of answers that were cut at the limit = below 0.1
rollout/truncated: the same over the batch that is trained on
rollout/special_ending_ratio: share of answers that end in a special token, with a reward function of your own
rollout/repetition_frac: share of answers whose end repeats itself = below 0.05; a rise is a model that loops
rollout/zero_std/count_<reward>: groups in which all answers got this reward, which teach nothing = few
rollout/groups/issued: prompt groups that were started
rollout/groups/kept: groups that are in the batch = --rollout-batch-size
rollout/groups/filtered: groups that a filter dropped = issued = kept + filtered + failed + returned
rollout/groups/returned: groups that went back to the buffer unfinished
rollout/groups/failed: groups that failed for good; the log names the cause = 0
rollout/groups/stale: groups older than --max-weight-staleness, which are generated again (fully asynchronous)
rollout/waste/<cause>/samples: samples that taught nothing: aborted (ended before they were done), stale
    (older than --max-weight-staleness), filtered (dropped by a filter), zero_variance (all rewards of the
    group are equal, in the batch or dropped), failed (no answer or no reward) = small
rollout/waste/<cause>/tokens: tokens that engines made for them
rollout/waste/<cause>/seconds: seconds of their requests, side by side ones added up
rollout/waste/share: tokens of all these, as a share of those made = small; zero_variance is the usual one
rollout/groups/samples_failed: samples without a result = 0
rollout/groups/reward_<kind>: rewards that could not be computed, by the kind of failure = 0
rollout/groups/of_one: groups with one answer left, whose advantage is 0 = 0; all of them in SFT
rollout/groups/pool_before: groups in flight when the rollout began (fully asynchronous)
rollout/groups/pool_after: groups in flight when it ended (fully asynchronous)
rollout/dynamic_filter/drop_<reason>: groups that --dynamic-sampling-filter-path dropped, by its reason
rollout/reward_failure/<kind>: samples whose reward failed = 0
rollout/answers_not_compared: answers that were too large to compare, and count as wrong = 0
rollout/error_cat/<category>: share of samples by the entry that --log-reward-category names
rollout/prefix_cache_hit_rate: share of prompt tokens that engines had in their cache = high in turns
rollout/avg_cached_tokens_per_sample: the same as tokens per sample
rollout/agent/turns: turns of the policy in an episode, on average (this and the next: runs with episodes)
rollout/agent/tool_calls: tools that it called
rollout/agent/tool_errors: calls that failed, or could not be read = falls as the policy learns the format
rollout/agent/forks: samples beyond the first that an episode became, since its history was edited = 0
rollout/agent/untrained_turns: turns not trained since a client asked for other sampling than the run's = 0
rollout/agent/env_seconds: time in the environment or its tools, per episode
rollout/agent/engine_seconds: time for the engine's answers, per episode, waiting for them included
rollout/agent/env_share: the first of these as a share of both = small; else engines wait for environments
rollout/agent/trained_per_sampled: share of the sampled tokens that is trained = 1, less what was masked
rollout/spec_accept_rate: share of drafted tokens that speculative decoding accepted
rollout/spec_accept_length: tokens per verification of speculative decoding
rollout/top_p_kept_vocab_per_token: ids that top-p or top-k left to a token, on average
rollout/weight_version: number of weight pushes so far = one more each step
rollout/canary/mean_abs_diff: mean difference of the log-probs that trainer and engine give fixed sentences
    = near 1e-5 in float32, below 0.1 in bfloat16; a jump is a push that did not arrive
rollout/canary/max_abs_diff: the largest of them
rollout/weight_version/<end>: oldest (min) and newest (max) weights that made tokens of the batch
rollout/staleness/mean: mean age of the trained tokens in pushes = 0; about 1 in the asynchronous loop
rollout/staleness/max: age of the oldest trained token in pushes = at most --max-weight-staleness
rollout/staleness/<lag>: share of the tokens of that age: lag_0, lag_1, ..., lag_4_or_more
rollout/versions_per_sample: mean number of versions of the weights that wrote a sample = 1
rollout/mixed_version_frac: share of samples that more than one version of the weights wrote
rollout/num_samples: samples of the rollout
rollout/log_probs: mean log-prob of the trained tokens under the policy before the update = rises towards 0
rollout/rollout_log_probs: the same as the engine gave it = close to rollout/log_probs
rollout/ref_log_probs: the same under the reference
rollout/teacher_log_probs: the same under the teacher
rollout/entropy: mean entropy under the policy before the update
rollout/kl: mean KL estimate to the reference = 0 without a reference; grows slowly
rollout/opd_reverse_kl: mean distance to the teacher on the sampled tokens = falls
rollout/advantages: mean advantage = about 0
rollout/returns: mean return; what a critic learns
rollout/values: mean value of the critic = follows rollout/returns
rollout/explained_variance: share of the variance of returns that the critic explains = rises towards 1
rollout/<kind>/skipped_<reason>: rows of SFT conversations (sft) or preference pairs (pairs) left out = 0
"""

_TRAIN = """
train/loss: what is minimised = says little in RL; falls in SFT, DPO and reward models
train/pg_loss: the policy-gradient part of it = around 0
train/kl_loss: KL to the reference, before its coefficient (--use-kl-loss) = grows slowly
train/entropy_loss: mean entropy of the policy, in nats = falls slowly; near 0 within few steps: collapse
train/grad_norm: length of the gradient before --clip-grad = the same order; 0: nothing to learn
train/lr-pg_<group>: learning rate of a group of parameters
train/global_batch_size: rollouts in the optimizer step
train/pg_clipfrac: share of tokens that the clip kept from moving = 0 with one step per rollout, or below 0.2
train/ppo_kl: mean log-prob of old minus new policy = about 0 in the first step on new samples
train/ppo_kl_abs: the same without sign = below 0.1
train/ois: mean ratio of new to old policy = about 1
train/ratio_bounded: share of tokens whose log-ratio was beyond 20 = 0
train/ess: effective sample size, engine against trainer: which share of the tokens counts = above 0.9
train/train_rollout_logprob_abs_diff: difference of the log-probs of trainer and engine, per token
    = below 0.001 in float32, about 0.01 in bfloat16; more: other weights or kernels
train/staleness/<lag>: share of the tokens that weights of this age made, in pushes (lag_0: current)
train/logprob_abs_diff/<lag>: difference of engine and trainer on these = lag_0 as above; grows with the age
train/tis: mean importance ratio of trainer to engine = about 1
train/tis_abs: its mean distance from 1 = below 0.1
train/tis_clipfrac: share of tokens whose weight was cut at --tis-clip = below 0.05
train/tis_weight: mean weight that was used = about 1
train/rs_rejected: share of tokens left out by --use-rs = below 0.1
train/rs_vetoed: share of tokens in samples that --rs-veto left out
train/opsm_clipfrac: share of tokens that --use-opsm left out
train/mis_kl: estimated KL of engine and trainer (k1), with --get-mismatch-metrics = about 0
train/mis_k3_kl: the same, always positive = below 0.01
train/mis_chi2_token: chi-square distance by token = about 0
train/mis_chi2_seq: chi-square distance by answer = grows with the length
train/mis_training_ppl: perplexity of the answers under the trainer
train/mis_rollout_ppl: perplexity of the answers under the engine = as mis_training_ppl
train/opd_reverse_kl: distance to the teacher that is minimised = falls
train/accuracy: share of pairs in which the chosen answer wins (DPO, reward model) = rises above 0.5
train/margin: reward of the chosen answer minus that of the rejected one = rises
train/chosen_rewards: reward of the chosen answer
train/rejected_rewards: reward of the rejected answer
train/chosen_log_probs: log-prob of the chosen answers = if it falls far, DPO unlearns both answers
train/rejected_log_probs: log-prob of the rejected answers
train/critic-value_loss: error of the critic = falls
train/critic-value_clipfrac: share of values that the clip held back
train/critic-values: mean value of the critic
train/critic-grad_norm: length of the critic's gradient
train/critic-lr-pg_<group>: learning rate of the critic
train/critic-empty_steps: steps of the critic without a trained token = 0
train/critic-nonfinite_steps: steps of the critic that were left out, not being finite = 0
train/empty_steps: optimizer steps without a trained token, which are not applied = 0
train/nonfinite_steps: optimizer steps that were left out because something was no number = 0
train/moe_aux_loss: balance loss of the experts = near the number of experts a token takes
train/moe_z_loss: z-loss of the routers
train/moe_load_max_over_mean: tokens of the busiest expert over the mean, mean over layers = near 1
train/moe_load_worst_layer: the same in the worst layer
train/moe_idle_experts: share of experts without a token = 0
train/mtp_loss: loss of the heads that predict further tokens = falls
"""

_EVAL = """
eval/<dataset>: mean reward on a data set of --eval-prompt-data or --eval-config = rises
eval/<dataset>-truncated_ratio: share of its answers that were cut = below 0.1
eval/<dataset>-failed: rewards that could not be computed; not part of the mean = 0
eval/<dataset>-samples: responses with a score
eval/<dataset>-pass@<k>: chance that one of k answers is right (--log-passrate)
eval/<dataset>/<of_samples>: as `rollout/<of_samples>`: lengths, repetition, cache hits, ...
eval/<dataset>/reward_failures: samples whose reward failed = 0
eval/<dataset>/weight_versions: number of versions that answered = 1
multi_turn/<part>/<stat>: tokens of whole responses (raw_response_length), of text from tools or users in them
    (observation_length), and turns of the policy (round_number) (--log-multi-turn)
passrate/pass@<k>: chance that one of k answers to a prompt is right (--log-passrate) = rises with pass@1
"""

_PERF = """
perf/step_time: seconds of one pass of the loop, all included
perf/rollout_time: seconds of the rollout
perf/train_wait_time: seconds in which the trainer waited for samples = little in the asynchronous loop
perf/train_time: seconds of training on the batch, all passes
perf/actor_train_time: seconds of its forward, backward and optimizer steps
perf/log_probs_time: seconds to compute log-probs of the old policy = absent with one step per rollout
perf/ref_log_probs_time: seconds to compute those of the reference
perf/teacher_log_probs_time: seconds to compute those of the teacher
perf/values_time: seconds to compute the critic's values
perf/optimizer_time: seconds of the optimizer alone
perf/<pass>_tflops: rate of a pass of one rank, 10^12 operations a second; only computed ones count
perf/actor_train_tok_per_s: tokens trained per second, all ranks
perf/tokens_per_gpu_per_sec: tokens generated per second of the rollout and GPU, or engine host
perf/effective_tokens_per_gpu_per_sec: the same, without tokens that the model did not write
perf/longest_sample_tokens_per_sec: length of the longest answer over the time of the rollout
perf/longest_effective_sample_tokens_per_sec: the same, without tokens that the model did not write
perf/engine_forward_time: seconds that engines spent in forward passes (embedded engine)
perf/non_generation_time/<stat>: seconds of a sample in tools and rewards = small compared with rollout_time
perf/request/e2e_latency/<stat>: seconds of a request, as the engine says
perf/request/queue_time/<stat>: seconds a request waited in the engine's queue = small
perf/decode/throughput/<stat>: tokens per second of a request
perf/update_weights_time: seconds of a weight push
perf/update_weights_pause_time: seconds for which engines were paused in it
perf/update_weights_engine_time: seconds in which engines took the weights
perf/update_weights_check_time: seconds in which they were checked
perf/canary_time: seconds of a look of the canary (--canary-interval)
perf/update_weights_bytes: size of the weights
perf/update_weights_wire_bytes: bytes that travelled, with deltas = a few percent of update_weights_bytes
perf/update_weights_density: share of the values that changed, with deltas
perf/engines_evicted: engines that a push took out of rotation = 0
perf/engines_missed: engines that a push did not reach = 0
perf/save_model_time: seconds of a checkpoint
perf/peer_copy_time: seconds of a copy of the trainer's state in shared memory (--peer-copies)
perf/peak_memory_<phase>_gib: most device memory in a phase (rollout, offload, train, push) = GiB are left
"""

_LINE = """
time: seconds since 1970
run: id of the run
start: number of the start of the run: 2 after one resume
step_key: which of the next three counts this line
step: its value
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
    "Beside the metrics of a line": _read(_LINE),
}


def find_metric(name: str) -> Metric | None:
    """The row of a name as it was logged; None: there is none. The row that spells out most of it wins."""
    rows = [row for group in METRICS.values() for row in group if row.pattern.fullmatch(name)]
    if not rows and name.startswith("eval/"):
        return find_metric(re.sub("^eval/[^/]+/", "rollout/", name))
    return max(rows, key=lambda row: len(re.sub("<.*?>", "", row.name)), default=None)


@functools.lru_cache(maxsize=4096)
def is_eval_score(name: str) -> bool:
    """Return whether a metric is the score of an evaluation, and not another number about its responses."""
    row = find_metric(name) if name.startswith("eval/") else None
    return row is not None and row.name == "eval/<dataset>"
