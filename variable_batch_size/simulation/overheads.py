"""What interruptions and checkpoints cost a training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from variable_batch_size._validation import MAX_INT, check_int, check_number, check_positive, type_error

Cause: TypeAlias = Literal["start", "preemption", "growth"]


@final
@dataclass(frozen=True, slots=True)
class Overheads:
    """What interruptions and checkpoints cost a training, in seconds.

    The training looks at the nodes when a restart, an update or a save ends, in this order:

    - Some of its nodes will leave within `notice` seconds: it saves, if an update was made since the last checkpoint,
      and restarts with those that stay. Nothing is lost.
    - There are more nodes, and `grow_every` seconds have passed since the last restart: it saves and restarts with
      them, or with those of them that are left after the save.
    - A save is due: it saves and continues.

    If nodes that it uses leave before, the training is killed. It restarts from the last checkpoint that was complete
    by then; the updates since and the part of the current one are lost. A restart is aborted, and begins again, when
    some of its nodes leave or are announced to leave. What ends at the time of a kill ended before it.

    Args:
        restart: seconds of a restart, >= 0; or a function of the number of nodes and of the cause, which is "start",
            "preemption" or "growth".
        save_every: seconds from the end of the last save or restart after which a save is due, > 0; it begins when the
            current update ends. None: it saves only before it stops.
        save: seconds of writing a checkpoint, >= 0.
        blocking: whether the training waits while a checkpoint is written; otherwise the checkpoint is complete `save`
            seconds after the end of the update, and the next one does not begin before. Before a stop it always waits.
        notice: seconds from the announcement of a preemption to the preemption, >= 0; 0: it is killed at once.
        least_nodes: least number of nodes with which it trains, >= 1.
        grow_every: seconds since the end of the last restart before it restarts with more nodes, >= 0.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if it is not in its range.
    """

    restart: float | Callable[[int, Cause], float] = 0.0
    save_every: float | None = None
    save: float = 0.0
    blocking: bool = True
    notice: float = 0.0
    least_nodes: int = 1
    grow_every: float = 0.0

    def __post_init__(self) -> None:
        names = ["save", "notice", "grow_every"]
        names += [] if callable(self.restart) else ["restart"]
        for name in names:
            object.__setattr__(self, name, check_number(getattr(self, name), name, "pass seconds"))
        if self.save_every is not None:
            interval = check_positive(self.save_every, "save_every", "pass seconds, or None for no such saves")
            object.__setattr__(self, "save_every", interval)
        object.__setattr__(self, "least_nodes", check_int(self.least_nodes, "least_nodes", 1, MAX_INT))
        if not isinstance(self.blocking, bool):
            raise type_error("blocking must be a bool", self.blocking, "pass True or False")

    def restart_seconds(self, nodes: int, cause: Cause) -> float:
        """Return the seconds of a restart.

        >>> Overheads(restart=lambda nodes, cause: 30 + nodes).restart_seconds(4, "growth")
        34.0

        Raises:
            TypeError, ValueError: if the function returns no number >= 0.
        """
        seconds = self.restart(nodes, cause) if callable(self.restart) else self.restart
        return check_number(seconds, "the seconds of a restart", "let the function return seconds")
