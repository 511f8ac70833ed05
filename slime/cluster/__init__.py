"""The run: wires rollout, trainer and weight sync together and places them on processes and machines."""
