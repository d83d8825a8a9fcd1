"""Which rule, under which trace? Trainings with traces, rules, learning rates and seeds, and a report of them.

`experiment.py` says what is trained, `engines/` where, `training.py` how; `judgement.py` says what the trainings tell,
by `statistics.py` and `failures.py`, and `report.py` shows it. `tasks/` are those of the package.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
