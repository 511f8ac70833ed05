"""What the pattern of a difference says, and when the canary sings."""

import contextlib
import copy
import random
from types import SimpleNamespace

import pytest
import torch
import transformers
from tiny_model import make_tiny_model

from slime.cluster.canary.canary import Canary
from slime.cluster.canary.probe import TEXTS, Reading, batch_of, compare, diagnose, pattern_of, probe_tokens
from slime.runtime.base import Ready

TOLERANCE = 0.02
AGREE = [[0.001] * 12, [-0.002] * 9]


class Letters:
    """A tokenizer with an id for each letter."""

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def test_the_probe_is_the_same_text_for_every_run_and_a_batch_of_whole_responses():
    probe = probe_tokens(Letters())
    assert len(probe) == len(TEXTS) and probe[0][:3] == (ord("T"), ord("h"), ord("e"))
    batch = batch_of(probe)
    assert batch["response_lengths"] == [len(ids) - 1 for ids in probe]
    assert torch.equal(batch["tokens"][1], torch.tensor(probe[1]))


@pytest.mark.parametrize(
    "gaps, words",
    [
        ([[0.5] * 12, [-0.4] * 9], "100% of all tokens differ: other weights, or another precision"),
        ([[0.0] * 5 + [0.6] * 7, [0.001] * 9], "from token 6 of a text"),
        ([[0.0] * 5 + [0.6] * 7, [0.0] * 7 + [0.3] * 2], "from token 6 of a text"),
        ([[0.0, 0.9] + [0.0] * 10, [0.0] * 9], "5% of the tokens differ, here and there"),
    ],
)
def test_the_places_of_the_differences_point_at_the_cause(gaps, words):
    assert words in pattern_of(Reading("engine-0", gaps), TOLERANCE)


def test_a_diagnosis_names_the_engine_the_push_and_whether_others_agree():
    reading = compare([[-1.0, -2.0]], {"engine-1": [[-1.5, -2.5]]})[0]
    assert reading.gaps == [[0.5, 0.5]] and reading.mean == reading.largest == 0.5
    said = diagnose(reading, TOLERANCE, 7, 5, others_agree=True)
    assert "engine-1 and the trainer" in said and "agreed after push 5" in said and "at the latest 7" in said
    assert "the fault is this engine's" in said
    assert "not agreed since this run began" in diagnose(reading, TOLERANCE, 1, None, others_agree=False)


class FakeTrainer:
    """The log-probs of a model in this process, for a trainer of many ranks."""

    def __init__(self, model):
        self.model = model

    def score(self, batch):
        return [log_probs(self.model, tokens) for tokens in batch["tokens"]], TOLERANCE


class FakeEngines:
    """Engines with models and faults of their own; `apart`: the tensors that a comparison would find."""

    def __init__(self, models, shift_from=None, apart=()):
        self.models, self.shift_from, self.apart = models, shift_from, list(apart)

    def call_control(self, method, *args):
        return Ready(getattr(self, method.__name__)(*args))

    def score(self, probe):
        return {
            name: [log_probs(model, torch.tensor(ids), self.shift_from) for ids in probe]
            for name, model in self.models.items()
        }

    def tensors_apart(self, name):
        return self.apart


class FakeResidency:
    """Everything is always where it is wanted."""

    def phase(self, phase):
        return contextlib.nullcontext()


def log_probs(model, tokens, shift_from=None):
    positions = torch.arange(len(tokens))
    if shift_from is not None:
        positions = positions + 9 * (positions >= shift_from)
    with torch.no_grad():
        logits = model(tokens[None], position_ids=positions[None]).logits[0].double()
    scores = logits.log_softmax(-1)
    return scores[:-1].gather(1, tokens[1:, None])[:, 0].tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def other(model, name=None, scale=3.0):
    """A copy in which one tensor, or all of them, is not what it should be."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for own, tensor in changed.named_parameters():
            if name is None or own == name:
                tensor.mul_(scale)
    return changed


def make_canary(model, engines, interval=2):
    probe = [[5 + (7 * i + k) % 60 for i in range(24)] for k in range(3)]
    args = SimpleNamespace(canary_interval=interval)
    return Canary(args, FakeTrainer(model), engines, FakeResidency(), probe)


def test_it_looks_after_the_first_push_and_then_every_so_many(model):
    canary = make_canary(model, FakeEngines({"engine-0": model}), interval=3)
    before = torch.get_rng_state(), random.getstate()
    heard = [number for number in range(1, 8) if canary.after_push(number)]
    assert heard == [1, 3, 6]
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1], (
        "it draws nothing"
    )


def test_a_tensor_that_was_not_pushed_is_named(model, caplog):
    name = next(name for name, _ in model.named_parameters() if "mlp" in name)
    engines = FakeEngines({"engine-0": other(model, name, -6.0)}, apart=[name])
    heard = make_canary(model, engines).after_push(1)
    assert heard["rollout/canary/mean_abs_diff"] > TOLERANCE
    assert f"otherwise than they were sent, by their checksums: {name}." in caplog.text


def test_an_engine_that_kept_old_weights_is_told_with_the_push_since_when(model, caplog):
    engines = FakeEngines({"engine-0": model, "engine-1": model})
    canary = make_canary(model, engines)
    canary.after_push(2)
    assert not caplog.records
    engines.models["engine-1"] = other(model, scale=1.5)
    canary.after_push(4)
    assert "engine-1 and the trainer" in caplog.text and "agreed after push 2" in caplog.text
    assert "the fault is this engine's" in caplog.text and "of all tokens differ" in caplog.text
    caplog.clear()
    canary.after_push(6)
    assert not caplog.records  # once, not at every look
    engines.models["engine-1"] = model
    canary.after_push(8)
    assert "agree again after push 8" in caplog.text


def test_positions_that_jump_are_a_matter_of_the_cache_or_the_template(model, caplog):
    make_canary(model, FakeEngines({"engine-0": other(model, scale=1.0)}, shift_from=10)).after_push(1)
    assert "differ from it on" in caplog.text and "the engine's cache" in caplog.text


def test_an_engine_that_cannot_score_is_told_of_once(model, caplog):
    engines = FakeEngines({"engine-0": model})
    engines.score = lambda probe: {"engine-0": "HttpError: 400"}
    canary = make_canary(model, engines)
    assert canary.after_push(1) == canary.after_push(2) == {}
    assert caplog.text.count("Canary: engine-0 did not score") == 1


def test_where_the_push_left_no_engine_it_waits_for_the_next_that_serves(model, monkeypatch):
    engines = FakeEngines({"engine-0": model})
    hear, answers = engines.score, [{}, {}]
    engines.score = lambda probe: answers.pop() if answers else hear(probe)
    canary = make_canary(model, engines)
    assert canary.after_push(1) and not answers
    monkeypatch.setattr("slime.cluster.canary.canary._PATIENCE_S", 0.0)
    answers[:] = [{}]
    assert not canary.after_push(2) and canary.after_push(3), "made up for by the next push"
    assert not canary.after_push(5)
