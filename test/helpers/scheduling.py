"""Which process of pytest-xdist runs which test.

Processes run whole files, because the tests of a file share fixtures and the blocks of a page share a namespace. Files
with tests of XLA stay together, too: the cores of two trainings would wait for one another on the same processors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling

from helpers.limits import WHOLE_PATHS

# What takes long begins first, so that no process is alone with it at the end.
FIRST = ("xla", *dict.fromkeys(path.partition("::")[0] for path in WHOLE_PATHS))


class FileScheduling(LoadScopeScheduling):
    """Like `--dist loadfile`, but the files that mark tests with `xla` are one group.

    The groups come from the files. Marks `xdist_group` do not reach this process with pytest 9.2 and pytest-xdist 3.8
    (https://github.com/pytest-dev/pytest-xdist/issues/1386).
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if "mark.xla" in (Path(self.config.rootpath) / file).read_text(encoding="utf-8"):
            return "xla"
        return file

    def _assign_work_unit(self, node: Any) -> None:
        for scope in reversed(FIRST):
            if scope in self.workqueue:
                self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)
