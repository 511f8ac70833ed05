"""The limits of size that keep the code readable: lines per folder, per file and per function."""

import ast
from collections import Counter
from pathlib import Path

from source_trees import tree_of

PACKAGE = Path(__file__).parent.parent / "slime"
# Lines of Python per folder. A budget may move to another folder in a commit that says why.
BUDGETS: dict[str, int] = {
    "agent": 10150,
    "algorithms": 2300,
    "arguments": 7650,
    "backends": 13200,
    "batch": 1130,
    "catalog": 1900,
    "cli": 7750,
    "cluster": 6620,
    "dashboard": 1710,
    "data": 1230,
    "engines": 8380,
    "liveness": 1350,
    "observability": 2850,
    "preflight": 2490,
    "record": 2900,
    "rollout": 8240,
    "runtime": 1860,
    "simulation": 2150,
    "step": 1990,
    "utils": 6020,
    "weight_sync": 3050,
    "wire and rest": 2250,
}
STATEMENTS = 60_300
LONGEST_FILE = 500
LONGEST_FUNCTION = 80
FILES = sorted(PACKAGE.rglob("*.py"))


def folder_of(path: Path) -> str:
    name = path.relative_to(PACKAGE).parts[0]
    return name if name in BUDGETS else "wire and rest"


def test_every_folder_keeps_its_budget():
    lines = Counter[str]()
    for path in FILES:
        lines[folder_of(path)] += len(path.read_text().splitlines())
    over = {name: (lines[name], budget) for name, budget in BUDGETS.items() if lines[name] > budget}
    assert not over, f"folder: (lines, budget): {over}"


def test_the_number_of_statements_keeps_its_limit():
    found = sum(isinstance(node, ast.stmt) for path in FILES for node in ast.walk(tree_of(path)))
    assert found <= STATEMENTS


def test_no_file_and_no_function_is_too_long():
    wrong = []
    for path in FILES:
        name = path.relative_to(PACKAGE.parent)
        if (count := len(path.read_text().splitlines())) > LONGEST_FILE:
            wrong.append(f"{name} has {count} lines")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > LONGEST_FUNCTION:
                    wrong.append(f"{name}: {node.name} has {count} lines")
    assert not wrong, "\n".join(wrong)
