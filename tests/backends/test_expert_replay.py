"""The FSDP trainer replays the experts of an engine: exact against transformers with these experts.

The engine's choices differ from the trainer's, as rounding makes them differ; without replay this changes
log-probs.
"""

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from devices import DEVICE
from tiny_model import make_tiny_model
from trainer_helpers import init_process_group, meeting_point, random_samples, trainer_args

from slime.algorithms.model_parts import routers
from slime.backends.fsdp import create_backend
from slime.backends.shared.microbatch import build_micro_batches
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep

REPLAY = dict(use_rollout_routing_replay=True)


@pytest.fixture(scope="module", autouse=True)
def group():
    init_process_group(0, 1, meeting_point())
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / request.param
    return make_model(folder, request.param)


def settings(model, **changes):
    return trainer_args(model, optimizer="sgd", lr=0.1, weight_decay=0.0, rollout_temperature=1.0, **changes)


def make_model(path, kind):
    """Three layers, of which the first (DeepSeek) or the second (Qwen) has no experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    own = {
        "qwen3_moe": dict(num_key_value_heads=2, head_dim=16, num_experts=4, mlp_only_layers=[1]),
        "deepseek_v3": dict(
            **dict(
                num_key_value_heads=4, first_k_dense_replace=1, n_routed_experts=8, n_group=4, topk_group=2
            ),
            **dict(q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8),
        ),
    }[kind]
    sizes = dict(hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=3)
    more = dict(vocab_size=128, num_attention_heads=4, num_experts_per_tok=2, initializer_range=0.2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **more, **own)).save_pretrained(
            path
        )
    return path


class Engine:
    """transformers' model in which the choice of experts, not their weights, is disturbed."""

    def __init__(self, folder):
        from transformers import AutoModelForCausalLM

        self.lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.layers = self.lm.config.num_hidden_layers
        self.chosen = {}
        for number, layer in enumerate(self.lm.model.layers):
            for router in routers(layer):
                router.forward = self._disturbed(number, router)

    def _disturbed(self, number, router):
        def forward(hidden):
            hidden = hidden.reshape(-1, hidden.shape[-1])
            logits = F.linear(hidden, router.weight)
            sigmoid = hasattr(router, "e_score_correction_bias")
            scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
            generator = torch.Generator().manual_seed(number)
            chosen = (scores + torch.rand(scores.shape, generator=generator)).topk(router.top_k).indices
            weights = scores.gather(1, chosen)
            if router.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            self.chosen[number] = chosen
            return logits, weights * getattr(router, "routed_scaling_factor", 1.0), chosen

        return forward

    @torch.no_grad()
    def answer(self, sample):
        """Fill in the experts of all tokens but the last; return the log-probs of the response."""
        tokens = torch.tensor(sample.tokens)
        logits = self.lm(tokens[None, :-1]).logits[0]
        topk = next(iter(self.chosen.values())).shape[1]
        routed = np.zeros((len(tokens) - 1, self.layers, topk), dtype=np.int32)
        for number, chosen in self.chosen.items():
            routed[:, number] = chosen
        sample.rollout_routed_experts = routed
        found = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        return found[-sample.response_length :]


def routed(folder):
    engine, samples = Engine(folder), random_samples(2, 2, vocab=100)
    return samples, [engine.answer(sample) for sample in samples]


def log_probs(args, samples):
    backend = create_backend(args, rank=0, world_size=1, device=DEVICE)
    mbs = build_micro_batches(samples_to_batch(args, samples), [[0, 1, 2], [3]], replay=True)
    return backend.log_probs(mbs).log_probs


def part_of_each_sample(rank, address, folder, expected):
    """One of two ranks that share the tokens of each sample."""
    torch.set_num_threads(1)
    init_process_group(rank, 2, address)
    samples, _ = routed(folder)
    args = settings(folder, context_parallel_size=2, **REPLAY)
    backend = create_backend(args, rank=rank, world_size=2, device=DEVICE)
    mbs = build_micro_batches(samples_to_batch(args, samples), [[0, 1, 2], [3]], replay=True)
    assert difference(backend.log_probs(mbs).log_probs, expected) < 1e-5
    torch.distributed.destroy_process_group()


def difference(found, expected):
    return max(float((a.cpu() - b).abs().max()) for a, b in zip(found, expected, strict=True))


def test_log_probs_are_those_of_the_engine_with_replay_alone(family):
    samples, expected = routed(family)
    assert difference(log_probs(settings(family, **REPLAY), samples), expected) < 1e-5
    assert difference(log_probs(settings(family), samples), expected) > 1e-2


@pytest.mark.slow
def test_ranks_that_share_a_sample_replay_its_experts(family):
    _, expected = routed(family)
    mp.spawn(part_of_each_sample, args=(meeting_point(), family, expected), nprocs=2, join=True)


@pytest.mark.slow
def test_a_step_replays_and_recomputes_the_same_experts(family):
    samples, _ = routed(family)

    def step(**changes):
        args = settings(family, **changes)
        backend = create_backend(args, rank=0, world_size=1, device=DEVICE)
        share = split_for_ranks(args, samples_to_batch(args, samples), 1)[0]
        return TrainingStep(backend, args, 0, share).run().summary["train/grad_norm"]

    replayed = step(**REPLAY)
    assert step(**REPLAY, activation_checkpointing="full", micro_batch_size=1) == pytest.approx(
        replayed, rel=1e-5
    )
    assert step() != pytest.approx(replayed, rel=1e-3)


def test_what_cannot_be_replayed_is_refused(family, tmp_path):
    samples, _ = routed(family)
    args = settings(family, **REPLAY)
    samples[0].rollout_routed_experts = samples[0].rollout_routed_experts + 99
    with pytest.raises(ValueError, match="Engines and trainer must run the same model"):
        log_probs(args, samples)
    with pytest.raises(ValueError, match="the samples carry no rollout_routed_experts"):
        log_probs(args, random_samples(2, 2, vocab=100))
    dense = make_tiny_model(tmp_path / "dense")
    with pytest.raises(ValueError, match="has no routers of experts"):
        create_backend(settings(dense, **REPLAY), rank=0, world_size=1, device=DEVICE)
