"""The errors that end a run for a reason its user can act on."""


class RunStopped(RuntimeError):
    """A run cannot go on, and the message says why: shown without a traceback, unlike a defect of slime."""


class FolderTaken(ValueError):
    """A folder that a run was given belongs to another: nothing is written there, not even about this error."""
