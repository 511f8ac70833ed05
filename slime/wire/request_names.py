"""Names of requests: an id begins with the name of its scope, so that one call can end all of a scope.

A scope's name ends with a dot and is followed by nothing that could make it the beginning of another's: the
first part has a fixed width, a part of a scope adds its number and a dot.

Example: request "9f86d081884c7d65.12.57-d3ab..." belongs to scope "9f86d081884c7d65.12.", which is a part of
scope "9f86d081884c7d65.". Ids that generate functions choose themselves need not look like this.
"""

import os

_END = "."


def new_scope_name() -> str:
    """A name that no other scope has, in this process or in another that asks the same engines."""
    return os.urandom(8).hex() + _END


def part_name(scope: str, number: int) -> str:
    return f"{scope}{number}{_END}"
