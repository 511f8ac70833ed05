"""Tokenizers and processors load from a folder; images become data URIs."""

import base64

import pytest
from tiny_model import make_tiny_tokenizer

from slime.utils.processing_utils import encode_image_for_rollout_engine, load_processor, load_tokenizer


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
