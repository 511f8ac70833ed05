"""Knows this machine and its processes: devices, cores, shared memory, ports, child processes."""
