"""Reads and writes the safetensors files of a model folder, and the index that maps tensors to files."""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"  # the one file of a model that needs no index
_POINTER = b"version "  # https://git-lfs.github.com/spec/v1


def read_index(folder: Path) -> dict[str, str] | None:
    """Return tensor -> name of its file from the index of the folder; None: it has no index."""
    file = folder / INDEX
    if not file.is_file():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {str(error)[:200]}") from None
    names = data.get("weight_map") if isinstance(data, dict) else None
    # Files outside of the folder are refused.
    if not isinstance(names, dict) or any(Path(str(name)).name != name for name in names.values()):
        raise ValueError(f"{file} has no weight_map of file names in its folder")
    return names


def write_index(folder: Path, files: Mapping[str, str], total_bytes: int, **metadata: str) -> None:
    """Write the index, which names the file of each tensor; `read_index` reads it."""
    index = {"metadata": {"total_size": total_bytes, **metadata}, "weight_map": dict(files)}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def model_files(folder: Path) -> list[Path]:
    """Return the files of a model: those in the index, else model.safetensors, else all in the folder."""
    index = read_index(folder)
    if index is not None:
        return [folder / name for name in sorted(set(index.values()))]
    single = folder / SINGLE
    return [single] if single.is_file() else all_files(folder)


def all_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def why_not_whole(file: Path) -> str | None:
    """Return why a file does not contain the tensors of its header; None: it is complete."""
    try:
        with file.open("rb") as stream:
            if stream.read(len(_POINTER)) == _POINTER:
                return "it is a pointer of git-lfs, not the weights; run `git lfs pull` in its folder"
        tensor_names(file)
    except FileNotFoundError:
        return "there is no such file; download it again"
    except (OSError, ValueError) as error:
        return f"it cannot be read ({error}); download it again"
    return None


def damaged_files(folder: Path) -> Iterator[str]:
    """Yield a sentence for each file of weights in a folder that is not complete."""
    for file in model_files(folder) if folder.is_dir() else ():
        if why := why_not_whole(file):
            yield f"{file}: {why}."


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a file. ValueError: it was truncated or changed, with the library's reason."""
    from safetensors import SafetensorError, safe_open  # only needed where weights are read

    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{file} is not a complete safetensors file: {error}") from error


def tensor_names(file: Path) -> list[str]:
    with _opened(file) as tensors:
        return list(tensors.keys())


def files_by_tensor(folder: Path) -> dict[str, str]:
    """Return tensor -> name of its file, from the index or the files; empty: the folder has none."""
    index = read_index(folder)
    if index is not None:
        return index
    return {name: file.name for file in model_files(folder) for name in tensor_names(file)}


def read_tensors(files: Iterable[Path], names: Iterable[str] | None = None) -> "Iterator[tuple[str, Tensor]]":
    """Yield every tensor of the files, one at a time; with `names` only the named ones."""
    wanted = None if names is None else set(names)
    for file in files:
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                if wanted is None or name in wanted:
                    yield name, tensors.get_tensor(name)


def write_tensors(file: Path, tensors: "Mapping[str, Tensor]") -> None:
    """Write one file in the form that transformers expects. OSError: the file cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file  # imports torch: only needed where weights are written

    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    file.touch()
    mode = file.stat().st_mode  # as the umask says: safetensors makes a file that its owner alone can read
    try:
        save_file(on_cpu, file, metadata={"format": "pt"})
        file.chmod(mode)
    except SafetensorError as error:
        file.unlink(missing_ok=True)
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error
