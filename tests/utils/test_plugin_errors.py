"""Whether an exception of a user's function may pass, and what its author is told."""

import json
import re
import subprocess
import urllib.error

import pytest

from slime.utils.errors import EngineResponseError, RunStopped
from slime.utils.http_utils import HttpError
from slime.utils.plugin_errors import PluginError, may_pass, plugin_call, wrong_return


class JudgeIsBusy(Exception):
    pass


class BadLabel(ValueError):
    pass


def raised(error, cause=None):
    try:
        try:
            if cause is not None:
                raise cause
        except Exception:
            raise error  # noqa: B904 - as users do
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        ConnectionResetError(),
        OSError(28, "No space left on device"),
        PermissionError(),
        urllib.error.URLError("refused"),
        subprocess.TimeoutExpired("judge", 3),
        EOFError(),
        MemoryError(),
        HttpError(503, "busy", "http://judge"),
        EngineResponseError("garbage"),
        JudgeIsBusy(),
        ExceptionGroup("both", [TimeoutError(), OSError()]),
        raised(RuntimeError("the judge failed"), cause=TimeoutError()),
    ],
)
def test_what_comes_from_outside_may_pass(error):
    assert may_pass(error)


@pytest.mark.parametrize(
    "error",
    [
        *(
            KeyError("gold"),
            IndexError(),
            TypeError(),
            ValueError(),
            AttributeError(),
            NameError(),
            ZeroDivisionError(),
        ),
        *(
            AssertionError(),
            ImportError(),
            NotImplementedError(),
            RecursionError(),
            StopAsyncIteration(),
            SystemExit(1),
        ),
        *(RuntimeError("boom"), Exception("boom"), FileNotFoundError("gold.json"), BadLabel()),
        json.JSONDecodeError("no", "", 0),
        re.error("bad pattern"),
        UnicodeDecodeError("utf-8", b"", 0, 1, "no"),
        ExceptionGroup("both", [TimeoutError(), KeyError()]),
        raised(KeyError("in the handler"), cause=TimeoutError()),
    ],
)
def test_a_mistake_comes_again(error):
    assert not may_pass(error)


def fine(args):
    return 1


def calls_a_library(text):
    return json.loads(text)


HERE = f"{__file__}:calls_a_library"


def test_the_line_is_the_user_s_own_even_when_a_library_raised():
    with pytest.raises(PluginError) as caught, plugin_call("--flag", HERE, lambda: "sample 3"):
        calls_a_library("{")
    line = calls_a_library.__code__.co_firstlineno + 1
    assert f"at {__file__}:{line} in calls_a_library: return json.loads(text)" in str(caught.value)
    assert (
        "--flag" in str(caught.value)
        and "JSONDecodeError" in str(caught.value)
        and "for sample 3" in str(caught.value)
    )


def test_without_a_line_of_the_user_s_the_definition_is_named():
    with pytest.raises(PluginError, match=f":{fine.__code__.co_firstlineno} .its definition.*") as caught:
        wrong_return("--flag", f"{__file__}:fine", "returned 1; return 2.")
    assert "returned 1; return 2." in str(caught.value)


@pytest.mark.parametrize("error", [RunStopped("enough"), TimeoutError("slow"), HttpError(500, "", "")])
def test_the_rest_rises_as_it_is(error):
    with pytest.raises(type(error)) as caught, plugin_call("--flag", HERE):
        raise error
    assert caught.value is error


def test_an_exception_kept_by_the_caller_rises_as_it_is():
    with pytest.raises(BadLabel), plugin_call("--flag", HERE, keep=(BadLabel,)):
        raise BadLabel
