"""The tools that come with slime: calculator, programs and files in a box, search."""

import asyncio

import pytest

from slime.agent.tools import BoxTools, Corpus, ToolError, ToolSet, calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("2^10", "1024"),
        ("7/2", "3.5"),
        ("-7 // 2", "-4"),
        ("sqrt(2)", "1.41421356237"),
        ("max(3, gcd(12, 18))", "6"),
        ("123456789 * 987654321", "121932631112635269"),
        ("pi", "3.14159265359"),
    ],
)
def test_the_calculator_computes(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')",
        "9**9**9**9",
        "10**100000",
        "1/0",
        "(1).real",
        "[x for x in (1,)]",
        "'a' * 10**9",
        "(-8) ** 0.5",
        "2 +",
        "1" * 2000,
        "(" * 500 + ")" * 500,
        "sqrt(-1)",
        "log(0)",
        "max(key=1)",
        "1e308 * 10 ** 400",
        "",
    ],
)
def test_the_calculator_refuses_what_is_not_arithmetic(expression):
    with pytest.raises(ToolError):
        calculate(expression)


def test_programs_and_files_share_one_box():
    async def inner():
        async with BoxTools(timeout_s=60) as box:
            tools = ToolSet([box.python, box.shell, box.read_file, box.write_file, box.edit_file])

            async def ask(name, **arguments):
                return (await tools.call(name, arguments)).text

            assert await ask("python", code="print(6 * 7)") == "42"
            failed = await ask("python", code="1 / 0")
            assert failed.endswith("ZeroDivisionError: division by zero\n[exit code 1]")
            assert await ask("python", code="x = 1") == "[it printed nothing]"
            assert await ask("write_file", path="a.py", content="one\ntwo\ntwo\n") == "a.py has 3 lines now"
            assert await ask("read_file", path="a.py", first_line=2) == "2 two\n3 two"
            assert await ask("edit_file", path="a.py", old="one", new="1") == "a.py is changed"
            assert await ask("shell", command="cat a.py; exit 3") == "1\ntwo\ntwo\n[exit code 3]"
            assert "occurs 2 times" in await ask("edit_file", path="a.py", old="two", new="2")
            assert "is not in the file" in await ask("edit_file", path="a.py", old="six", new="6")
            assert "there is no file b.py; files here: ./program.py, ./a.py" in (
                await ask("read_file", path="b.py")
            ).replace("./a.py, ./program.py", "./program.py, ./a.py")
            assert "first_line is 9" in await ask("read_file", path="a.py", first_line=9)
            assert "cannot be read" in await ask("edit_file", path="", old="a", new="b")
            assert "cannot be written" in await ask("write_file", path="a.py/b", content="x")

    asyncio.run(inner())


def test_no_box_is_started_for_an_episode_without_calls():
    async def inner():
        async with BoxTools("no such kind"):
            pass

    asyncio.run(inner())


def test_search_finds_documents_by_their_words(tmp_path):
    pytest.importorskip("bm25s", reason="pip install 'slime-rl[search]'")
    corpus = Corpus(["Rome is the capital of Italy", "Oslo is the capital of Norway"])
    tools = ToolSet([corpus.search])

    def ask(**arguments):
        return asyncio.run(tools.call("search", arguments)).text

    assert ask(query="capital Norway", num_results=1) == "[1] Oslo is the capital of Norway"
    assert ask(query="zebra") == "nothing found; try other words"
    assert "choose 1 to 20" in ask(query="Rome", num_results=0)
