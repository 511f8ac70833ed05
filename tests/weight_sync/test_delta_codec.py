"""Changed bytes, encoded and put back: exact for every element size, refused when damaged."""

import numpy as np
import pytest

from slime.arguments.groups.engine import CHECKSUMS, ENCODINGS
from slime.wire.delta_codec import DeltaError, apply, checksum_function, encode

pytest.importorskip("zstandard")

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def pair(itemsize: int, share: float, count: int = 5000, seed: int = 0) -> tuple[np.ndarray, np.ndarray, int]:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, count * itemsize, dtype=np.uint8)
    new = old.copy()
    mask = rng.random(count) < share
    new.view(UNSIGNED[itemsize])[mask] ^= rng.integers(1, 200, mask.sum()).astype(UNSIGNED[itemsize])
    return old, new, int(mask.sum())


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 1.0])
def test_changes_come_back_bit_by_bit(encoding, itemsize, share):
    old, new, num_changed = pair(itemsize, share)
    counted, payload = encode(old, new, itemsize, encoding)
    assert counted == num_changed and bool(payload) == bool(num_changed)
    data = old.copy()
    if payload:
        apply(payload, data, itemsize, encoding)
    assert np.array_equal(data, new)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_few_changes_are_few_bytes(encoding):
    old, new, _ = pair(2, 0.01, count=200_000)
    assert len(encode(old, new, 2, encoding)[1]) < 0.03 * old.size


def test_overwriting_twice_is_overwriting_once_and_xor_twice_is_nothing():
    old, new, _ = pair(2, 0.1)
    for encoding, after in (("overwrite", new), ("xor", old)):
        payload, data = encode(old, new, 2, encoding)[1], old.copy()
        apply(payload, data, 2, encoding)
        apply(payload, data, 2, encoding)
        assert np.array_equal(data, after)


def test_the_last_position_and_the_first_are_reached():
    old = np.zeros(2000, np.uint8)
    new = old.copy()
    new[0] = new[-1] = 7
    data = old.copy()
    apply(encode(old, new, 2, "xor")[1], data, 2, "xor")
    assert np.array_equal(data, new)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("share", [0.01, 0.9])
def test_a_damaged_payload_is_refused_or_gives_another_checksum(encoding, share):
    old, new, _ = pair(2, share, count=600)
    payload = encode(old, new, 2, encoding)[1]
    checksum = checksum_function("xxh3-128")
    refused = changed = 0
    for place in range(len(payload)):
        damaged = bytearray(payload)
        damaged[place] ^= 0x10
        data = old.copy()
        try:
            apply(bytes(damaged), data, 2, encoding)
        except DeltaError:
            refused += 1
            assert np.array_equal(data, old)  # nothing was touched
            continue
        changed += checksum(data) != checksum(new)
        assert np.array_equal(data, new) or checksum(data) != checksum(new)
    assert refused and refused + changed > 0.9 * len(payload)


def test_a_delta_for_a_larger_tensor_is_refused():
    old, new, _ = pair(2, 0.05, count=5000)
    with pytest.raises(DeltaError, match=r"does not fit|more than the possible"):
        apply(encode(old, new, 2, "xor")[1], old[:100].copy(), 2, "xor")


@pytest.mark.parametrize("name", CHECKSUMS)
def test_every_checksum_sees_one_flipped_bit(name):
    if name == "blake3":
        pytest.importorskip("blake3")
    data = np.arange(4096, dtype=np.uint8)
    other = data.copy()
    other[1234] ^= 1
    checksum = checksum_function(name)
    assert checksum(data) == checksum(data.tobytes()) != checksum(other)
