"""A folder of slime imports only folders above it; siblings on one line never import each other."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = [
    {"utils"},
    {"catalog"},
    {"arguments", "observability", "plugins"},
    {"data", "algorithms", "wire"},
    {"batch"},
    {"rollout", "engines", "backends", "weight_sync"},
    {"cluster"},
    {"loop", "loop_async"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
OUTSIDE = {"moved", "__main__", "__init__"}  # stand outside the layers


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
    return [(part, path) for part, path in parts if part not in OUTSIDE]


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


def test_the_layers_name_only_what_exists():
    there = {path.name.removesuffix(".py") for path in (ROOT / "slime").iterdir()}
    assert set(LEVEL) | OUTSIDE <= there


def paths_named_in(page: str) -> list[str]:
    """Words in backquotes that name a file or folder of ours: `slime/cluster/run.py`, `collect.py`, `rm_hub/`."""
    words = re.findall(r"`([\w./{}-]+)`", page)
    return [word for word in words if re.search(r"\.(py|md)$|^[\w./-]+/$", word)]


def exists_somewhere(name: str) -> bool:
    """From the root or the package; a bare name anywhere in the tree of sources."""
    name = name.rstrip("/")
    if (ROOT / name).exists() or (ROOT / "slime" / name).exists():
        return True
    return any(
        str(path).endswith("/" + name) for top in ("slime", "tests", "docs") for path in (ROOT / top).rglob("*")
    )


def test_the_maps_name_only_files_that_exist():
    wrong = {
        page: missing
        for page in ("docs/architecture.md", "README.md")
        if (missing := [p for p in paths_named_in((ROOT / page).read_text()) if not exists_somewhere(p)])
    }
    assert not wrong, wrong


def test_the_map_of_layers_in_the_docs_is_the_one_that_is_enforced():
    page = (ROOT / "docs" / "architecture.md").read_text()
    drawn = re.search(r"## Layers\n\n[^\n]+\n\n((?:    [^\n]+\n)+)", page)
    assert drawn, "docs/architecture.md draws no layers"
    lines = [set(re.split(r"\s{3,}", line.strip())[0].split()) for line in drawn.group(1).splitlines()]
    assert lines == LAYERS


def test_the_tree_in_the_readme_names_only_what_exists():
    tree = re.search(r"## The tree\n\n((?:    .*\n)+)", (ROOT / "README.md").read_text())
    assert tree, "README.md draws no tree"
    named = [line.split()[0] for line in tree.group(1).splitlines() if not line.startswith(" " * 8)]
    assert [name for name in named if not (ROOT / name).exists()] == []
