"""Plug-ins by path, where several threads ask at once."""

from concurrent.futures import ThreadPoolExecutor

from slime.utils.misc import load_function


def test_a_file_that_many_threads_load_at_once_is_run_once_and_whole_for_all(tmp_path):
    file = tmp_path / "slow_plugin.py"
    marks = tmp_path / "marks"
    file.write_text(
        f"import time\nopen({str(marks)!r}, 'a').write('x')\ntime.sleep(0.3)\ndef late(): return 'whole'\n"
    )
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: load_function(f"{file}:late")(), range(8)))
    assert found == ["whole"] * 8
    assert marks.read_text() == "x"
