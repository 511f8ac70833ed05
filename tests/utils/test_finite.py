"""Weights that are no numbers are found in every precision, and named."""

import pytest
import torch

from slime.cluster.training.rank_sender import RankSender
from slime.utils.errors import RunStopped
from slime.utils.models.finite import first_non_finite, is_finite

BAD = [float("nan"), float("inf"), float("-inf")]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", BAD)
def test_one_bad_value_is_found_wherever_it_stands(dtype, bad):
    for place in (0, 500, 999):
        tensor = torch.randn(1000).to(dtype)
        assert is_finite(tensor) and first_non_finite([("a", tensor)]) is None
        tensor[place] = bad
        assert not is_finite(tensor)
        assert first_non_finite([("sound", torch.ones(3)), ("a", tensor), ("b", tensor)]) == "a"


def test_numbers_that_overflow_only_in_the_engine_s_precision_are_found():
    assert is_finite(torch.tensor([1e300], dtype=torch.float64))
    assert not is_finite(torch.tensor([1e300], dtype=torch.float64), torch.float32)
    assert not is_finite(torch.tensor([-1e5]), torch.float16)
    assert not is_finite(torch.tensor([3.4e38]), torch.bfloat16)
    assert is_finite(torch.tensor([3.38e38]), torch.bfloat16)


def test_integers_empty_tensors_and_eight_bits_are_no_trouble():
    eight = torch.tensor([1.0, -448.0]).to(torch.float8_e4m3fn)
    assert is_finite(torch.tensor([5])) and is_finite(torch.empty(0)) and is_finite(eight)
    assert first_non_finite([]) is None
    assert (
        first_non_finite(
            [("a", torch.tensor([5])), ("b", torch.empty(0)), ("c", eight), ("d", torch.ones(()))]
        )
        is None
    )
    assert first_non_finite([("a", torch.tensor([float("nan")]).to(torch.float8_e4m3fn))]) == "a"


def test_the_trainer_pushes_no_weights_that_are_no_numbers():
    sender = RankSender.__new__(RankSender)
    sender._convert, sender._content = None, "model"
    bucket = [("model.norm.weight", torch.ones(3)), ("lm_head.weight", torch.tensor([1.0, float("nan")]))]
    assert sender._in_engine_format(bucket[:1]) == bucket[:1]
    with pytest.raises(RunStopped, match=r"lm_head\.weight has values that are not finite"):
        sender._in_engine_format(bucket)
