"""A folder of slime imports only folders above it; siblings on one line never import each other."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = [
    {"utils"},
    {"arguments", "observability", "plugins"},
    {"data", "algorithms", "wire"},
    {"batch"},
    {"rollout", "agent", "engines", "backends", "weight_sync"},
    {"cluster"},
    {"loop", "loop_async"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
OUTSIDE = {"moved", "__main__", "__init__"}  # stand outside the layers
# A facade of explicit re-exports for users' old imports may reach anywhere.
FACADES = {"slime/utils/ppo_utils.py"}


def imports_of(path: Path) -> set[str]:
    """Top-level parts of slime that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module] if node.module != "slime" else [f"slime.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("slime.")}
    return found


def sources() -> list[tuple[str, Path]]:
    parts = []
    for path in sorted((ROOT / "slime").rglob("*.py")):
        relative = path.relative_to(ROOT / "slime")
        parts.append((relative.parts[0].removesuffix(".py"), path))
    return [(part, path) for part, path in parts if part not in OUTSIDE and str(path.relative_to(ROOT)) not in FACADES]


def test_every_folder_has_a_layer():
    assert {part for part, _ in sources()} <= set(LEVEL)


def test_folders_import_only_folders_above_them():
    wrong = [
        f"{path.relative_to(ROOT)} imports slime.{other}"
        for part, path in sources()
        for other in imports_of(path)
        if other != part and other in LEVEL and LEVEL[other] >= LEVEL[part]
    ]
    assert not wrong, "\n".join(wrong)


def test_only_one_module_imports_ray():
    wrong = []
    for path in (ROOT / "slime").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "ray" for name in names):
                wrong.append(str(path.relative_to(ROOT)))
    assert set(wrong) == {"slime/cluster/ray_runtime.py"}


def test_every_module_says_what_it_is_for():
    silent = [
        str(path.relative_to(ROOT))
        for path in [*(ROOT / "slime").rglob("*.py"), ROOT / "train.py", ROOT / "train_async.py"]
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent, silent


def test_the_loop_fits_one_screen():
    assert len((ROOT / "slime" / "loop.py").read_text().splitlines()) <= 50
