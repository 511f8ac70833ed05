"""Prompts from where people have them: tables, lists, addresses, a hub; columns and templates."""

import http.server
import json
import threading

import pytest

from slime.catalog.datasets import hub_parts, why_unreadable
from slime.data.copies import forget_copies
from slime.data.dataset import Dataset, check_prompt_file
from slime.data.prompt_rows import PromptFormat, row_to_sample
from slime.data.prompt_sources import read_rows

ROWS = [{"question": f"What is {i}+1?", "answer": f"so it is #### {i + 1}"} for i in range(4)]
GSM = PromptFormat(prompt_template="Q: {question}\nA:", label_key="answer", label_pattern="#### (.+)")


def rows_of(source):
    return [row for _, row in read_rows(str(source))]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


CSV = "question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in ROWS)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "\ufeff" + CSV),
        ("a.CSV", CSV.replace("\n", "\r\n")),
        ("a.tsv", CSV.replace(",", "\t")),
        ("list.json", json.dumps(ROWS, indent=1)),
        ("lines.json", "".join(json.dumps(row) + "\n" for row in ROWS)),
    ],
)
def test_tables_and_lists_give_the_same_rows(tmp_path, name, text):
    assert rows_of(write(tmp_path / name, text)) == ROWS
    assert rows_of(f"{tmp_path / name}@[1:-1]") == ROWS[1:-1]


def test_a_quoted_field_may_hold_commas_quotes_and_lines(tmp_path):
    path = write(tmp_path / "a.csv", 'q,a\n"one, ""two""\nthree",1\n\nfour,2\n')
    found = [(str(place), row) for place, row in read_rows(str(path))]
    assert found[0][1] == {"q": 'one, "two"\nthree', "a": "1"}
    assert found[1][0].endswith("line 5")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("q,a\n1,2\n1,2,3\n", r"line 3: 3 fields, but the table has 2 columns \(q, a\)"),
        ("q,q\n1,2\n", r"line 1: several columns have the name 'q'"),
        ("q,\n1,2\n", r"line 1: column 2 has no name"),
        ('q,a\n1,"two\n', r"line 2: not a table \(unexpected end of data\)"),
        ("q,a\n1,\udcff\n", r"line 2: not UTF-8 text \(byte 0xff"),
    ],
)
def test_what_is_wrong_with_a_table_is_told_with_its_line(tmp_path, text, complaint):
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=complaint):
        rows_of(path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[1]", "row 1: expected a JSON object, found int"),
        ('[{"a": 1}', "not valid JSON"),
        ('{\n "data": []\n}', "list of objects, or one object per line"),
    ],
)
def test_what_is_wrong_with_a_list_is_told(tmp_path, text, complaint):
    with pytest.raises(ValueError, match=complaint):
        rows_of(write(tmp_path / "a.json", text))


def test_a_template_and_a_pattern_make_prompt_and_label():
    sample = row_to_sample(ROWS[2], GSM)
    assert (sample.prompt, sample.label) == ("Q: What is 2+1?\nA:", "3")
    braces = PromptFormat(prompt_template="{{{n}}}", metadata_columns=("n",))
    assert row_to_sample({"n": 7}, braces).prompt == "{7}"
    assert row_to_sample({"n": 7}, braces).metadata == {"n": 7}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (
            {"qestion": "x", "answer": "#### 1"},
            r"row 3: no column 'question' \(--prompt-template\); did you mean",
        ),
        ({"question": None, "answer": "#### 1"}, "column 'question' .--prompt-template. is NoneType"),
        ({"question": ["x"], "answer": "#### 1"}, "is list; a template takes text"),
        (
            {"question": "x", "answer": "1"},
            r"row 3: --label-pattern '#### \(.\+\)' finds nothing in column 'ans",
        ),
        ({"question": "x", "answer": 1}, "finds nothing in column 'answer': 1"),
        ({"question": "x", "anser": 1}, "no column 'answer' .--label-key.; did you mean 'anser'"),
    ],
)
def test_a_row_that_does_not_fit_is_told_with_row_column_and_near_names(row, complaint):
    with pytest.raises(ValueError, match=complaint):
        row_to_sample(row, GSM, where="x.csv, row 3")


