"""Which microbatch a value belongs to, and when it counts: in a training, and in an evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from typing import TypeAlias, final

from variable_batch_size.backend import Backend, XlaBackend, detect
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.backend.detection import runs_on_xla
from variable_batch_size.data.evaluation_sampler import EvaluationSampler
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.optimizer import CustomOptimizer

SAMPLES = "samples"  # reserved name: the number of samples, which is a sum and not a mean


@final
class TrainingSource:
    """The microbatches of an optimizer, which calls the accumulator when it commits their step."""

    def __init__(self, optimizer: CustomOptimizer) -> None:
        self.backend = optimizer.backend
        self._optimizer = optimizer
        # That of the last value, after the number of this rank's before it in the step: two replays may be equal.
        self._current: tuple[int, Microbatch] | None = None
        self._names: frozenset[str] = frozenset()  # that have a value for it

    @property
    def agreement(self) -> Agreement:
        """That of the optimizer, through which the hosts exchange their sums."""
        return self._optimizer.agreement

    @property
    def stage(self) -> int:
        """That of the training, whose epochs are counted anew in each."""
        return self._optimizer.stage

    @property
    def rows(self) -> int:
        """The number of rows that the value just weighed is a sum over; 1 for means, by the reduction of the loss."""
        assert self._current is not None
        return self._current[1].rows if self._optimizer.reduction == "sum" else 1

    def starts_over(self) -> bool:
        """Return False: in a training earlier values count until the user calls `set_epoch` or `reset`."""
        return False

    def weigh(self, names: Set[str]) -> dict[str, int]:
        """Return the number of samples that a value of each name stands for: its weight in the mean.

        The first value of a microbatch also has an entry `SAMPLES`, so that samples are counted once. The microbatch is
        the one that the next `step()` counts. Raise RuntimeError if it has a value of such a name.
        """
        microbatch = self._current_microbatch()
        current = self._optimizer._training.round_of(self._optimizer), microbatch
        names_before = self._names if current == self._current else frozenset()  # that have a value for it
        repeated_names = sorted(names_before & names)
        if repeated_names:
            raise RuntimeError(
                f"a microbatch takes one value for each name, but {repeated_names[0]!r} was added twice in step "
                f"{self._optimizer.updates}; call add() once between backward() and step(), and after an exception "
                f"optimizer.discard_step()"
            )
        weights = {name: microbatch.samples for name in (*names, SAMPLES) if name not in names_before}
        self._current = current
        self._names = names_before.union(weights)
        return weights

    def end_add(self) -> bool:
        """Return whether all values of the pass count from now on: no, the optimizer commits."""
        return False

    def discard(self) -> None:
        """Forget the microbatch of the last value."""
        self._current, self._names = None, frozenset()

    def count_missing(self) -> int:
        """Return how many values a name lacks: none, it may have values for some microbatches only."""
        return 0

    def _current_microbatch(self) -> Microbatch:
        """Return the microbatch that the next `step()` of the optimizer counts; raise RuntimeError if there is none."""
        try:
            return self._optimizer.microbatch
        except RuntimeError:
            raise RuntimeError(
                "add() must be called before the step() of a microbatch, but all updates of the epoch are committed; "
                "call it between backward() and step()"
            ) from None


@final
class EvaluationSource:
    """The batches of a sampler: the i-th value of a name is that of batch i, and values count when a pass is complete.

    It counts values, because batches that the sampler has yielded may only be prefetched.
    """

    stage = 0  # an evaluation has one
    rows = 1  # it takes means

    def __init__(self, sampler: EvaluationSampler, backend: Backend | None) -> None:
        if backend is None:
            backend = XlaBackend() if runs_on_xla() else detect((), sampler.world)
        if sampler.world != backend.world:
            dealt, here = (f"rank {world.rank} of {world.size}" for world in (sampler.world, backend.world))
            raise ValueError(
                f"the EvaluationSampler deals for {dealt}, but the {type(backend).__name__} is {here}; omit "
                "num_replicas and rank, or pass backend=vbs.backend.LocalBackend() to evaluate the whole dataset on "
                "one rank"
            )
        self.backend = backend
        self._agreement: Agreement | None = None
        self._sampler = sampler
        self._added: Counter[str] = Counter()  # name -> values in this pass
        self._pass = sampler.passes

    @property
    def agreement(self) -> Agreement:
        """What the hosts exchange their sums through; created when it is needed, because every rank has to do so."""
        if self._agreement is None:
            self._agreement = Agreement(self.backend)
        return self._agreement

    def starts_over(self) -> bool:
        """Return whether a new pass over the evaluation's batches has begun, so that earlier values do not count."""
        return not self._added or self._pass != self._sampler.passes

    def weigh(self, names: Set[str]) -> dict[str, int]:
        """Return the number of samples that a value of each name stands for: those of the first batch without one.

        The i-th value of a name belongs to batch i, because batches that were yielded may only be prefetched. The first
        value of a batch also has an entry `SAMPLES`, so that samples are counted once. Raise RuntimeError if all
        batches of the pass have a value of such a name.
        """
        batches = len(self._sampler)
        complete = sorted(name for name in names if self._added[name] == batches)  # have a value for each batch
        if complete:
            raise RuntimeError(
                f"a batch takes one value, but {complete[0]!r} was added {batches + 1} times in a pass of {batches} "
                "batches; call add() once a batch of a loader of the EvaluationSampler, and reset() before each pass"
            )
        weights = {name: self._sampler.samples(self._added[name]) for name in names}
        for name in names:
            if self._added[name] == self._added[SAMPLES]:  # the first value of a batch
                weights[SAMPLES] = weights[name]
        self._added.update(weights.keys())
        return weights

    def end_add(self) -> bool:
        """Run what XLA has recorded for the batch, and return whether the pass is complete."""
        self.backend.mark_step()
        return self.count_missing() == 0

    def discard(self) -> None:
        """Forget the values of this pass over the batches, so that the next value is that of the first batch."""
        self._added.clear()
        self._pass = self._sampler.passes

    def count_missing(self) -> int:
        """Return the largest number of batches for which a name has no value; 0 before the first value."""
        return max((len(self._sampler) - values for values in self._added.values()), default=0)


Source: TypeAlias = TrainingSource | EvaluationSource
