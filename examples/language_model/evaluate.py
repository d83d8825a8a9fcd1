"""Evaluate the best checkpoint of a training.

python examples/language_model/evaluate.py --folder runs/variable
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

import gpt
import variable_batch_size as vbs


def main() -> None:
    """Print the validation loss of the best checkpoint."""
    flags = gpt.parser(__doc__, folder="runs/variable").parse_args()
    _, val_set = gpt.load(flags.text)
    model = gpt.GPT()
    state = vbs.read_checkpoint(flags.folder, best=True)
    model.load_state_dict(state["parts"]["model"])
    (blocks,) = DataLoader(val_set, batch_size=len(val_set))
    with torch.no_grad():
        print(f"validation loss {gpt.loss_of(model, blocks):.3f}")


if __name__ == "__main__":
    main()
