"""A removed flag is an error that names its replacement; run folders that recorded it still resume."""

import json

import pytest
from argument_helpers import parse
from slime_flags import MEGATRON, OLDER, SLIME

from slime.arguments.all_flags import all_specs
from slime.arguments.core.removed import REMOVED_FLAGS
from slime.utils.files.run_file import RUN_FILE, is_unfinished, open_run_file, read_run


@pytest.mark.parametrize("name", REMOVED_FLAGS)
def test_a_removed_flag_names_what_to_do(name):
    with pytest.raises(ValueError, match=f"--{name}: ") as caught:
        parse(f"--{name}", "1")
    said = str(caught.value)
    named = [word for word in said.replace("`", " ").split()[1:] if word.startswith("--")]
    known = {option for spec in all_specs().values() for option in (*spec.on_options, *spec.off_options)}
    assert all(word.rstrip(".,:;)") in known or word.startswith("--moe-") for word in named), said


def test_no_flag_of_other_releases_was_removed():
    assert not set(REMOVED_FLAGS) & {*SLIME, *MEGATRON, *OLDER}


def test_no_removed_flag_is_declared():
    assert not {name.replace("-", "_") for name in REMOVED_FLAGS} & set(all_specs())


def test_a_run_folder_that_recorded_removed_flags_resumes(tmp_path):
    save = str(tmp_path / "checkpoints")
    settings = vars(parse(save=save, run_dir=tmp_path / "run"))
    (tmp_path / "run").mkdir()
    recorded = {name: {"value": value, "source": "default"} for name, value in settings.items()}
    recorded = json.loads(json.dumps(recorded, default=str))
    open_run_file(tmp_path / "run", recorded, save, None, None)
    file = tmp_path / "run" / RUN_FILE
    content = json.loads(file.read_text())
    for name in REMOVED_FLAGS:
        content["settings"][name.replace("-", "_")] = {"value": 3, "source": "command line"}
    content["settings"]["megatron_config"] = {"value": None, "source": "default"}
    content["settings"].pop("engine_topology")
    file.write_text(json.dumps(content))
    assert read_run(tmp_path / "run") is not None
    assert is_unfinished(tmp_path / "run", settings, save)
