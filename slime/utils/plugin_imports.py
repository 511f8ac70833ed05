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
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from slime.utils.misc import plugin_module_name
from slime.utils.plugin_errors import is_users_code

_MOST_FILES = 400  # a project of the user's may be large; what is imported first is the nearest
_IMPORT_ERRORS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


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
    within: tuple[str, ...]  # functions and classes around it
    conditional: bool  # below an `if`, a loop or an `except`


@dataclass(slots=True)
class _Source:
    """The imports of a file, and the identifiers that each function, class and the module itself use."""

    file: Path
    imports: list[_Import] = field(default_factory=list)
    uses: dict[str, set[str]] = field(default_factory=dict)  # by `key`: at the top level
    edits_path: bool = False  # it changes sys.path, perhaps only later

    @property
    def key(self) -> str:
        return str(self.file)


def missing_imports(path: str) -> list[MissingImport]:
    """Return every import that will fail in the tree of a loaded plug-in, `pkg.module.name` or
    `file.py:name`.
    """
    owner, _, name = path.rpartition(":" if ":" in path else ".")
    if owner.endswith(".py"):
        file = Path(owner).expanduser().resolve()
        owner = plugin_module_name(file)
    else:
        origin = getattr(sys.modules.get(owner), "__file__", None)
        file = Path(origin) if origin else Path()
    if not file.is_file() or not is_users_code(str(file)):
        return []
    _find.cache_clear()  # what was missing may have been installed since
    _names_of_file.cache_clear()
    sources = _tree(file, owner)
    reached = _reached(sources, name)
    found = []
    for source in sources:
        for entry in source.imports:
            reason = _why_missing(entry, source)
            if reason is not None:
                runs = {source.key, *entry.within} <= reached
                ours = entry.module.split(".")[0] == "slime"  # no other machine has it either
                certain = runs and (ours or not entry.conditional)
                found.append(MissingImport(source.file, entry.line, entry.statement, reason, certain))
    return found


def _tree(file: Path, module: str) -> list[_Source]:
    """Return the plug-in's file and the user's files that it imports, nearest first."""
    found = [_read(file.resolve(), module)]
    seen = {found[0].key}
    for source in found:
        for entry in source.imports:
            for name, origin in _files_of(entry):
                source.uses.setdefault(next(iter(entry.within), source.key), set()).add(str(origin))
                if str(origin) not in seen and len(found) < _MOST_FILES:
                    seen.add(str(origin))
                    read = _read(origin, name)
                    if entry.conditional:
                        read.imports = [replace(each, conditional=True) for each in read.imports]
                    found.append(read)
    return found


def _files_of(entry: _Import) -> Iterator[tuple[str, Path]]:
    """Yield the user's files that an import executes, with their module names; packages come first."""
    names = list(itertools.accumulate(entry.module.split("."), "{}.{}".format)) if entry.module else []
    for name in names + ([f"{entry.module}.{entry.name}"] if names and entry.name else []):
        spec = _find(name)
        if spec is not None and spec.origin and spec.origin.endswith(".py") and is_users_code(spec.origin):
            yield name, Path(spec.origin).resolve()


def _read(file: Path, module: str) -> _Source:
    source = _Source(file)
    try:
        text = file.read_bytes()
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return source  # Python says what is wrong with it when it is imported
    source.edits_path = b"sys.path" in text
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    _Reader(source, package).visit(tree)
    return source


class _Reader(ast.NodeVisitor):
    """Collects imports and identifiers of one file."""

    def __init__(self, source: _Source, package: str):
        self._source, self._package = source, package
        self._within: tuple[str, ...] = ()
        self._depth = 0  # of conditions

    def _use(self, *names: str) -> None:
        for owner in self._within or (self._source.key,):
            self._source.uses.setdefault(owner, set()).update(names)

    def visit_Name(self, node: ast.Name) -> None:
        self._use(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._use(node.attr)
        self.generic_visit(node)

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        outer, depth = self._within, self._depth
        # All methods of a class that is used count as used, so only the outermost definition is named.
        self._within, self._depth = (outer or (node.name,)), 0
        self._source.uses.setdefault(node.name, set()).update(self._within)
        self.generic_visit(node)
        self._within, self._depth = outer, depth

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _definition

    def _below_condition(self, node: ast.AST) -> None:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    visit_For = visit_While = visit_AsyncFor = visit_Match = visit_IfExp = _below_condition

    def visit_If(self, node: ast.If) -> None:
        if _is_type_checking(node.test):
            for statement in node.orelse:
                self.visit(statement)
        else:
            self._below_condition(node)

    def visit_Try(self, node: ast.Try) -> None:
        optional = any(_catches_imports(handler.type) for handler in node.handlers)
        for statement in node.body:
            self._visit_optional(statement) if optional else self.visit(statement)
        for handler in node.handlers:
            self._visit_optional(handler) if optional else self._below_condition(handler)
        for statement in node.orelse:
            self._visit_optional(statement) if optional else self.visit(statement)
        for statement in node.finalbody:
            self.visit(statement)

    def _visit_optional(self, node: ast.AST) -> None:
        """Visit what is guarded by `except ImportError`: its imports may be missing."""
        before = len(self._source.imports)
        self.visit(node)
        del self._source.imports[before:]

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node, alias.name, None)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level:
            parts = self._package.split(".") if self._package else []
            kept = parts[: len(parts) - node.level + 1]
            module = ".".join([*kept, *filter(None, [node.module])]) if kept else ""
        for alias in node.names:
            self._add(node, module, None if alias.name == "*" else alias.name)
            if alias.asname:
                self._source.uses.setdefault(alias.asname, set()).add(alias.name)

    def _add(self, node: ast.Import | ast.ImportFrom, module: str, name: str | None) -> None:
        self._source.imports.append(
            _Import(module, name, node.lineno, ast.unparse(node), self._within, self._depth > 0)
        )


