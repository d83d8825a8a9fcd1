"""From the gradients of microbatches to an update: `CustomOptimizer` and what it does.

The face: `optimizer.py`, `properties.py`, `wrapper.py`, `named.py`. An update: `update.py`, with `message.py`, what the
ranks sum besides gradients. `loops/` yields microbatches, `sums/` adds their gradients, `noise/` measures them,
`scaling/` applies the factors of the rules; what follows an update is in `beside/`, what finds mistakes in `checks/`.
"""
