"""`slime doctor`: check the flags, model, data and reward of a run, and its hosts, without starting it."""

import sys
from collections.abc import Sequence

from slime.arguments import Args
from slime.cli import train
from slime.cli.main import RUN_STOPPED, USER_MISTAKE, user_errors

_HOSTS, _ATTACK = "--hosts", "--attack-reward"
_ATTACK_S = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks of `slime train --dry-run`; --hosts compares all hosts of the Ray cluster, and
    --attack-reward tries to earn the reward without solving anything.
    """
    words = list(argv or ())
    flags = [word for word in words if word not in (_HOSTS, _ATTACK)]
    code = train.main([*flags, "--dry-run"])
    code = max(code, _check_hosts(flags)) if _HOSTS in words else code
    return max(code, _attack_reward(flags)) if _ATTACK in words else code


def _attack_reward(words: list[str]) -> int:
    from slime.arguments.parser import parse_args
    from slime.preflight.reward import attack_reward

    with user_errors():
        found = list(attack_reward(parse_args(words), _ATTACK_S))
    print("\n".join(["reward under attack:", *(f"  {one.text}" for one in found)]))
    print(f"  {len(found)} kinds of responses are paid without a solution")
    return RUN_STOPPED if found else 0


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
