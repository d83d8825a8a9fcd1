"""An interrupt at a line of the package."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import variable_batch_size as vbs

PACKAGE = str(Path(vbs.__file__).parent)


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line of the package, or of one of its files, that the block executes."""

    def __init__(self, line: int, file: str = "") -> None:
        self.left, self.file = line, f"{PACKAGE}/{file}"

    def __enter__(self) -> None:
        gc.disable()  # the finalizer of an earlier training would be interrupted in place of the block
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        gc.enable()

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.file):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return self._trace
