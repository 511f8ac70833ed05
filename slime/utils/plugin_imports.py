"""Finds imports that will fail in a plug-in's source and in the user's modules that it imports.

An import inside a function fails when the function runs: in the first rollout, or in the first evaluation.
Modules that the plug-in has not imported are not executed.
"""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import importlib.util
import itertools
import pkgutil
import symtable
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from slime.utils.misc import plugin_module_name
from slime.utils.plugin_errors import is_users_code

_MOST_FILES = 400  # a project of the user's may be large; what is imported first is the nearest
_IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")
_CONDITIONS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Match, ast.ExceptHandler)


@dataclass(frozen=True, slots=True)
class MissingImport:
    """One import that cannot be resolved. `certain`: the plug-in reaches it, whatever the conditions are."""

    file: Path
    line: int
    statement: str
    reason: str
    certain: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} has `{self.statement}`, but {self.reason}"


@dataclass(frozen=True, slots=True)
class _Import:
    """One imported module, or one name of it."""

    module: str  # absolute; "": a relative import in a file without a package
    name: str | None
    line: int
    statement: str
    within: str | None  # the outermost function or class around it
    conditional: bool  # below an `if`, a loop or an `except`


@dataclass(slots=True)
class _Source:
    """The imports of a file, and the identifiers in it."""

    file: Path
    imports: list[_Import] = field(default_factory=list)
    identifiers: set[str] = field(default_factory=set)
    edits_path: bool = False  # it changes sys.path, perhaps only later


def missing_imports(path: str) -> list[MissingImport]:
    """Return every import that will fail in the tree of a loaded plug-in, such as `file.py:name`."""
    owner, _, name = path.rpartition(":" if ":" in path else ".")
    if owner.endswith(".py"):
        file = Path(owner).expanduser().resolve()
        owner = plugin_module_name(file)
    else:
        file = Path(getattr(sys.modules.get(owner), "__file__", None) or "")
    if not file.is_file() or not is_users_code(str(file)):
        return []
    _find.cache_clear()  # what was missing may have been installed since
    sources = _tree(file.resolve(), owner)
    used = {name}.union(*(source.identifiers for source in sources.values()))
    executed = _executed(sources, file.resolve(), used)
    found = []
    for source in sources.values():
        for entry in source.imports:
            reason = _why_missing(entry, source)
            if reason is not None:
                runs = source.file in executed and _is_used(entry, used)
                certain = runs and (_is_slime(entry.module) or not entry.conditional)
                found.append(MissingImport(source.file, entry.line, entry.statement, reason, certain))
    return found


def _tree(file: Path, module: str) -> dict[Path, _Source]:
    """Return the plug-in's file and the user's files that it imports, nearest first."""
    found = {file: _read(file, module)}
    waiting = [found[file]]
    for source in waiting:
        for name, origin in itertools.chain.from_iterable(map(_files_of, source.imports)):
            if origin not in found and len(found) < _MOST_FILES:
                found[origin] = _read(origin, name)
                waiting.append(found[origin])
    return found


def _executed(sources: dict[Path, _Source], first: Path, used: set[str]) -> set[Path]:
    """Return the files that are executed whatever the conditions are."""
    reached = {first}
    waiting = [sources[first]]
    for source in waiting:
        for entry in source.imports:
            if _is_used(entry, used) and not entry.conditional:
                new = {origin for _, origin in _files_of(entry)} & sources.keys() - reached
                reached |= new
                waiting += [sources[origin] for origin in new]
    return reached


def _is_used(entry: _Import, used: set[str]) -> bool:
    """Return whether some file of the plug-in names the function or class around an import."""
    return entry.within is None or entry.within in used


def _files_of(entry: _Import) -> Iterator[tuple[str, Path]]:
    """Yield the user's files that an import executes, with their module names; packages come first."""
    names = list(itertools.accumulate(entry.module.split("."), "{}.{}".format)) if entry.module else []
    for name in names + ([f"{entry.module}.{entry.name}"] if names and entry.name else []):
        spec = _find(name)
        if spec is not None and spec.origin and spec.origin.endswith(".py") and is_users_code(spec.origin):
            yield name, Path(spec.origin).resolve()


def _read(file: Path, module: str) -> _Source:
    try:
        text = file.read_bytes()
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return _Source(file)  # Python says what is wrong with it when it is imported
    source = _Source(file, edits_path=b"sys.path" in text)
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node, within, conditional in _statements(tree, None, False):
        for name, imported in _imported(node, package):
            statement = ast.unparse(node)
            source.imports.append(_Import(name, imported, node.lineno, statement, within, conditional))
    for each in ast.walk(tree):
        match each:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                source.identifiers.add(name)
    return source


