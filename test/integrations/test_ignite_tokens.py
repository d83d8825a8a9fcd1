"""Batches in tokens in Ignite: updates are those of whole batches."""

from __future__ import annotations

from typing import Any

import torch
from ignite.engine import Events
from torch.utils.data import DataLoader

from helpers.ragged import COUNTS, EPOCHS, OPTIONS, REF, TRACE, Ragged, collate, expected, model_of, token_loss
from helpers.yardstick import difference
from variable_batch_size.integrations.ignite import create_supervised_trainer


def test_updates_are_those_of_whole_batches():
    model, losses = model_of(), list[float]()
    loader = DataLoader(Ragged(), 4, shuffle=True, collate_fn=collate)
    options: dict[str, Any] = {"prepare_batch": lambda batch, **_: (batch["input_ids"], batch["labels"])}
    options |= {"trace": TRACE, "rule": "linear", "ref_batchsize": REF, "sampler_options": OPTIONS}
    inner = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    engine = create_supervised_trainer(model, inner, token_loss, loader=loader, **options)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(engine.state.output))
    engine.run(loader, max_epochs=EPOCHS)
    assert engine.optimizer.samples == EPOCHS * sum(COUNTS)
    assert difference(model, expected().weights) < 1e-12
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected().losses))
