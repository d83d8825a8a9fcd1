"""How the gradients of a step are summed, over its microbatches and over the ranks: begin with `base.py`.

`strategies.py` chooses one; `squares.py` measures microbatches, `backward_check.py` finds what else changes gradients.
"""
