"""Draws follow the distribution, filters a slow version; noise depends on seed and position only."""

import numpy as np
import pytest
import torch

from slime.engines.embedded.sampler import SampleRows, sample, uniforms


def rows(count, *, seeds=None, positions=None, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, **more):
    full = lambda value, dtype=np.float64: np.full(count, value, dtype)  # noqa: E731
    return SampleRows(
        seeds=np.arange(count) if seeds is None else np.asarray(seeds),
        positions=np.zeros(count, np.int64) if positions is None else np.asarray(positions),
        temperature=full(temperature),
        top_p=full(top_p),
        top_k=full(top_k, np.int64),
        min_p=full(min_p),
        **more,
    )


def test_uniforms_are_uniform_and_uncorrelated_over_seeds_and_positions():
    by_seed = uniforms(np.arange(20000), np.full(20000, 5))
    by_position = uniforms(np.full(20000, -17), np.arange(20000))
    for values in (by_seed, by_position):
        assert values.min() > 0 and values.max() < 1
        assert abs(values.mean() - 0.5) < 0.01 and abs(values.var() - 1 / 12) < 0.003
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
        counts, _ = np.histogram(values, bins=20, range=(0, 1))
        assert counts.min() > 850 and counts.max() < 1150
    assert abs(np.corrcoef(by_seed, by_position)[0, 1]) < 0.03


def test_extreme_seeds_are_accepted():
    values = uniforms(np.array([-(2**63), 2**63 - 1, -1, 0]), np.array([0, 0, 0, 0]))
    assert len(set(values.tolist())) == 4


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.8])
def test_frequencies_match_the_scaled_distribution(temperature):
    torch.manual_seed(0)
    logits = torch.randn(8) * 2
    draws = sample(logits.expand(40000, 8), rows(40000, temperature=temperature))
    tokens, log_probs = draws.tokens, draws.log_probs
    expected = (logits / temperature).softmax(-1)
    found = torch.bincount(torch.tensor(tokens), minlength=8) / 40000
    assert (found - expected).abs().max() < 0.01
    assert torch.allclose(torch.tensor(log_probs), expected.log()[torch.tensor(tokens)], atol=1e-5)


def slow_kept(logits, *, top_p, top_k, min_p):
    """Token ids that survive: top_k, then top_p and min_p on what is left, renormalised."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    if top_k > 0:
        order = order[:top_k]
    weights = [float(torch.softmax(logits.double(), -1)[i]) for i in order]
    weights = [w / sum(weights) for w in weights]
    kept, mass = set(), 0.0
    for token, weight in zip(order, weights, strict=True):
        if mass < top_p and weight >= min_p * weights[0]:
            kept.add(token)
        mass += weight
    return kept


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 6, "top_p": 0.6},
        {"top_k": 8, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_filters_keep_exactly_what_the_slow_version_keeps(filters):
    torch.manual_seed(3)
    logits = torch.randn(12) * 2
    tokens = sample(logits.expand(20000, 12), rows(20000, **filters)).tokens
    kept = slow_kept(logits, **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, **filters})
    assert set(tokens) == kept
    expected = torch.zeros(12)
    expected[list(kept)] = logits.softmax(-1)[list(kept)]
    found = torch.bincount(torch.tensor(tokens), minlength=12) / 20000
    assert (found - expected / expected.sum()).abs().max() < 0.015


def test_a_row_does_not_depend_on_its_neighbours():
    torch.manual_seed(1)
    logits = torch.randn(6, 50)
    together = sample(logits, rows(6, seeds=[5, 1, 2, 3, 4, 9], positions=[7, 0, 1, 2, 3, 4]))
    alone = sample(logits[:1], rows(1, seeds=[5], positions=[7]))
    assert together.tokens[0] == alone.tokens[0]


def test_temperature_zero_is_greedy_with_unscaled_log_probs():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    draws = sample(logits, rows(2, temperature=0.0))
    assert draws.tokens == [1, 0]
    assert draws.log_probs == pytest.approx(logits.log_softmax(-1)[[0, 1], [1, 0]].tolist())


def test_a_banned_token_is_not_drawn_and_log_probs_stay_those_of_the_model():
    logits = torch.tensor([[5.0, 1.0, 0.0]]).expand(2000, 3)
    banned = tuple((row, (0,)) for row in range(2000))
    draws = sample(logits, rows(2000, banned=banned))
    tokens, log_probs = draws.tokens, draws.log_probs
    assert set(tokens) == {1, 2}
    assert log_probs[0] == pytest.approx(logits[0].log_softmax(-1)[tokens[0]].item())


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]]).expand(5000, 5)
    assert set(sample(logits, rows(5000)).tokens) == {1, 3}


RECORDED = [
    {"top_p": 0.7},
    {"top_p": 0.9, "temperature": 0.6},
    {"top_k": 3},
    {"min_p": 0.2, "temperature": 1.7},
    {"top_k": 8, "top_p": 0.9, "min_p": 0.1},
]


@pytest.mark.parametrize("filters", RECORDED)
def test_a_recorded_row_tells_what_it_was_drawn_from_and_its_log_prob_is_over_that(filters):
    torch.manual_seed(5)
    logits = torch.randn(4, 12) * 2
    draws = sample(logits, rows(4, **filters, recorded=(0, 2, 3)))
    scaled = logits.double() / filters.get("temperature", 1.0)
    cuts = {"top_p": 1.0, "top_k": -1, "min_p": 0.0} | {
        k: v for k, v in filters.items() if k != "temperature"
    }
    assert set(draws.kept) == {0, 2, 3}
    for row, ids in draws.kept.items():
        assert ids.dtype == np.int32 and ids.tolist() == sorted(slow_kept(scaled[row], **cuts))
        expected = torch.log_softmax(scaled[row, ids.tolist()], -1)[ids.tolist().index(draws.tokens[row])]
        assert draws.log_probs[row] == pytest.approx(expected.item(), abs=1e-6)
    plain = sample(logits, rows(4, **filters))
    assert plain.tokens == draws.tokens and not plain.kept
    assert plain.log_probs[1] == draws.log_probs[1]  # nobody asked: of the full distribution
    assert plain.log_probs[1] == pytest.approx(scaled[1].log_softmax(-1)[draws.tokens[1]].item(), abs=1e-6)


def test_a_recorded_row_that_nothing_cut_names_no_ids():
    torch.manual_seed(5)
    logits = torch.randn(2, 12)
    draws = sample(logits, rows(2, recorded=(1,)))
    assert [(row, ids.tolist()) for row, ids in draws.kept.items()] == [(1, [])]
    assert draws.log_probs == sample(logits, rows(2)).log_probs


def test_recorded_rows_without_a_choice_are_certain():
    logits = torch.tensor([[5.0, 1.0, 0.0], [0.0, 3.0, 1.0], [5.0, 1.0, 0.0]])
    mixed = rows(3, recorded=(0, 1, 2), banned=((2, (0,)),))
    mixed.temperature[1], mixed.top_p[0] = 0.0, 1e-9
    draws = sample(logits, mixed)
    assert draws.tokens[:2] == [0, 1] and draws.log_probs[:2] == [0.0, 0.0]
    assert [ids.tolist() for ids in draws.kept.values()] == [
        [0],
        [1],
        [1, 2],
    ]  # an id that may not be yet is no choice
    assert draws.log_probs[2] == pytest.approx(logits[2, 1:].log_softmax(-1)[draws.tokens[2] - 1].item())
