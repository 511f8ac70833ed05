"""The mathematics of training as pure functions: no process state, no arguments object, no logging."""
