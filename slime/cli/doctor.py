"""`slime doctor`: check the flags, model, data and reward of a run, and its hosts, without starting it."""

import sys
from collections.abc import Sequence

from slime.arguments import Args
from slime.cli import train
from slime.cli.main import USER_MISTAKE, user_errors

_HOSTS = "--hosts"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks of `slime train --dry-run`; with --hosts, compare all hosts of the Ray cluster, too."""
    words = list(argv or ())
    code = train.main([*(word for word in words if word != _HOSTS), "--dry-run"])
    return max(code, _check_hosts([word for word in words if word != _HOSTS])) if _HOSTS in words else code


def _check_hosts(words: list[str]) -> int:
    # Imported here: they load torch, which a misspelt flag does not need.
    from slime.arguments.parser import parse_args
    from slime.cluster.host_check import report_hosts

    with user_errors():
        args: Args = parse_args(words)
        lines, problems = report_hosts(args)
    print("\n".join(lines))
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return USER_MISTAKE
    return 0
