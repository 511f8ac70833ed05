"""Every key of a batch shows an example value, and together the examples are a batch to train on."""

import ast
import inspect

import torch

from slime.batch.validate import validate_batch
from slime.utils import types

DTYPES = {"fp32": torch.float32, "int32": torch.int32, "int64": torch.int64}


def example_batch():
    batch = {}
    for line in inspect.getsource(types.RolloutBatch).splitlines():
        name, _, rest = line.strip().partition(": ")
        if name in types.RolloutBatch.__annotations__:
            kind, _, comment = rest.partition("  # ")
            about, _, value = comment.rpartition(" = ")
            entry = ast.literal_eval(value)
            if "Tensors" in kind:
                dtype = next((t for word, t in DTYPES.items() if word in about), torch.float32)
                entry = torch.tensor(entry, dtype=dtype)
            batch[name] = [entry]
    return batch


def test_every_key_has_an_example_and_together_they_are_a_valid_batch():
    batch = example_batch()
    assert list(batch) == list(types.RolloutBatch.__annotations__)
    validate_batch(batch)
    for key in types.TokenKey.__args__:
        assert len(batch[key][0]) == batch["response_lengths"][0], key
    assert len(batch["routed_experts"][0]) == len(batch["tokens"][0]) - 1
