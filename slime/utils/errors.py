"""Defines the errors that end a run for a reason its user can act on, and a few that slime handles."""

import pickle
import traceback


class RunStopped(RuntimeError):
    """A run cannot continue, for a reason in the message: shown without a traceback, unlike a defect."""


class EndedBySignal(KeyboardInterrupt):
    """The run was asked to end by a signal other than that of Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


class FolderInUse(ValueError):
    """The given folder belongs to another run: nothing is written there, not even this error."""


class NotStarted(ValueError):
    """A preflight check found a problem: nothing was written, not even this error."""


class EpisodeEnded(RuntimeError):
    """An episode has used up its context or budget: its function catches this and scores what there is."""


class EngineResponseError(ValueError):
    """An engine sent a malformed response: the request is retried, whoever sent it."""


class WorkerDied(RunStopped):
    """A process of the run ended while somebody waited for it."""


def portable(error: Exception) -> Exception:
    """Return the exception itself if it survives pickling, with the stack of its process as a note."""
    stack = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # user code may raise exceptions that cannot be pickled
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.__traceback__ = error.__cause__ = error.__context__ = None
    error.add_note(f"in a worker process:\n{stack}")
    return error
