"""`slime verify-model` names what compares vision-language models."""

from tiny_vision import make_vision_folder

from slime.cli.verify_model import main


def test_a_family_with_images_is_refused_by_name(tmp_path, capsys):
    folder = make_vision_folder(tmp_path / "m", "qwen3_vl")
    try:
        code = main(["--hf-checkpoint", str(folder)])
    except SystemExit as end:
        code = end.code
    assert code == 2 and "is a qwen3_vl: this command compares text models" in capsys.readouterr().err
