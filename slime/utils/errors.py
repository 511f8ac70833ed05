"""The errors that end a run for a reason its user can act on, and the one that asks an engine again."""


class RunStopped(RuntimeError):
    """A run cannot go on, and the message says why: shown without a traceback, unlike a defect of slime."""


class EndedBySignal(KeyboardInterrupt):
    """The run was asked to end, like by Ctrl-C, but by a signal of another number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


class FolderTaken(ValueError):
    """A folder that a run was given belongs to another run: nothing is written there, not even this error."""


class NotStarted(ValueError):
    """A look before the start found what keeps a run from it: nothing was written, not even this error."""


class EpisodeEnded(RuntimeError):
    """An episode has used up its context or its budget: its function catches it and scores what is there."""


class EngineAnswerError(ValueError):
    """An engine answered what no engine in its senses does: it is asked again, whoever called it."""
