"""Chooses by name patterns which parameters of a model train."""

import re

from slime.arguments import Args
from slime.backends.fsdp.layer_execution import HFModel
from slime.backends.fsdp.vision import freeze_tower


def choose_trainable(args: Args, lm: HFModel) -> None:
    """Freeze what --only-train-params-name-list leaves out, or what --freeze-params-name-list names."""
    only, freeze = args.only_train_params_name_list, args.freeze_params_name_list
    if only and freeze:
        raise ValueError(
            "--only-train-params-name-list and --freeze-params-name-list are both set: keep one."
        )
    names = [name for name, _ in lm.named_parameters()]
    for flag, patterns in (("--only-train-params-name-list", only), ("--freeze-params-name-list", freeze)):
        for pattern in patterns or ():
            if not any(re.search(pattern, name) for name in names):
                raise ValueError(
                    f"{flag}: {pattern!r} matches no parameter; names look like {names[len(names) // 2]}."
                )
    for name, parameter in lm.named_parameters():
        if only:
            parameter.requires_grad_(any(re.search(pattern, name) for pattern in only))
        elif freeze and any(re.search(pattern, name) for pattern in freeze):
            parameter.requires_grad_(False)
    if args.freeze_vision_tower:
        freeze_tower(lm)
    if not any(parameter.requires_grad for parameter in lm.parameters()):
        raise ValueError("--freeze-params-name-list freezes every parameter: nothing would train.")
