"""The states of a worker, forwards only.

    DOWNLOADING > QUEUED > STARTING > READY > STOPPING > STOPPED

States may be skipped, none is entered twice: a model that is wanted again gets a new worker. Law: PURE.
"""

from enum import IntEnum


class State(IntEnum):
    """Ordered: a later state is greater."""

    DOWNLOADING = 0
    QUEUED = 1
    STARTING = 2
    READY = 3
    STOPPING = 4
    STOPPED = 5

    @property
    def holds_memory(self) -> bool:
        """Whether a worker in this state is charged on the ledger."""
        return State.STARTING <= self <= State.STOPPING


def advance(current: State, to: State) -> State:
    """`to`, if it lies ahead of `current`; raises ValueError and changes nothing otherwise."""
    if to <= current:
        raise ValueError(f"a worker goes forwards only: {current.name} to {to.name}")
    return to
