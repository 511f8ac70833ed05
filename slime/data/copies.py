"""Fetches remote prompt files (`https://`, `s3://`, ...), once per process."""

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from slime.catalog.datasets import is_url


def local_path(source: str) -> Path:
    """Return the local path of a file; a remote one is fetched first."""
    return _copy_of(source) if is_url(source) else Path(source).expanduser()


def forget_copies() -> None:
    """Forget all fetched copies, because a new run starts in this process."""
    _copy_of.cache_clear()


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="slime-data-")  # removed when the process ends


@functools.cache
def _copy_of(url: str) -> Path:
    import fsspec  # imported here: most runs read local files only

    protocol = url.partition("://")[0].lower()
    try:
        with (
            fsspec.open(url, "rb", **_options(protocol)) as there,
            tempfile.NamedTemporaryFile(dir=_folder().name, delete=False) as here,
        ):
            shutil.copyfileobj(there, here, 2**20)
    except Exception as error:  # the package that reads the protocol decides its type
        cause = error.__cause__ if isinstance(error, FileNotFoundError) else error
        if cause is None or getattr(cause, "status", None) == 404:
            raise FileNotFoundError(f"prompt file {url}: there is no such file.") from None
        said = f"{type(cause).__name__}: {cause}".removesuffix(": ")
        raise ValueError(f"prompt file {url}: it cannot be fetched ({said}).") from error
    return Path(here.name)


def _options(protocol: str) -> dict[str, Any]:
    """Options of the download: no limit on its duration, but a server that is silent for a minute is given
    up.
    """
    if protocol not in ("http", "https"):
        return {}
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
    # No compression: a compressed response has another length than the file.
    return {
        "client_kwargs": {"timeout": timeout, "headers": {"Accept-Encoding": "identity"}},
        "block_size": 0,
    }
