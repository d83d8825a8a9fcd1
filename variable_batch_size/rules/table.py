"""The table of rules: name -> class, one line a rule.

The index of this folder, the named optimizers, `CustomOptimizer(rule="...")`, the contract suite, the guided tour and
the docs read it, so a new rule is a file in this folder and a line (with its import) here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from variable_batch_size.rules.adamscale import AdamScaleRule as AdamScaleRule
from variable_batch_size.rules.adascale import AdaScaleRule as AdaScaleRule
from variable_batch_size.rules.base import Rule
from variable_batch_size.rules.constant import ConstantRule as ConstantRule
from variable_batch_size.rules.invariant_adam import InvariantAdamRule as InvariantAdamRule
from variable_batch_size.rules.legw import LEGWRule as LEGWRule
from variable_batch_size.rules.linear import LinearRule as LinearRule
from variable_batch_size.rules.linear_momentum import LinearMomentumRule as LinearMomentumRule
from variable_batch_size.rules.power import PowerRule as PowerRule
from variable_batch_size.rules.root import RootRule as RootRule
from variable_batch_size.rules.root_half_life import RootHalfLifeRule as RootHalfLifeRule
from variable_batch_size.rules.sqrt_sde import SqrtSDERule as SqrtSDERule
from variable_batch_size.rules.surge import SurgeRule as SurgeRule

RULES: Final[Mapping[str, type[Rule]]] = {
    "constant": ConstantRule,
    "linear": LinearRule,
    "root": RootRule,
    "power": PowerRule,
    "linear-momentum": LinearMomentumRule,
    "sqrt-sde": SqrtSDERule,
    "root-half-life": RootHalfLifeRule,
    "invariant-adam": InvariantAdamRule,
    "legw": LEGWRule,
    "adascale": AdaScaleRule,
    "adamscale": AdamScaleRule,
    "surge": SurgeRule,
}

if not TYPE_CHECKING:  # type checkers read the imports above
    __all__ = ["RULES", *(rule.__name__ for rule in RULES.values())]