def _is_type_checking(test: ast.expr) -> bool:
    return (test.id if isinstance(test, ast.Name) else getattr(test, "attr", "")) == "TYPE_CHECKING"


def _catches_imports(caught: ast.expr | None) -> bool:
    if caught is None:
        return True
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(getattr(name, "id", getattr(name, "attr", "")) in _IMPORT_ERRORS for name in names)


def _reached(sources: Sequence[_Source], name: str) -> set[str]:
    """Return the names of definitions that the plug-in may use, by the identifiers in them."""
    uses: dict[str, set[str]] = {}
    for source in sources:
        for owner, names in source.uses.items():
            uses.setdefault(owner, set()).update(names)
    reached: set[str] = set()
    waiting = [name, sources[0].key]
    while waiting:
        current = waiting.pop()
        if current not in reached:
            reached.add(current)
            waiting += uses.get(current, ())
    return reached


def _why_missing(entry: _Import, source: _Source) -> str | None:
    """Return why an import fails, and what helps; None: it does not, or that is unknown."""
    if not entry.module:
        return (
            "the file is not in such a package; give the plug-in by its import path (pkg.module.function), "
            "with the folder of pkg on PYTHONPATH."
        )
    spec = _find(entry.module)
    top = entry.module.split(".")[0]
    if spec is None:
        if entry.module in sys.modules or _may_be_made(entry.module):
            return None
        if top == "slime":
            return f"slime has no module {entry.module}{_near_module(entry.module)}."
        if source.edits_path:
            return None
        if _find(top) is None:
            return (
                f"there is no module {top}: install it, or put the folder that holds it on PYTHONPATH. "
                "Where the plug-in can do without it, put the import in try and except ImportError."
            )
        return f"{top} has no module {entry.module}."
    if entry.name is None or _find(f"{entry.module}.{entry.name}") is not None:
        return None
    names = _names_of(spec)
    if names is None or entry.name in names:
        return None
    near = get_close_matches(entry.name, names, n=1)
    return f"{entry.module} has no {entry.name!r}{f'; did you mean {near[0]!r}' if near else ''}."


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


def _may_be_made(module: str) -> bool:
    """Return whether a package may create this module itself: libraries do so, the user's own packages do
    not.
    """
    parent = module.rpartition(".")[0]
    while parent:
        spec = _find(parent)
        if spec is not None:
            return spec.origin is not None and not is_users_code(spec.origin) and not _is_slime(parent)
        parent = parent.rpartition(".")[0]
    return False


def _is_slime(module: str) -> bool:
    return module.split(".")[0] == "slime"


def _names_of(spec: importlib.machinery.ModuleSpec) -> set[str] | None:
    """Return the top-level names of a module of slime or of the user; None: unknown."""
    state = spec.loader_state  # of slime.moved: a new home, or the names of a facade
    if isinstance(state, str):
        home = _find(state)
        return _names_of(home) if home is not None else None
    if isinstance(state, frozenset):
        return set(state)
    origin = spec.origin
    if not origin or not origin.endswith(".py") or not (_is_slime(spec.name) or is_users_code(origin)):
        return None
    return _names_of_file(origin)


@functools.cache
def _names_of_file(file: str) -> set[str] | None:
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    names = set(_defined(tree.body))
    made = {"*", "__getattr__", "globals", "vars", "setattr"}  # names may come that nobody wrote here
    return None if names & made or made & _called(tree) else names


def _defined(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield names that statements define, in conditions and loops too; "*": all of another module."""
    yield from ("__name__", "__file__", "__doc__", "__path__", "__package__", "__spec__")
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        for part in ("body", "orelse", "finalbody"):
            yield from _defined(getattr(node, part, ()))
        for handler in getattr(node, "handlers", ()):
            yield from _defined(handler.body)


def _called(tree: ast.Module) -> set[str]:
    """Return the functions that the top level calls by their names."""
    statements = [
        n for n in tree.body if not isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    ]
    calls = [n for statement in statements for n in ast.walk(statement) if isinstance(n, ast.Call)]
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def _near_module(module: str) -> str:
    """Return `; did you mean slime.utils.misc` if the package has a module of nearly that name."""
    package, _, last = module.rpartition(".")
    spec = _find(package)
    locations = (spec.submodule_search_locations if spec is not None else None) or []
    names = {
        Path(entry).stem for folder in locations for entry in os.listdir(folder) if entry.endswith(".py")
    }
    near = get_close_matches(last, names, n=1)
    return f"; did you mean {package}.{near[0]}" if near else ""
