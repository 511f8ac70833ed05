"""`slime weight-agent` and `slime weight-publisher`: mistakes of a user are one clear line."""

import socket

import pytest

from slime.cli.main import main

pytest.importorskip("zstandard")
pytest.importorskip("xxhash")


def end(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code


def test_a_publisher_needs_a_folder_that_is_there(tmp_path, capsys):
    assert end("weight-publisher", str(tmp_path / "none"), "--port", "0") == 2
    assert "is not a folder; give the trainer's --update-weight-disk-dir" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert end("weight-publisher", str(tmp_path), "--port", port) == 2
    assert f"--port {port} on --host 127.0.0.1 cannot be used" in capsys.readouterr().err


def test_an_agent_needs_the_address_of_an_engine(tmp_path, capsys):
    words = ("--source", str(tmp_path), "--local-checkpoint-dir", str(tmp_path / "l"), "--port", "0")
    assert end("weight-agent", "--engine", "somewhere", *words) == 2
    assert "--engine: 'somewhere' is not the address of a server" in capsys.readouterr().err
    assert end("weight-agent", *words) == 2
