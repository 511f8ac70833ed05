"""Settings from YAML files: --config (flags), --custom-config-path (for plug-ins), --eval-config."""

from pathlib import Path
from typing import Any

import yaml

_MOST_VALUES = 100_000
_SHOWN = 2000  # characters of what the parser says
# What the parser lets through of a date, number or set that is none.
_OF_ITS_CONSTRUCTORS = (ValueError, TypeError, OverflowError, AttributeError, LookupError)


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
    """The mapping in a YAML (or JSON) file that a flag names; every mistake names the flag and the file."""
    file = Path(path).expanduser()
    if not file.is_file():
        why = "it is a folder; give a file." if file.is_dir() else "there is no such file."
        raise ValueError(f"{flag} is {path}: {why}")
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except RecursionError:
        raise ValueError(f"{flag} {path} is not valid YAML: it is nested too deeply.") from None
    except (yaml.YAMLError, *_OF_ITS_CONSTRUCTORS) as error:
        raise ValueError(f"{flag} {path} is not valid YAML: {str(error)[:_SHOWN]}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{flag} {path} holds a {type(content).__name__}; write one `flag: value` per line.")
    if _unfolds_beyond(content, _MOST_VALUES):
        raise ValueError(
            f"{flag} {path} holds more than {_MOST_VALUES} values once its references (*name) are followed."
        )
    return content


def _unfolds_beyond(value: Any, most: int) -> bool:
    """Counted as it would be written out: a few lines of references to references are billions of values."""
    left, stack = most, [value]
    while stack:
        found = stack.pop()
        inner = [*found, *found.values()] if isinstance(found, dict) else found
        if isinstance(inner, (list, tuple, set)):
            left -= len(inner)
            if left < 0:
                return True
            stack.extend(inner)
    return False
