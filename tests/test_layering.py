"""A folder of slime imports only folders above it; siblings on one line never import each other."""

import ast
import functools
import graphlib
import re
from pathlib import Path

from source_trees import nodes_of, tree_of

ROOT = Path(__file__).parent.parent
LAYERS = [
    {"utils"},
    {"liveness"},
    {"catalog"},
    {"arguments", "record"},
    {"observability"},
    {"plugins"},
    {"data", "algorithms", "wire"},
    {"batch"},
    {"rollout", "engines", "backends", "weight_sync"},
    {"agent"},
    {"preflight", "step", "runtime"},
    {"cluster", "dashboard"},
    {"loop", "loop_async"},
    {"simulation"},
    {"cli"},
    {"api"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Parts that no training step needs: only a catalog row, a flag or a command names them.
LEAVES = {"agent"}
OUTSIDE = {"moved", "__main__", "__init__"}  # stand outside the layers
# Sub-folders, and what of their own folder they never import: "*" is every other sub-folder of it.
NEVER = {
    "arguments.core": ("arguments.groups", "arguments.passthrough"),
    "arguments.passthrough": ("arguments.groups",),
    "backends.attention": ("backends.shared", "backends.fsdp", "backends.megatron"),
    "backends.experts": ("backends.shared", "backends.fsdp", "backends.megatron"),
    "backends.fp8": ("backends.shared", "backends.fsdp", "backends.megatron"),
    "backends.families": ("backends.fsdp", "backends.megatron"),
    "backends.torch_dist": ("backends.fsdp", "backends.megatron"),
    "backends.shared": ("backends.fsdp", "backends.megatron"),
    "backends.fsdp": ("backends.megatron",),
    "backends.megatron": ("backends.fsdp",),
    "engines.embedded": ("engines.sglang",),
    "engines.sglang": ("engines.embedded",),
    "rollout.rm_hub": (
        "rollout.filter_hub",
        "rollout.sglang_rollout",
        "rollout.collection",
        "rollout.generation",
    ),
    "rollout.generation": (
        "rollout.collection",
        "rollout.rm_hub",
        "rollout.filter_hub",
        "rollout.sglang_rollout",
    ),
    "runtime.worker_main": ("runtime.local", "runtime.on_ray"),
}


def modules() -> dict[str, Path]:
    """Dotted name below slime -> file."""
    found = {}
    for path in sorted((ROOT / "slime").rglob("*.py")):
        parts = path.relative_to(ROOT / "slime").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@functools.cache
def modules_imported_by(path: Path) -> frozenset[str]:
    """Modules of slime that a file imports, wherever in the file."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("slime.") in MODULES else node.module for name in submodules]
        else:
            continue
        found |= {name.removeprefix("slime.") for name in names if name.startswith("slime.")}
    return frozenset(found)


def imports_of(path: Path) -> set[str]:
    """Top-level parts of slime that a file imports, wherever in the file."""
    return {name.split(".")[0] for name in modules_imported_by(path)}


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


def test_no_other_folder_imports_a_leaf():
    wrong = [
        f"{path.relative_to(ROOT)} imports slime.{leaf}"
        for part, path in sources()
        for leaf in sorted(imports_of(path) & LEAVES)
        if leaf != part
    ]
    assert not wrong, "\n".join(wrong)


def is_within(module: str, folder: str) -> bool:
    return module == folder or module.startswith(folder + ".")


def test_sub_folders_keep_to_their_order():
    wrong = [
        f"{module} imports {other}"
        for folder, forbidden in NEVER.items()
        for module, path in MODULES.items()
        if is_within(module, folder)
        for other in sorted(modules_imported_by(path))
        if any(is_within(other, name) for name in forbidden)
    ]
    assert not wrong, "\n".join(wrong)
    assert [name for name in NEVER if name not in MODULES] == []
    assert [name for names in NEVER.values() for name in names if name not in MODULES] == []


def test_serving_knows_nothing_of_the_run_around_it():
    """`cluster` is the run; `cluster.serving` is a room of its own in it."""
    wrong = [
        f"{module} imports {other}"
        for module, path in MODULES.items()
        if is_within(module, "cluster.serving")
        for other in sorted(modules_imported_by(path))
        if is_within(other, "cluster") and not is_within(other, "cluster.serving")
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle():
    """Also not by imports within functions."""
    graph = {module: modules_imported_by(path) & MODULES.keys() for module, path in MODULES.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None


def test_only_one_module_imports_ray():
    wrong = []
    for path in (ROOT / "slime").rglob("*.py"):
        for node in nodes_of(path):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "ray" for name in names):
                wrong.append(str(path.relative_to(ROOT)))
    assert set(wrong) == {"slime/runtime/on_ray.py"}


def test_every_module_says_what_it_is_for():
    silent = [
        str(path.relative_to(ROOT))
        for path in [*(ROOT / "slime").rglob("*.py"), ROOT / "train.py", ROOT / "train_async.py"]
        if not ast.get_docstring(tree_of(path))
    ]
    assert not silent, silent


def test_the_loop_fits_one_screen():
    assert len((ROOT / "slime" / "loop.py").read_text().splitlines()) <= 50


def test_the_layers_name_only_what_exists():
    there = {path.name.removesuffix(".py") for path in (ROOT / "slime").iterdir()}
    assert set(LEVEL) | OUTSIDE <= there


def paths_named_in(page: str) -> list[str]:
    """Words in backquotes that name a file or folder of
    ours: `slime.cluster.run_opening.py`, `collect.py`, `rm_hub/`.
    """
    words = re.findall(r"`([\w./{}-]+)`", page)
    return [word for word in words if re.search(r"\.(py|md)$|^[\w./-]+/$", word)]


def exists_somewhere(name: str) -> bool:
    """From the root or the package; a bare name anywhere in the tree of sources."""
    name = name.rstrip("/")
    if (ROOT / name).exists() or (ROOT / "slime" / name).exists():
        return True
    return any(
        str(path).endswith("/" + name)
        for top in ("slime", "tests", "docs")
        for path in (ROOT / top).rglob("*")
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


def test_the_tree_in_the_docs_names_what_exists():
    tree = re.search(r"## The tree\n\n((?:    .*\n)+)", (ROOT / "docs" / "architecture.md").read_text())
    assert tree, "docs/architecture.md draws no tree"
    named = [line.split()[0] for line in tree.group(1).splitlines() if not line.startswith(" " * 8)]
    assert [name for name in named if not (ROOT / name).exists()] == []
    parts = {f"slime/{path.name}" for path in (ROOT / "slime").iterdir() if any(path.glob("*.py"))}
    assert parts <= set(named)
