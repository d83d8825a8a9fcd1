"""The properties of an optimizer: how far its training is, its rules, and what was measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, final
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer

from variable_batch_size.backend import Backend
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.data.batches import Batch
from variable_batch_size.data.dealer import Dealer
from variable_batch_size.data.steps import Phase
from variable_batch_size.data.training import Training
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.abilities import Abilities
from variable_batch_size.optim.options import Reduction
from variable_batch_size.optim.stage import LoopStage, Moments, Stage
from variable_batch_size.optim.update import Updater
from variable_batch_size.optim.wrapper import OptimizerWrapper
from variable_batch_size.rules import Noise, Rule, Scaling


@final
class Commit(NamedTuple):
    """An update that was committed.

    Attributes:
        batch: its number and its samples.
        scaling: the factors of its first parameter group.
        updated: whether the weights have changed: False if the host has skipped the update.
    """

    batch: Batch
    scaling: Scaling
    updated: bool


class Observer(Protocol):
    """What counts with the updates of an optimizer; it keeps no clock of its own."""

    def commit(self, commit: Commit) -> None:
        """Handle an update that was committed."""

    def discard(self) -> None:
        """Handle the discarding of the accumulated step, if any."""


class ObservedOptimizer(OptimizerWrapper):
    """A wrapper whose training can be read from it. Subclasses set the attributes and define `step`."""

    _sampler: Dealer
    _training: Training
    _updater: Updater
    _abilities: Abilities
    _followers: Moments[LoopStage]
    _backend: Backend
    _agreement: Agreement | None
    _cut: dict[str, bool]  # how it needs steps to be cut, see `Dealer.attach`

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self._observers: WeakSet[Observer] = WeakSet()
        self._last_batch: Batch | None = None

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rule of each parameter group."""
        return self._updater.rules

    @property
    def backend(self) -> Backend:
        """The backend: how ranks communicate."""
        return self._backend

    @property
    def agreement(self) -> Agreement:
        """What the hosts of all ranks agree on; whatever needs it first has to do so on every rank."""
        if self._agreement is None:
            job = self._backend.job
            self._agreement = Agreement(job)
            self._backend.while_waiting = job.while_waiting
        return self._agreement

    @property
    def sampler(self) -> Dealer:
        """The sampler that feeds the loop."""
        return self._sampler

    @property
    def ref_batchsize(self) -> int | None:
        """The batch size, in samples, at which the hyperparameters were tuned."""
        return self._updater.ref_batchsize

    @property
    def reduction(self) -> Reduction:
        """The reduction of the loss over the rows of a microbatch, "mean" or "sum"."""
        return self._updater.options.reduction

    @property
    def epoch(self) -> int:
        """The epoch of the next update: after an epoch has ended, the following one; but see `Checkpoint.step`."""
        return self._training.epoch

    @property
    def updates(self) -> int:
        """The number of updates of the training so far, including skipped epochs and earlier samplers."""
        return self._training.updates

    @property
    def stage(self) -> int:
        """How many samplers preceded the one at the training's position: 0 until `continue_with`, then 1."""
        return self._training.stage

    @property
    def samples(self) -> int:
        """The number of samples that were trained on so far, over all ranks."""
        return self._training.samples

    @property
    def progress(self) -> float:
        """How far the training is, in updates at `ref_batchsize`: the sum of `Scaling.progress` over the updates."""
        return float(self._updater.progress)

    @property
    def done(self) -> bool:
        """Whether the training has ended: by the sampler's `max_updates` or `max_samples`, or with its trace."""
        return self._training.done

    @property
    def inside_step(self) -> bool:
        """Whether a step has begun and is not complete: it is accumulating, or an exception has interrupted it."""
        return self._training.phase is not Phase.BETWEEN_STEPS

    def _progress_reader(self) -> Callable[[], float]:
        """Return a function that returns the present progress, to be called later without waiting for a device."""
        return self._updater.progress.reader()

    @property
    def batch(self) -> Batch:
        """The next update: its samples, and this rank's microbatches.

        Raises:
            RuntimeError: if the training has ended, or the next update is not known yet.
        """
        return self._training.batch

    @property
    def last_batch(self) -> Batch | None:
        """The last update that was made, with its `batch_size`; None before the first one, and after a restore."""
        return self._last_batch

    @property
    def microbatch(self) -> Microbatch:
        """The microbatch that the next `step()` counts.

        Raises:
            RuntimeError: if all updates of the epoch are committed.
        """
        return self._training.microbatch(self)

    def register(self, observer: Observer | Stage | LoopStage) -> None:
        """Add an ability: a `Stage` of updates, or a `LoopStage` of the loop.

        Or tell an observer, which is held weakly, when an update is committed and when a step is discarded.
        """
        if isinstance(observer, Stage):
            self._training.check_phase("register()", Phase.BETWEEN_STEPS)
            self._updater.add_stage(observer)
        elif isinstance(observer, LoopStage):
            self._followers.append(observer)
        else:
            self._observers.add(observer)

    def log(self, **means: Tensor | float) -> None:
        """Average values over exactly the samples of each step, over all ranks, for `tracker` and `logged`.

        Call it before the `step()` of every microbatch, on every rank, with the names of the first update. Pass what
        the loss is: means over the rows of a microbatch; with `reduction="sum"` sums, which are divided by what divides
        the gradient, such as the tokens of `step(count=)`; in `updates(counts=)` parts, which are added.
        """
        self._abilities.means.log(means)

    @property
    def logged(self) -> dict[str, Tensor]:
        """The means of the values of `log` in the last update: 0-D tensors on the device of the gradients.

        It is empty before the first update of a process, also after a restore.
        """
        return self._abilities.means.last_means

    @property
    def count(self) -> Tensor | None:
        """The sum of the counts of the last update over all ranks, as its tokens, 0-D; None without `step(count=)`."""
        return self._abilities.counts.last

    @property
    def max_grad_norm(self) -> float | None:
        """The maximum norm of the gradient of the next update, None for no clipping; it may be set between updates."""
        return self._updater.options.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, max_grad_norm: float | None) -> None:
        self._updater.options = self._updater.options._replace(max_grad_norm=max_grad_norm).validate()

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of the last gradient before clipping, 0-D, if an option measures it; nan if there was none.

        These are `grad_norm`, `max_grad_norm` and `skip_grad_norm`.
        """
        return self._updater.grad_norm

    @property
    def skipped(self) -> int:
        """The number of updates of the training that were skipped because of `skip_grad_norm`.

        On a device that compiles graphs, as the host knows it: it reads every 16 updates a number that is as old, and
        the present one for a `state_dict()`.
        """
        return self._abilities.skipped or 0

    def __repr__(self) -> str:
        """Return the rule, how far the training is, and the inner optimizer with its learning rate before scaling."""
        rules = ", ".join(dict.fromkeys(map(repr, self.rules)))
        reference = self._updater.ref_batchsize
        made = f"updates={self.updates}, samples={self.samples}, last_lr={self.current_lr():g}"
        return f"{type(self).__name__}({rules}, ref_batchsize={reference}, {made}) around {self.inner!r}"

    def lr_factor(self) -> float:
        """Return the factor on lr times the factor on the gradient of the last update, of the first group."""
        scaling = self._updater.last_scaling
        return float(scaling.lr) * float(scaling.gradient)

    def current_lr(self) -> float:
        """Return the effective learning rate of the first parameter group in the last update.

        Before the first update, it is the learning rate of the inner optimizer.
        """
        return float(self._updater.reference_lr) * self.lr_factor()

    def noise(self) -> Noise:
        """Return the gradient noise, averaged so far; sigma2 and mu2 are nan before the first estimate.

        Raises:
            RuntimeError: if the noise is not measured.
        """
        noise = self._abilities.noise
        if noise is None:
            raise RuntimeError(
                f"noise() needs measured gradient noise, but {self.rules[0]} does not use it; pass "
                f'noise="microbatches" to the optimizer'
            )
        return noise.noise()
