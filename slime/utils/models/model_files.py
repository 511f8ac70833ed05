"""Checks whether a model and its tokenizer can be loaded, before any process starts."""

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from slime.utils.async_utils import in_background

HUB_TIMEOUT_S = 10.0
# One of these is in every folder that holds a tokenizer, whatever its kind; some bring code of their own.
TOKENIZER_FILES = [
    "tokenizer*",
    "tokenization_*.py",
    "vocab*",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "tekken.json",
]


def check_model(flag: str, model: str, *, tokenizer: bool = False, whole: bool = True) -> None:
    """Raise ValueError with a sentence if `model` is neither a model folder nor a model on the hub.

    `tokenizer`: it must have a tokenizer. `whole`: a folder must contain config.json, which checkpoints of
    slime do not. A name on the hub is looked up once, with a short timeout; the libraries would retry for a
    minute and a half.
    """
    folder = Path(model)
    if folder.is_dir():
        if whole and not (folder / "config.json").is_file():
            raise ValueError(
                f"{flag} is {folder}: it has no config.json, so it is not a Hugging Face model folder."
            )
        if whole and tokenizer and not has_tokenizer(folder):
            raise ValueError(
                f"{flag} is {folder}: the folder has no tokenizer (tokenizer.json, vocab.json, ...), so no "
                "prompt can be made; copy the tokenizer's files there from the model that it was made from."
            )
    elif folder.exists():
        raise ValueError(f"{flag} is {model}: a file; give the folder of the model.")
    elif (why := _ask_hub(model)) is not None:
        beside = [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
        near = get_close_matches(folder.name, beside, n=1)
        hint = f" Did you mean {folder.parent / near[0]}?" if near else ""
        raise ValueError(f"{flag} is {model}: there is no such folder here, and {why}.{hint}")


def has_tokenizer(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in TOKENIZER_FILES)


def _ask_hub(model: str) -> str | None:
    """Return why the hub does not provide a model; None: it does, or our cache has it."""
    import huggingface_hub  # slow to import, and needed for names on the hub alone
    from huggingface_hub import constants, errors

    try:
        if isinstance(huggingface_hub.try_to_load_from_cache(model, "config.json"), str):
            return None
        if constants.HF_HUB_OFFLINE:
            return "HF_HUB_OFFLINE is set, so the hub is not asked"
        url = huggingface_hub.hf_hub_url(model, "config.json")
        _within(lambda: huggingface_hub.get_hf_file_metadata(url, timeout=HUB_TIMEOUT_S))
    except errors.GatedRepoError:
        return f"the hub restricts access to {model}: request access there, then run `hf auth login`"
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError, errors.HFValidationError):
        return (
            f"the hub has no model of that name ({constants.ENDPOINT}; a private one needs `hf auth login`)"
        )
    except errors.HfHubHTTPError:
        return None  # a problem of the hub itself: the libraries retry when the model is loaded
    except Exception as error:  # without a connection the error depends on the HTTP library
        return f"the hub ({constants.ENDPOINT}) cannot be reached: {str(error) or type(error).__name__}"
    return None


def why_no_upload() -> tuple[bool, str] | None:
    """Return (whether it is certain, why) nothing can be uploaded to the hub; None: it can."""
    import huggingface_hub  # as above
    from huggingface_hub import constants, errors

    login = "run `hf auth login`, or set HF_TOKEN"
    if huggingface_hub.get_token() is None:
        return True, f"nobody is logged in at the hub: {login}."
    if constants.HF_HUB_OFFLINE:
        return False, "HF_HUB_OFFLINE is set: models stay in their folders and are not uploaded."
    try:
        _within(huggingface_hub.whoami)
    except errors.HfHubHTTPError as error:
        refused = error.response is not None and error.response.status_code in (401, 403)
        return (True, f"the hub does not accept this login: {login}.") if refused else None
    except Exception as error:  # without a connection the error depends on the HTTP library
        said = str(error).partition("\n")[0] or type(error).__name__
        return False, f"the hub ({constants.ENDPOINT}) cannot be reached now: {said}."
    return None


def _within(ask: Callable[[], object]) -> None:
    """Call a function in a thread that is abandoned after the timeout: a DNS lookup may take minutes."""
    in_background(ask, "hub").result(HUB_TIMEOUT_S)
