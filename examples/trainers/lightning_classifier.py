"""A LightningModule, trained with a batch size that follows a trace: one line differs from an ordinary script.

python examples/trainers/lightning_classifier.py
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

import variable_batch_size as vbs
from variable_batch_size.integrations.lightning import VariableBatchStrategy

TRACE = "0:64 60:128 120:256"


class Classifier(pl.LightningModule):
    """Tells in which of 10 clusters a point is."""

    def __init__(self, updates: int) -> None:
        super().__init__()
        self.updates = updates
        self.model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a microbatch."""
        data, target = batch
        loss = cross_entropy(self.model(data), target)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Log the accuracy."""
        data, target = batch
        accuracy = (self.model(data).argmax(1) == target).float().mean()
        self.log("accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        """Return AdamW with a cosine over the whole training."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.003)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.updates)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


def points(samples: int) -> TensorDataset:
    """Return points in 10 clusters, (samples, 20), with their clusters, (samples,)."""
    generator = torch.Generator().manual_seed(0)
    centers = 2 * torch.randn(10, 20, generator=generator)
    target = torch.randint(10, (samples,), generator=generator)
    return TensorDataset(centers[target] + torch.randn(samples, 20, generator=generator), target)


def main() -> None:
    """Train, and tell how accurate the model is."""
    pl.seed_everything(1)
    training, validation = random_split(points(5000), [4000, 1000])
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=1.0,
        logger=CSVLogger("logs"),
        log_every_n_steps=10,
        callbacks=[LearningRateMonitor("step"), ModelCheckpoint(monitor="accuracy", mode="max")],
        strategy=VariableBatchStrategy(trace=TRACE, rule="root", ref_batchsize=64),  # the changed line
    )
    model = Classifier(vbs.CustomSampler(training, TRACE, minibatch_size=32).plan.epoch(3).end_step)
    trainer.fit(model, DataLoader(training, batch_size=32, shuffle=True), DataLoader(validation, batch_size=250))
    print(f"{trainer.global_step} updates, accuracy {float(trainer.callback_metrics['accuracy']):.2f}")


if __name__ == "__main__":
    main()
