"""Reads settings from YAML files: --config (flags), --custom-config-path (for plug-ins), --eval-config."""

from pathlib import Path
from typing import Any

import yaml

_SHOWN = 2000  # characters of the parser's message


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key written twice, where plain YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key != "<<" and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml_mapping(path: str, flag: str) -> dict[str, Any]:
    """Read the YAML (or JSON) mapping of a file that a flag names; every error names flag and file."""
    file = Path(path).expanduser()
    if not file.is_file():
        why = "it is a folder; give a file." if file.is_dir() else "there is no such file."
        raise ValueError(f"{flag} is {path}: {why}")
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except Exception as error:  # raised by the parser, or by its conversion of dates and numbers
        raise ValueError(f"{flag} {path} is not valid YAML: {str(error)[:_SHOWN]}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{flag} {path} is a {type(content).__name__}; write one `flag: value` per line.")
    return content
