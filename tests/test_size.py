"""The limits of size that keep the code readable: lines per folder, per file and per function."""

import ast
from collections import Counter
from pathlib import Path

from source_trees import nodes_of

PACKAGE = Path(__file__).parent.parent / "slime"
# Lines of Python per folder, together at most 90,500. A budget may move to another folder in a commit
# that says why.
BUDGETS: dict[str, int] = {
    "agent": 8983,
    "algorithms": 2065,
    "arguments": 6338,
    "backends": 13280,
    "batch": 1026,
    "catalog": 1859,
    "cli": 7681,
    "cluster": 6897,
    "dashboard": 1718,
    "data": 1040,
    "engines": 7203,
    "liveness": 1213,
    "observability": 2376,
    "preflight": 2313,
    "record": 2685,
    "rollout": 7181,
    "runtime": 1659,
    "simulation": 1940,
    "step": 1843,
    "utils": 6186,
    "weight_sync": 2494,
    "wire and rest": 2314,
}
STATEMENTS = 57_188
LOOP_REACHES = 38_000  # lines of all modules that slime/loop.py imports, directly or not
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
    found = sum(isinstance(node, ast.stmt) for path in FILES for node in nodes_of(path))
    assert found <= STATEMENTS


def test_no_file_and_no_function_is_too_long():
    wrong = []
    for path in FILES:
        name = path.relative_to(PACKAGE.parent)
        if (count := len(path.read_text().splitlines())) > LONGEST_FILE:
            wrong.append(f"{name} has {count} lines")
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > LONGEST_FUNCTION:
                    wrong.append(f"{name}: {node.name} has {count} lines")
    assert not wrong, "\n".join(wrong)


def imported_by(module: str) -> set[Path]:
    """Return the files of all modules that `module` reaches by import statements, also within functions."""
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        place = PACKAGE.parent / name.replace(".", "/")
        path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if path in found or not path.is_relative_to(PACKAGE) or not path.exists():
            continue
        found.add(path)
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def test_a_training_step_reaches_a_part_of_the_code_only():
    lines = {path: len(path.read_text().splitlines()) for path in imported_by("slime.loop")}
    assert sum(lines.values()) <= LOOP_REACHES, sorted(lines.items(), key=lambda item: -item[1])[:20]
    leaves = ("agent", "dashboard", "simulation", "cli", "api.py")
    assert not [path for path in lines if path.relative_to(PACKAGE).parts[0] in leaves]
