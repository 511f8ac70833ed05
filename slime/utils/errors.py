"""The error that ends a run for a reason its user can act on."""


class RunStopped(RuntimeError):
    """A run cannot go on, and the message says why: shown without a traceback, unlike a defect of slime."""
