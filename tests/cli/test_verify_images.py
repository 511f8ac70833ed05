"""`slime verify-model` compares vision-language models with both towers."""

import pytest
from tiny_vision import FAMILIES, make_vision_folder

from slime.cli.verify_model import main


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_images_are_verified(tmp_path, family, capsys):
    folder = make_vision_folder(tmp_path / "m", family)
    assert main(["--hf-checkpoint", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "log-probs" in out and "all agree" in out
    assert main(["--hf-checkpoint", str(folder), "--tolerance", "1e-12"]) == 1
