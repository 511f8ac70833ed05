"""This machine and its processes: devices, shared memory, children, stacks and signs of life."""
