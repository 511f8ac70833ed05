"""Small edits to the JSON files of a Hugging Face folder, so that older versions of transformers read it."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any


def edit_json(path: Path, changes: dict[str, Any], *, drop: Collection[str] = ()) -> None:
    """Rewrite the JSON object in `path` with some keys set and others removed."""
    content = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in content.items() if key not in drop}
    path.write_text(json.dumps(kept | changes, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def widen_readers(folder: Path) -> None:
    """Make what transformers 5 wrote readable by transformers 4, which otherwise misreads it silently."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # transformers 4 knows only these two names; without them it takes rope_theta 10000 and float32.
    names = {"rope_theta": config["rope_parameters"]["rope_theta"], "torch_dtype": config["dtype"]}
    edit_json(folder / "config.json", names, drop=["quantization_config"])
    # Its own class name is unknown to transformers 4; without the input names that one adds token_type_ids,
    # which generate() refuses.
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    edit_json(folder / "tokenizer_config.json", tokenizer, drop=["backend", "is_local", "local_files_only"])
