"""A saved model takes its place in one rename, and touches nothing beside it."""

import pytest

from slime.backends.shared.hf_folder import _copy_other_files, _replace


@pytest.fixture
def new(tmp_path):
    return write(tmp_path / "hf-3.tmp", "config.json", "new")


def write(folder, name, text):
    folder.mkdir()
    (folder / name).write_text(text)
    return folder


def test_a_model_saved_again_replaces_the_one_before(tmp_path, new):
    path = write(tmp_path / "hf-3", "config.json", "old")
    _replace(new, path)
    assert [p.name for p in tmp_path.iterdir()] == ["hf-3"]
    assert (path / "config.json").read_text() == "new"


def test_a_folder_of_the_user_beside_it_is_not_touched(tmp_path, new):
    beside = [write(tmp_path / name, "thesis.tex", "years of work") for name in ("hf-3.old", "hf-3.old-1")]
    _replace(new, write(tmp_path / "hf-3", "config.json", "old"))
    assert all((folder / "thesis.tex").exists() for folder in beside)


def test_a_model_that_brings_its_own_code_keeps_it(tmp_path, new):
    source = write(tmp_path / "source", "configuration_mimo.py", "class MiMoConfig: ...")
    (source / "tokenizer_config.json").write_text("{}")
    (source / "weights.bin").write_text("not these")
    _copy_other_files(str(source), new)
    assert {p.name for p in new.iterdir()} == {
        "config.json",
        "configuration_mimo.py",
        "tokenizer_config.json",
    }
