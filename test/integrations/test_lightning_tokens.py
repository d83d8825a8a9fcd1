"""Batches in tokens in Lightning: updates are those of whole batches, on one process and two."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from helpers.lightning_adapter import ALLOWED, ranks
from helpers.ragged import COUNTS, OPTIONS, REF, TRACE, Ragged, collate, expected, model_of, token_loss
from helpers.yardstick import difference, in_processes, weights
from variable_batch_size.integrations.lightning import VariableBatchStrategy

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in ALLOWED]


class Module(pl.LightningModule):
    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.net, self.reduction = model_of(), reduction

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = token_loss(self.net(batch["input_ids"]), batch["labels"], self.reduction)
        return {"loss": loss, "count": 3} if self.reduction == "sum and count" else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, 0.9)


def fit(reduction: str = "mean", trace: Any = TRACE, ckpt_path: Any = None, save: Any = None, **options: Any) -> Any:
    sampling = {**OPTIONS, **options.pop("sampling", {})}
    reductions = {"optimizer_options": {"reduction": "sum"}} if reduction != "mean" else {}
    strategy = VariableBatchStrategy(trace, "linear", REF, sampling, **reductions)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "devices": ranks(), "max_epochs": 2}
    run, module = pl.Trainer(**(quiet | options), strategy=strategy), Module(reduction)
    run.fit(module, DataLoader(Ragged(), 4, shuffle=True, collate_fn=collate), ckpt_path=ckpt_path)
    if save is not None:
        run.save_checkpoint(save)
    updates = run.optimizers[0].updates if run.optimizers else 0
    return module.net, run.global_step, updates, run.strategy.samples


def check(found: Any) -> None:
    net, *counted = found
    assert counted == [len(expected().sizes), len(expected().sizes), 2 * sum(COUNTS)]
    assert difference(net, expected().weights) < 1e-12


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_updates_are_those_of_whole_batches(reduction):
    check(fit(reduction))


def part(folder: Any) -> None:
    fit(max_steps=5, save=folder / "part.ckpt")


def whole(folder: Any) -> Any:
    found = [fit(), fit(ckpt_path=folder / "part.ckpt")]
    return [(weights(net), *counted) for net, *counted in found]


def test_two_processes_and_resumes_in_other_worlds(tmp_path):
    part(tmp_path)
    for ranks_of in in_processes(whole, 2, tmp_path):
        for vector, *counted in ranks_of:
            assert counted == [len(expected().sizes), len(expected().sizes), 2 * sum(COUNTS)]
            torch.testing.assert_close(vector, expected().weights, rtol=0, atol=1e-12)
    in_processes(part, 2, tmp_path)
    check(fit(ckpt_path=tmp_path / "part.ckpt"))


def test_what_a_step_returns_must_be_a_mean_over_tokens():
    with pytest.raises(ValueError, match="lengths= of the sampler counts tokens already"):
        fit("sum and count")
    sampling = {"counts": [1 + count**2 // 20 for count in COUNTS], "max_tokens": 30, "pad": False}
    with pytest.warns(UserWarning, match="return the mean over what lengths=, or counts=, counts of the rows"):
        fit(max_steps=1, trace=300, sampling=sampling)