def test_all_columns_may_go_to_the_metadata_as_plain_values():
    import datetime

    row = {"input": "x", "day": datetime.date(2026, 1, 2), "odd": object(), "deep": {"a": (1, 2)}}
    kept = row_to_sample(row, PromptFormat(metadata_columns=("*",))).metadata
    assert kept == {"input": "x", "day": "2026-01-02", "deep": {"a": [1, 2]}}
    with pytest.raises(ValueError, match=r"column 'odd' .--metadata-columns. holds a object"):
        row_to_sample(row, PromptFormat(metadata_columns=("odd",)))


def test_memory_and_file_addresses_are_read_by_fsspec(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://deep/prompts.csv", "w") as file:
        file.write(CSV)
    forget_copies()
    assert rows_of("memory://deep/prompts.csv") == ROWS
    assert rows_of(f"file://{write(tmp_path / 'a.csv', CSV)}@[:1]") == ROWS[:1]
    with pytest.raises(FileNotFoundError, match=r"memory://deep/gone\.csv: there is no such file"):
        rows_of("memory://deep/gone.csv")
    with pytest.raises(ValueError, match=r"nosuch://a.csv: such addresses cannot be read"):
        rows_of("nosuch://a.csv")
    with pytest.raises(ValueError, match=r"ends in '\.html'"):
        rows_of("https://example.com/a.html")


class Served(http.server.BaseHTTPRequestHandler):
    """/ok.csv and /ok.json; /broken.csv fails; anything else is not there."""

    def do_GET(self):
        status, body = {
            "/ok.csv": (200, CSV),
            "/ok.json": (200, json.dumps(ROWS)),
            "/broken.csv": (500, "no"),
        }.get(self.path.partition("?")[0], (404, ""))
        self.server.asked.append(self.path)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_HEAD(self):
        self.send_error(405)  # as servers of signed addresses do

    def log_message(self, *words):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Served) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        forget_copies()
        yield server
        server.shutdown()
        thread.join()


def test_an_address_is_fetched_once_and_what_fails_is_told(server):
    base = f"http://127.0.0.1:{server.server_port}"
    assert rows_of(f"{base}/ok.csv?download=true") == ROWS
    asked = len(server.asked)
    assert rows_of(f"{base}/ok.csv?download=true@[1:2]") == ROWS[1:2]
    assert len(server.asked) == asked
    assert rows_of(f"{base}/ok.json") == ROWS
    with pytest.raises(FileNotFoundError, match=r"gone\.csv: there is no such file"):
        rows_of(f"{base}/gone.csv")
    with pytest.raises(ValueError, match=r"broken\.csv: it cannot be fetched \(ClientResponseError: 500"):
        rows_of(f"{base}/broken.csv")
    server.shutdown()
    server.server_close()
    with pytest.raises(ValueError, match=r"late\.csv: it cannot be fetched"):
        rows_of(f"{base}/late.csv")


def test_a_name_on_the_hub_has_three_parts():
    assert hub_parts("hf:openai/gsm8k#main:train") == ("openai/gsm8k", "main", "train")
    assert hub_parts("hf:./folder:test") == ("./folder", None, "test")
    assert "hf:OWNER/NAME" in why_unreadable("hf::train")


@pytest.fixture
def hub_folder(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "gsm"
    folder.mkdir()
    for split in ("train", "test"):
        write(folder / f"{split}.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def test_a_data_set_of_a_folder_becomes_prompts(hub_folder):
    dataset = Dataset(f"hf:{hub_folder}:train@[1:3]", fmt=GSM, seed=3)
    assert [sample.label for sample in dataset.samples] == ["2", "3"]
    assert rows_of(f"hf:{hub_folder}") == ROWS  # train is what is meant where nothing is named
    with pytest.raises(ValueError, match="no split 'tran'; did you mean 'train'"):
        rows_of(f"hf:{hub_folder}:tran")
    with pytest.raises(ValueError, match=r"'foo' not found.*#CONFIGURATION"):
        rows_of(f"hf:{hub_folder}#foo:train")
    with pytest.raises(ValueError, match=r"gsm:train, row 1: no column 'text'"):
        check_prompt_file(f"hf:{hub_folder}:train", PromptFormat(input_key="text"), max_rows=9)


def test_a_data_set_that_was_saved_to_disk_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "alone")
    assert rows_of(f"hf:{tmp_path / 'alone'}") == ROWS
    datasets.DatasetDict({"a": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "split")
    assert rows_of(f"hf:{tmp_path / 'split'}:a") == ROWS