def _statements(
    node: ast.AST, within: str | None, conditional: bool
) -> Iterator[tuple[ast.Import | ast.ImportFrom, str | None, bool]]:
    """Yield imports with the outermost definition around them, and whether they depend on a condition.

    Imports for type checkers, and those guarded by `except ImportError`, may be missing and are left out.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, within, conditional
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _statements(child, within or child.name, False)
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from _statements(ast.Module(child.orelse, []), within, conditional)
        elif isinstance(child, ast.Try) and any(map(_catches_imports, child.handlers)):
            yield from _statements(ast.Module(child.finalbody, []), within, conditional)
        else:
            yield from _statements(child, within, conditional or isinstance(child, _CONDITIONS))


def _imported(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[tuple[str, str | None]]:
    """Yield (absolute module, name in it) for each name of an import statement."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, None) for alias in node.names)
        return
    module = node.module or ""
    if node.level:
        parts = package.split(".") if package else []
        kept = parts[: len(parts) - node.level + 1]
        module = ".".join([*kept, *filter(None, [node.module])]) if kept else ""
    yield from ((module, None if alias.name == "*" else alias.name) for alias in node.names)


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    caught = ast.unparse(handler.type) if handler.type is not None else "Exception"
    return any(name in caught for name in _IMPORT_ERRORS)


def _why_missing(entry: _Import, source: _Source) -> str | None:
    """Return why an import fails, and what helps; None: it does not, or that is unknown."""
    if not entry.module:
        return (
            "the file is not in such a package; give the plug-in by its import path (pkg.module.function), "
            "with the folder of pkg on PYTHONPATH."
        )
    spec = _find(entry.module)
    if spec is None:
        return _why_no_module(entry.module, source)
    if entry.name is None or _find(f"{entry.module}.{entry.name}") is not None:
        return None
    names = _names_of(spec)
    if names is None or entry.name in names or entry.name.startswith("__"):
        return None
    near = get_close_matches(entry.name, names, n=1)
    return f"{entry.module} has no {entry.name!r}{f'; did you mean {near[0]!r}' if near else ''}."


def _why_no_module(module: str, source: _Source) -> str | None:
    top = module.split(".")[0]
    package = _find(top)
    if _is_slime(module):
        return f"slime has no module {module}{_near_module(module)}."
    is_library = package is not None and package.origin is not None and not is_users_code(package.origin)
    if source.edits_path or module in sys.modules or is_library:  # libraries may create modules themselves
        return None
    if package is None:
        return (
            f"there is no module {top}: install it, or put the folder that holds it on PYTHONPATH. "
            "Where the plug-in can do without it, put the import in try and except ImportError."
        )
    return f"{top} has no module {module}."


def _is_slime(module: str) -> bool:
    return module.split(".")[0] == "slime"


@functools.cache
def _find(module: str) -> importlib.machinery.ModuleSpec | None:
    """Find a module without executing the packages that it is in."""
    loaded = sys.modules.get(module)
    if loaded is not None and getattr(loaded, "__spec__", None) is not None:
        return loaded.__spec__
    locations = None
    if parent := module.rpartition(".")[0]:
        outer = _find(parent)
        locations = outer.submodule_search_locations if outer is not None else None
        if locations is None:
            return None
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(module, locations)
        except (ImportError, ValueError, AttributeError):
            continue  # a finder of somebody else's
        if spec is not None:
            return spec
    return None


def _names_of(spec: importlib.machinery.ModuleSpec) -> set[str] | None:
    """Return the top-level names of a module of slime or of the user; None: unknown."""
    state = spec.loader_state  # of slime.moved: a new home, or the names of a facade
    if isinstance(state, str):
        home = _find(state)
        return _names_of(home) if home is not None else None
    if isinstance(state, frozenset):
        return set(state)
    origin = spec.origin or ""
    if not origin.endswith(".py") or not (_is_slime(spec.name) or is_users_code(origin)):
        return None
    try:
        text = Path(origin).read_text(encoding="utf-8")
        symbols = symtable.symtable(text, origin, "exec").get_symbols()
    except (OSError, SyntaxError, ValueError):
        return None
    names = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    referenced = {each.get_name() for each in symbols if each.is_referenced()}
    makes_names = {"globals", "vars", "setattr"} & referenced or "__getattr__" in names
    return None if makes_names or "import *" in text else names


def _near_module(module: str) -> str:
    """Return `; did you mean slime.utils.misc` if the package has a module of nearly that name."""
    package, _, last = module.rpartition(".")
    spec = _find(package)
    locations = spec.submodule_search_locations if spec is not None else None
    near = get_close_matches(last, [each.name for each in pkgutil.iter_modules(locations or [])], n=1)
    return f"; did you mean {package}.{near[0]}" if near else ""
