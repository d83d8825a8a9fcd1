"""What is said of rules with wrong arguments, and of rules that lack what they need."""

import math

import pytest

import variable_batch_size as vbs
from helpers.mistakes import Mistake, check
from helpers.reference import training
from variable_batch_size.rules import AdamScaleRule, AdaScaleRule, ConstantRule, ConstantTimescale, PowerRule, SurgeRule

INPUT = vbs.rules.RuleInput(8, 4)
EXPONENT = "^exponent must be a finite number >= 0, got .*; pass 1 for the linear rule"
NOISE_SCALE = "^noise_scale must be a finite number >= 0, got .*; pass the batch size at which"
A_RULE = r"^rule must be a name, or a callable object such as LinearRule\(\), got .*; pass"


def unreferenced(rule):
    return training(vbs.CustomOptimizer, rule=rule, ref_batchsize=None)


MISTAKES = [
    Mistake(lambda: PowerRule(-0.5), ValueError, EXPONENT),
    Mistake(lambda: PowerRule(math.nan), ValueError, EXPONENT),
    Mistake(lambda: PowerRule("linear"), TypeError, EXPONENT),
    Mistake(lambda: SurgeRule(-1), ValueError, NOISE_SCALE),
    Mistake(lambda: SurgeRule("auto"), TypeError, NOISE_SCALE),
    Mistake(lambda: AdaScaleRule()(INPUT), ValueError, r"^AdaScaleRule\(\) needs the gradient noise, but the input ha"),
    Mistake(lambda: AdamScaleRule()(INPUT), ValueError, r"^AdamScaleRule\(\) needs the gradient noise, but the input "),
    Mistake(lambda: SurgeRule()(INPUT), ValueError, r"^SurgeRule\(.*\) needs the gradient noise, but the input has no"),
    Mistake(
        lambda: training(vbs.CustomOptimizer, rule="power"), ValueError, "^the rule power needs its exponent, got none"
    ),
    Mistake(lambda: unreferenced(ConstantTimescale(ConstantRule())), ValueError, r"^ConstantTimescale\(.*\) needs ref"),
    Mistake(lambda: ConstantTimescale(vbs.rules.RootRule), TypeError, A_RULE),
    Mistake(lambda: ConstantTimescale("root"), TypeError, A_RULE),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake):
    check(mistake)
