"""Arguments of an SGLang server follow what its release knows."""

from slime.engines.sglang.run_server import known_words

WORDS = ["--model-path", "m", "--image-processor-backend", "pil", "--port", "1"]


def test_releases_without_a_choice_of_image_processor_get_their_switch():
    assert known_words(WORDS, {"--model-path", "--image-processor-backend"}) == WORDS
    older = {"--model-path", "--disable-fast-image-processor"}
    switched = ["--model-path", "m", "--disable-fast-image-processor", "--port", "1"]
    assert known_words(WORDS, older) == switched
    fast = [word if word != "pil" else "torchvision" for word in WORDS]
    assert known_words(fast, older) == ["--model-path", "m", "--port", "1"]
    assert known_words(["--port", "1"], older) == ["--port", "1"]
