"""Messages for an operator, by the logger `variable_batch_size`; and the line that a warning is attributed to.

Without any configuration the lines are seen: if neither this logger nor the root logger has a handler, they go to
standard error with time, rank and update.
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import final

LOGGER = logging.getLogger("variable_batch_size")
_TRAINERS = "accelerate", "ignite", "keras", "lightning", "transformers", "trl"
_INSIDE = "variable_batch_size", "torch", *_TRAINERS  # packages


def log(message: str, *, level: int = logging.INFO, rank: int | None = None, update: int | None = None) -> None:
    """Log a sentence with the attributes `rank` and `update` (updates made so far), where they are known."""
    _show_log_lines()
    LOGGER.log(level, message, extra={"rank": rank, "update": update})


def stacklevel_of_user() -> int:
    """Return the `stacklevel` of a warning of the caller at the first line outside of this package, torch and trainers.

    How many frames lie in between varies: a scheduler of torch, a `GradScaler`, decorators and `torch.compile` add
    their own. (`skip_file_prefixes` of `warnings.warn` needs Python 3.12.)
    """
    frame = sys._getframe(1)
    level = 1
    while str(frame.f_globals.get("__name__")).partition(".")[0] in _INSIDE and frame.f_back is not None:
        frame = frame.f_back
        level += 1
    return level


@cache
def _show_log_lines() -> None:
    """Let lines of this logger be seen, once: on standard error unless the program has configured logging."""
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)  # that of the root logger is WARNING, also where a handler was added to it
    if not LOGGER.handlers:
        handler = _Shown()
        handler.setFormatter(_Formatter())
        LOGGER.addHandler(handler)


@final
class _Shown(logging.Handler):
    """Writes to standard error, as it is now, unless the program has configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:  # the root logger's, which the program has configured
            print(self.format(record), file=sys.stderr, flush=True)


@final
class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return a line such as "2026-01-31 12:00:00,000 rank 0, update 7: message"; what is not known is left out."""
        values = {name: getattr(record, name, None) for name in ("rank", "update")}
        where = ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
        return f"{self.formatTime(record)} {where}{': ' if where else ''}{record.getMessage()}"
