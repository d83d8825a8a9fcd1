"""From the gradients of microbatches to an update: `CustomOptimizer` and what it does.

The face: `optimizer.py`, `properties.py`, `wrapper.py`, `named.py`; the loops: `updates.py`, `arriving.py`.
From backward to the sum: the strategies `sums.py`, `sums_ddp.py`, `sums_sharded.py`, `sums_reproducible.py`, of which
`strategies.py` chooses one, and `message.py`, what the ranks sum besides.
From the sum to the step: `update.py`, `gradient_noise.py` (equations: `noise_estimate.py`), `rule_check.py`,
`scaling.py`. Beside it: `controller.py`, `lr_scheduler.py`, `means.py`, `report.py`, and checks: `consistency.py`,
`backward_check.py`, `normalization.py`.
"""
