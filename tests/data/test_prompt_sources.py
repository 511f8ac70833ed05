"""Prompt files: formats, slices, and errors that name file and line."""

import json

import pytest

from slime.data.prompt_sources import parse_slice, read_file


def write_rows(path, count=10):
    path.write_text("".join(json.dumps({"i": i}) + "\n" for i in range(count)))
    return str(path)


def ids(spec):
    return [row["i"] for row in read_file(spec)]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("[2:5]", [2, 3, 4]),
        ("[:3]", [0, 1, 2]),
        ("[8:]", [8, 9]),
        ("[-2:]", [8, 9]),
        ("[:-8]", [0, 1]),
        ("[-3:-1]", [7, 8]),
    ],
)
def test_a_slice_takes_rows_like_a_python_slice(tmp_path, part, expected):
    assert ids(write_rows(tmp_path / "a.jsonl") + "@" + part) == expected


def test_several_files_come_one_after_the_other(tmp_path):
    a, b = write_rows(tmp_path / "a.jsonl", 2), write_rows(tmp_path / "b.jsonl", 3)
    assert ids(f"{a},{b}@[1:]") == [0, 1, 1, 2]
    assert ids([a, b]) == [0, 1, 0, 1, 2]


def test_a_comma_in_an_existing_name_does_not_split_it(tmp_path):
    assert ids(write_rows(tmp_path / "a,b.jsonl", 2)) == [0, 1]


def test_blank_lines_are_skipped_and_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"i": 1}\n\n  \n{"i": 2}\n')
    assert ids(str(path)) == [1, 2]


def test_a_malformed_line_names_file_and_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"i": 1}\n\n{"i": 2\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 3: not valid JSON"):
        ids(str(path))


def test_a_line_that_is_no_object_is_an_error(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("[1, 2]\n")
    with pytest.raises(ValueError, match=r"line 1: expected a JSON object, found list"):
        ids(str(path))


def test_bytes_that_are_no_text_are_an_error(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"i": "\xff\xfe"}\n')
    with pytest.raises(ValueError, match="not UTF-8"):
        ids(str(path))


def test_missing_file_wrong_extension_and_bad_slice_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.jsonl"):
        ids(str(tmp_path / "gone.jsonl"))
    other = tmp_path / "a.txt"
    other.write_text("[]")
    with pytest.raises(ValueError, match=r"prompts come from"):
        ids(str(other))
    with pytest.raises(ValueError, match="start:end"):
        parse_slice("a.jsonl@[one:2]")


def test_parquet_rows_equal_jsonl_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.table({"i": list(range(10))}), tmp_path / "a.parquet")
    assert ids(f"{tmp_path}/a.parquet") == list(range(10))
    assert ids(f"{tmp_path}/a.parquet@[-3:]") == [7, 8, 9]


def test_a_broken_parquet_file_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    path.write_bytes(b"not parquet at all")
    with pytest.raises(ValueError, match=r"a\.parquet: not a readable parquet file"):
        ids(str(path))
