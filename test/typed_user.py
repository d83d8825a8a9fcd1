"""What a type checker sees of the lazy index: mypy checks this file, and it is never run."""

from __future__ import annotations

from typing_extensions import assert_type

import variable_batch_size as vbs
from variable_batch_size.data.fit import BatchFit

assert_type(vbs.fit_batch(200, 64, 2), BatchFit)
assert_type(vbs.BatchTrace.parse("0:128"), vbs.BatchTrace)
vbs.BatchTrace.parse("0:128", unit="token")  # type: ignore[arg-type]
assert_type(vbs.rules.LinearRule()(vbs.rules.RuleInput(96, 64)), vbs.rules.Scaling)
_ = vbs.Nonsense  # type: ignore[attr-defined]
vbs.RootRuleOptimizer(*(), nois="microbatches")  # type: ignore[call-arg]
