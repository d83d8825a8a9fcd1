"""Learning-rate rules: pure functions from the batch size and the gradient noise to factors. No torch.

One rule a file; `table.py` names them all, and `base.py` has what they get and return.
"""

import typing as _typing

from variable_batch_size.rules.adascale import adascale_gain as adascale_gain
from variable_batch_size.rules.base import Noise as Noise
from variable_batch_size.rules.base import Rule as Rule
from variable_batch_size.rules.base import RuleContext as RuleContext
from variable_batch_size.rules.base import RuleInput as RuleInput
from variable_batch_size.rules.base import Scaling as Scaling
from variable_batch_size.rules.constant_timescale import ConstantTimescale as ConstantTimescale
from variable_batch_size.rules.table import *  # noqa: F403 (RULES, and each class that it names)
from variable_batch_size.rules.table import RULES as RULES

if not _typing.TYPE_CHECKING:  # type checkers read the imports above
    __all__ = ["RULES", "ConstantTimescale", "Noise", "Rule", "RuleContext", "RuleInput", "Scaling", "adascale_gain"]
    __all__ += [rule.__name__ for rule in RULES.values()]
