"""What a type checker sees of the lazy index: mypy checks this file, and it is never run."""

from __future__ import annotations

from typing_extensions import assert_type

import variable_batch_size as vbs

assert_type(vbs.fit(200, 64, 2), vbs.Fit)
assert_type(vbs.BatchTrace.parse("0:128"), vbs.BatchTrace)
vbs.BatchTrace.parse("0:128", unit="token")  # type: ignore[arg-type]
assert_type(vbs.LinearRule()(vbs.RuleInput(96, 64)), vbs.Scaling)
_ = vbs.Nonsense  # type: ignore[attr-defined]
vbs.RootRuleOptimizer(*(), nois="microbatches")  # type: ignore[call-arg]
