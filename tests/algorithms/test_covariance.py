"""Tokens of extreme covariance: the choice of a sort over the
whole step, whatever the ranks and the order.
"""

import threading

import pytest
import torch

from slime.algorithms.covariance import select_clip_cov, select_kl_cov, select_largest, token_covariances


class Ranks:
    """Runs a function for several ranks at once; `total` sums over them as a collective would."""

    def __init__(self, count):
        self.count, self.sums = count, [None] * count
        self.barrier = threading.Barrier(count)

    def run(self, function):
        results = [None] * self.count

        def work(rank):
            def total(values):
                self.sums[rank] = values
                self.barrier.wait()
                result = sum(self.sums[r] for r in range(self.count))
                self.barrier.wait()
                return result

            results[rank] = function(rank, total)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.count)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        return results


def data(seed=0, lengths=(5, 1, 9, 4, 7, 3)):
    g = torch.Generator().manual_seed(seed)
    advantages = [torch.randn(1, generator=g).expand(n).clone() for n in lengths]
    log_probs = [-torch.rand(n, generator=g) * 3 for n in lengths]
    masks = [torch.randint(0, 2, (n,), generator=g) for n in lengths]
    masks[1] = torch.zeros(1, dtype=torch.int64)
    return advantages, log_probs, masks


def alone(values):
    return values


def test_covariances_are_products_of_deviations_from_the_mean_over_trained_tokens():
    advantages, log_probs, masks = data()
    kept = torch.cat(masks).bool()
    a, lp = torch.cat(advantages).double(), torch.cat(log_probs).double()
    expected = (a - a[kept].mean()) * (lp - lp[kept].mean())
    got = torch.cat(token_covariances(advantages, log_probs, masks, alone))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", range(3))
def test_kl_cov_takes_the_largest_covariances(seed):
    advantages, log_probs, masks = data(seed)
    covariances = torch.cat(token_covariances(advantages, log_probs, masks, alone))
    trained = torch.cat(masks).bool()
    count = max(1, int(0.3 * trained.sum()))
    ranked = sorted((c, i) for i, c in enumerate(covariances.tolist()) if trained[i])
    expected = {i for _, i in ranked[-count:]}
    got = torch.cat(select_kl_cov(advantages, log_probs, masks, ratio=0.3, total=alone))
    assert set(got.nonzero().squeeze(1).tolist()) == expected


def test_the_choice_does_not_depend_on_ranks():
    advantages, log_probs, masks = data(4)
    shares = [[0, 3], [5, 1, 2], [4]]
    options = dict(ratio=0.2, low=-2.0, high=2.0)
    whole_kl = select_kl_cov(advantages, log_probs, masks, ratio=0.2, total=alone)
    whole_clip = select_clip_cov(advantages, log_probs, masks, seeds=range(6), total=alone, **options)

    def of_rank(rank, total):
        lists = [[values[p] for p in shares[rank]] for values in (advantages, log_probs, masks)]
        kl = select_kl_cov(*lists, ratio=0.2, total=total)
        return kl, select_clip_cov(*lists, seeds=shares[rank], total=total, **options)

    for share, (kl, clip) in zip(shares, Ranks(3).run(of_rank), strict=True):
        for p, got_kl, got_clip in zip(share, kl, clip, strict=True):
            assert torch.equal(got_kl, whole_kl[p])
            assert torch.equal(got_clip, whole_clip[p])


def test_clip_cov_chooses_within_its_bounds_only():
    advantages, log_probs, masks = data(2)
    covariances = torch.cat(token_covariances(advantages, log_probs, masks, alone))
    got = torch.cat(
        select_clip_cov(
            advantages, log_probs, masks, ratio=1.0, low=0.0, high=0.5, seeds=range(6), total=alone
        )
    )
    expected = (covariances >= 0) & (covariances <= 0.5) & torch.cat(masks).bool()
    assert torch.equal(got.bool(), expected)


def test_nothing_is_selected_from_nothing():
    scores, allowed = [torch.rand(3).double()], [torch.zeros(3)]
    assert select_largest(scores, allowed, 2, alone)[0].tolist() == [0, 0, 0]
    assert select_largest([], [], 2, alone) == []
    assert select_largest(scores, [torch.ones(3)], 0, alone)[0].tolist() == [0, 0, 0]
