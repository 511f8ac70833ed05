"""Mistakes that `slime verify-model` must find, made inside the processes that it starts."""

import dataclasses


def swap_gate_and_up() -> None:
    """The map of Qwen3 pairs Megatron's gate with the hub's up projection, both ways."""
    from slime.backends import families

    family = families.FAMILIES["qwen3"]
    rules = [
        dataclasses.replace(rule, hub=tuple(reversed(rule.hub))) if rule.kind == "gate_up" else rule
        for rule in family.rules
    ]
    families.FAMILIES["qwen3"] = dataclasses.replace(family, rules=tuple(rules))


def change_one_weight() -> None:
    """The FSDP trainer reads a key projection of the second layer that is not the checkpoint's."""
    from slime.backends.fsdp import loading

    read = loading.fill

    def fill(lm, path, known=None):
        read(lm, path, known)
        lm.model.layers[1].self_attn.k_proj.weight.data[0, 0] += 1.0

    loading.fill = fill


def never_finish() -> None:
    import time

    time.sleep(600)
