"""With two processes (`make test`), the tests of a file run in one process, because they share fixtures.

The blocks of a page share a namespace. Files with tests of XLA stay together, too: cores of two trainings would wait
for one another on the same processors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling


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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    return FileScheduling(config, log) if config.getoption("dist") == "loadgroup" else None
