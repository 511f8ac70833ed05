"""The tiny model is a complete Hugging Face directory, and the same seed makes the same one."""

import json

import pytest

from slime.cli.quickstart import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make_checkpoint(tmp_path_factory.mktemp("tiny"), seed=3)


def test_the_checkpoint_loads_and_has_a_hundred_to_two_hundred_thousand_parameters(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert 1e5 < sum(p.numel() for p in model.parameters()) < 2e5


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(folder, tmp_path):
    weights = (folder / "model.safetensors").read_bytes()
    assert weights == (tiny.make_checkpoint(tmp_path / "a", seed=3) / "model.safetensors").read_bytes()
    assert weights != (tiny.make_checkpoint(tmp_path / "b", seed=4) / "model.safetensors").read_bytes()


def test_every_printable_character_is_one_token_and_comes_back(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(tiny.CHARACTERS, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(tiny.CHARACTERS)
    assert tokenizer.decode(ids) == tiny.CHARACTERS


def test_the_chat_template_is_prompt_then_answer_then_end(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "52831>"}, {"role": "assistant", "content": "12358"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == f"52831>12358{tiny.EOS}"
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "52831>"


def test_the_sft_loss_covers_the_answer_and_its_end_only(folder):
    from transformers import AutoTokenizer

    from slime.utils.mask_utils import MultiTurnLossMaskGenerator

    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "52831>"}, {"role": "assistant", "content": "12358"}]
    ids, mask = MultiTurnLossMaskGenerator(tokenizer, "qwen").get_loss_mask(messages)
    assert tokenizer.decode(ids) == f"52831>12358{tiny.EOS}"
    assert mask == [0] * 6 + [1] * 6


def test_readers_of_the_older_format_find_the_names_they_know(folder):
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
