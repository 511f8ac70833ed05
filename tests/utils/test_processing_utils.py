"""Tokenizers and processors load from a folder; images become data URIs."""

import base64

import pytest
from tiny_model import make_tiny_tokenizer

from slime.utils.processing_utils import (
    encode_image_for_rollout_engine,
    encode_text,
    load_processor,
    load_tokenizer,
)


def test_a_tokenizer_loads_from_a_folder_with_another_template(tmp_path):
    make_tiny_tokenizer().save_pretrained(tmp_path / "m")
    (tmp_path / "t.jinja").write_text("T{{ messages[0]['content'] }}")
    tokenizer = load_tokenizer(str(tmp_path / "m"), str(tmp_path / "t.jinja"))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "Tx"


def test_no_checkpoint_is_an_error_that_names_the_flag():
    with pytest.raises(ValueError, match="--hf-checkpoint"):
        load_tokenizer(None)


def test_a_text_model_has_no_processor(tmp_path):
    make_tiny_tokenizer().save_pretrained(tmp_path / "m")
    assert load_processor(str(tmp_path / "m")) is None


def test_an_image_becomes_a_png_data_uri():
    image = pytest.importorskip("PIL.Image").new("CMYK", (2, 2))
    uri = encode_image_for_rollout_engine(image)
    assert uri.startswith("data:image/png;base64,")
    assert base64.b64decode(uri.split(",")[1]).startswith(b"\x89PNG")
    assert encode_image_for_rollout_engine("http://host/a.png") == "http://host/a.png"


def test_a_folder_without_a_vocabulary_is_no_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_texts_have_the_ids_that_the_tokenizer_gives_them():
    tokenizer = make_tiny_tokenizer()
    special = tokenizer.all_special_tokens[0]
    for text in ("", "1 + 2 = ", f"a{special}b", "é\u4f60 \U0001f600"):
        for splits in (False, True):
            tokenizer.split_special_tokens = splits
            assert encode_text(tokenizer, text) == tokenizer.encode(text, add_special_tokens=False)
    tokenizer.backend_tokenizer.enable_truncation(max_length=1)  # as a call of somebody else may leave it
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert encode_text(tokenizer, "1 + 2") == tokenizer.encode("1 + 2", add_special_tokens=False)


def test_a_tokenizer_with_an_encoding_of_its_own_is_asked():
    class Own(type(make_tiny_tokenizer())):
        def encode(self, text, **kwargs):
            return [7, *super().encode(text, **kwargs)]

    tokenizer = make_tiny_tokenizer()
    tokenizer.__class__ = Own
    assert encode_text(tokenizer, "1") == [7, *make_tiny_tokenizer().encode("1", add_special_tokens=False)]
