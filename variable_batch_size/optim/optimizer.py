"""Accumulate, all-reduce once, scale, step: any torch optimizer with a batch size that changes.

The `backward()` of each microbatch adds to `.grad`, and each `step()` counts and weighs it. The last one of an update
sums over the ranks, clips, scales by the rule, runs the inner optimizer's `step()` and advances the clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from variable_batch_size.backend import Backend, detect
from variable_batch_size.data.microbatching import Microbatch
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.optim import consistency
from variable_batch_size.optim.data_parallel import DataParallelCheck
from variable_batch_size.optim.deciding import Deciding
from variable_batch_size.optim.loop import Loop, Phase, Watcher, check_sampler
from variable_batch_size.optim.normalization import normalizes_batches
from variable_batch_size.optim.options import AccumulationKind, Estimator, Reduction, UpdateOptions, check_objects
from variable_batch_size.optim.report import Reporter
from variable_batch_size.optim.rule_check import check_applies_lr, check_rules
from variable_batch_size.optim.scaling import LearningRateCheck
from variable_batch_size.optim.uncompiled import uncompiled
from variable_batch_size.optim.update import Updater
from variable_batch_size.optim.wrapper import OptimizerWrapper, check_hyperparameters, run_closure
from variable_batch_size.rules import Noise, Rule
from variable_batch_size.rules.base import check_reference
from variable_batch_size.rules.selection import rules_for_groups
from variable_batch_size.tracker import Tracker


class CustomOptimizer(OptimizerWrapper):
    """A torch optimizer whose updates follow the trace of a sampler, with hyperparameters scaled by a rule.

    Each update uses the gradient of the mean loss over exactly the samples of its step,
    G = sum_j (n_j / B) g_j over the microbatches j of all ranks. Call `step()` after the `backward()` of every
    microbatch. Between updates every hyperparameter has the user's reference value, so `torch.optim.lr_scheduler`
    works as on any optimizer; step a scheduler only when `step()` returned True. Hooks registered on the wrapper are
    registered on the inner optimizer: step hooks run once an update, on the reduced gradients.

    Args:
        inner: the optimizer that updates the weights. The wrapper shares its `param_groups` and `state`.
        sampler: the `CustomSampler` that feeds the loop.
        ref_batchsize: batch size, in samples, at which the hyperparameters were tuned. Every rule needs it but
            "constant".
        rule: a rule, or its name in `vbs.RULES`; or a sequence of these, one for each parameter group.
        noise: how to measure the gradient noise: "microbatches" compares the microbatches of each update;
            "differenced" also compares consecutive updates if one has a single microbatch, for one more copy of the
            gradients. Default: "microbatches" if a rule or a controller needs the noise, otherwise it is not measured.
        reduction: reduction of the user's loss over the rows of a microbatch, "mean" or "sum".
        max_grad_norm: maximum norm to which the gradient of an update is clipped.
        accumulation: where the gradients of a step are accumulated: "in_place", in `.grad`, which takes no memory; or
            "buffered", apart from `.grad`, so that `zero_grad()` within a step drops what another backward has added.
            Always "buffered" if the noise is measured, under a `GradScaler`, and, in float32, for half precision.
        find_unused_parameters: in a world of several ranks, whether each update finds out which parameters have
            gradients on any rank, as `DistributedDataParallel` does; the host then waits for the device once an update.
            Otherwise the first update settles it, and a later change raises. A world of one needs none of this.
        grad_norm: whether to measure the norm of the gradient of each update, before clipping: `optimizer.grad_norm`.
        overlap: whether gradients are summed over the processes while the last `backward()` of an update still runs,
            from the second one on, if each came once per microbatch in the first one, without a `GradScaler`. Pass
            False if later microbatches have several backwards, or the loop changes single gradients by `.grad.data`.
        bucket_cap_mb: size of the messages in which they are summed, in MB.
        log_steps: number of updates between two rows of scalars. Default: 10 if there is a tracker, otherwise never.
        log_samples: number of samples between two rows of scalars, instead.
        tracker: destination of the scalars. Default: `Tracker("runs")` if `log_steps` or `log_samples` is given.
        backend: how ranks communicate. Default: what fits the device of the parameters, see `vbs.detect`.

    Raises:
        TypeError: if an argument has the wrong type, or the rule cannot be used with the inner optimizer.
        ValueError: if a number is out of range, the rule needs a `ref_batchsize` and there is none, a name is unknown,
            or the sampler deals for another rank than that of the backend.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        inner: Optimizer,
        sampler: CustomSampler,
        ref_batchsize: int | None = None,
        *,
        rule: Rule | str | Sequence[Rule | str] | None = "constant",
        noise: Estimator | None = None,
        reduction: Reduction = "mean",
        max_grad_norm: float | None = None,
        accumulation: AccumulationKind = "in_place",
        find_unused_parameters: bool = False,
        grad_norm: bool = False,
        overlap: bool = True,
        bucket_cap_mb: float = 25,
        log_steps: int | None = None,
        log_samples: int | None = None,
        tracker: Tracker | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(inner)
        check_objects(tracker, backend)
        rules = rules_for_groups("constant" if rule is None else rule, len(inner.param_groups))
        reference = [check_reference(one, ref_batchsize) for one in rules][0]  # noqa: RUF015 (checks all of them)
        rule_per_group = isinstance(rule, Sequence) and not isinstance(rule, str)
        check_sampler(sampler)
        names: Any = rule if rule_per_group else [rule or "constant"] * len(rules)
        check_rules(names, rules, inner, reference, sampler)
        parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        self._backend = backend if backend is not None else detect(parameters, sampler.world)
        noise = "microbatches" if noise is None and sampler.planning.needs_noise else noise
        kinds = noise, reduction, max_grad_norm, accumulation, find_unused_parameters
        options = UpdateOptions(*kinds, grad_norm, overlap, bucket_cap_mb)
        self._updater = Updater(inner, self._backend, rules, reference, options, rule_per_group=rule_per_group)
        check_applies_lr(inner, rules)
        measured, alone = self._updater.gradient_noise is not None, self._backend.world.size == 1
        self._loop = Loop(sampler, self._backend, spread=alone or not (measured or normalizes_batches(parameters)))
        self._updater.gradient.upcoming = self._loop.upcoming
        self._lr_check, self._data_parallel_check = LearningRateCheck(), DataParallelCheck()
        self.tracker = Tracker("runs") if tracker is None and (log_steps, log_samples) != (None, None) else tracker
        self._reporter = Reporter(self.tracker, log_steps, log_samples, self._updater, self._loop)
        self._deciding = Deciding(self._loop, self._updater, self._backend, self.tracker)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rule of each parameter group."""
        return self._updater.rules

    @property
    def backend(self) -> Backend:
        """The backend: how ranks communicate."""
        return self._backend

    @property
    def sampler(self) -> CustomSampler:
        """The sampler that feeds the loop."""
        return self._loop.sampler

    @property
    def ref_batchsize(self) -> int | None:
        """The batch size, in samples, at which the hyperparameters were tuned."""
        return self._updater.ref_batchsize

    @property
    def reduction(self) -> Reduction:
        """The reduction of the loss over the rows of a microbatch, "mean" or "sum"."""
        return self._updater.options.reduction

    def _change_groups(self, caller: str, number: int, change: Callable[[], None]) -> None:
        self._loop.check_phase(caller, Phase.BETWEEN_STEPS)
        rules = rules_for_groups(self.rules if self._updater.rule_per_group else self.rules[0], number)
        self._updater.clear()
        change()
        self._updater.rules = rules
        self._updater.gradient.refresh(self._updater.parameters)

    # The loop. ---------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the next update: after an epoch has ended, the following one; but see `Checkpoint.step`."""
        return self._loop.epoch

    @property
    def updates(self) -> int:
        """The number of updates of the training so far, with those of skipped epochs: the next step of the trace."""
        return self._loop.clock.step

    @property
    def samples(self) -> int:
        """The number of samples that were trained on so far, over all ranks."""
        return self._loop.clock.samples

    @property
    def progress(self) -> float:
        """How far the training is, in updates at `ref_batchsize`: the sum of `Scaling.progress` over the updates."""
        return float(self._updater.progress)

    @property
    def done(self) -> bool:
        """Whether the training has ended: by the sampler's `max_updates` or `max_samples`, or with its trace."""
        return self._loop.done

    @property
    def inside_step(self) -> bool:
        """Whether a step has begun and is not complete: it is accumulating, or an exception has interrupted it."""
        return self._loop.phase is not Phase.BETWEEN_STEPS

    def progress_later(self) -> Callable[[], float]:
        """Return a function that returns the present progress, to be called later without waiting for a device."""
        return self._updater.progress.later()

    @property
    def microbatch(self) -> Microbatch:
        """The microbatch that the next `step()` counts.

        Raises:
            RuntimeError: if all updates of the epoch are committed.
        """
        return self._loop.microbatch()

    def set_epoch(self, epoch: int) -> None:
        """Move to the first step of a later epoch; in the epoch under way, continue after the last committed update.

        An incomplete step is discarded. After an epoch that was trained to its end, `sampler.set_epoch` is enough. A
        UserWarning tells how many updates are skipped.

        Raises:
            RuntimeError: if all updates of that epoch are committed, or an exception has interrupted a step.
            ValueError: if the trace ends before the epoch does.
        """
        self._loop.check_phase("set_epoch()", Phase.BETWEEN_STEPS, Phase.INSIDE_STEP)
        self._loop.set_epoch(epoch)
        self._clear()

    def discard_step(self) -> None:
        """Discard the accumulated microbatches of an incomplete step, so that the step can start over.

        Iterate the loader again afterwards. Call it, or `load_state_dict`, after an exception in `step()`. With
        `noise="differenced"` an exception of a rule leaves no previous gradient to compare the next one with.

        Raises:
            RuntimeError: if the exception came when the inner optimizer's step had begun: only a state repairs that.
        """
        self._loop.check_phase("discard_step()", Phase.BETWEEN_STEPS, Phase.INSIDE_STEP, Phase.INTERRUPTED)
        self._clear()
        self._loop.restart()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients that have come since the last `step()`; what it has accumulated stays.

        It is needed if another backward adds to them, as that of a generator does to those of its discriminator.

        Args:
            set_to_none: accepted as in torch; gradients become None.

        Raises:
            RuntimeError: within a step, if a backward has added to the accumulated gradients in `.grad`, and
                `accumulation` is not "buffered".
        """
        self._updater.gradient.drop_current(inside_step=self._loop.begun)

    def watch(self, watcher: Watcher) -> None:
        """Notify `watcher`, which is held weakly, when a step is committed and when one is discarded."""
        self._loop.watchers.add(watcher)

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None, *, count: Tensor | float | None = None) -> bool:  # type: ignore[override]
        """Count one microbatch, whose `backward()` has run; after the last one of a step, update the weights.

        Args:
            closure: runs forward and `backward()` of the microbatch; not with a `GradScaler`.
            count: what the loss of the microbatch is a sum over, if not its samples: the number of its tokens, of all
                rows, >= 0. The update is then the gradient of the sum of all losses divided by the sum of all counts,
                with repeated rows once. It needs `reduction="sum"`, a rule without noise, and counts in every step.

        Returns:
            Whether the weights changed: False in the middle of a step, if the counts of a step sum to 0, and if a
            `GradScaler`, or the measurement of the noise on the CPU, found a non-finite gradient. On other devices
            neither is read by the host, and the result is True: without a count the gradient is 0; with a non-finite
            gradient weights, noise and progress stay, `lr_factor()` is 0, and the averages of the inner optimizer decay
            as with a gradient of 0.

        Raises:
            RuntimeError: if no `backward()` has run, or a microbatch of the sampler was skipped, repeated or reordered.
        """
        if closure is not None:
            run_closure(closure, scaled=getattr(self, "found_inf", None) is not None)
        updater, loop = self._updater, self._loop
        loop.check_receiving()
        self._data_parallel_check.check(updater.gradient.parameters)
        self._lr_check.check(self.param_groups, inside_step=loop.begun)
        loop.phase = Phase.INTERRUPTED  # stays if an exception follows
        try:
            microbatch, step = loop.receive(), loop.step
            updated = self._accumulate(microbatch, count) and self._update()
        except BaseException:
            loop.phase = Phase.HALF_UPDATED if updater.inner_step_begun else Phase.INTERRUPTED
            raise
        self._backend.mark_step()
        if microbatch.ends_step:
            self._deciding.after_update(step)
            self._reporter.after_update(step)
        return updated

    step.hooked = True  # type: ignore[attr-defined]  # torch then runs its global hooks in the inner step only

    def log(self, **means: Tensor | float) -> None:
        """Average values over exactly the samples of each step, over all ranks, for `tracker` and `logged`.

        Call it before the `step()` of every microbatch, on every rank, with the names of the first update. Pass means
        over the rows of a microbatch; with `step(count=)`, means over what is counted.
        """
        self._updater.gradient.step_means.log(means)

    @property
    def logged(self) -> dict[str, Tensor]:
        """The means of the values of `log` in the last update: 0-D tensors on the device of the gradients."""
        return self._updater.gradient.step_means.last

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of the last gradient before clipping, 0-D, with `grad_norm` or `max_grad_norm`; nan if skipped."""
        return self._updater.grad_norm

    def lr_factor(self) -> float:
        """Return the factor on lr times the factor on the gradient of the last update, of the first group."""
        return self._updater.lr_factor

    def current_lr(self) -> float:
        """Return the effective learning rate of the last update, of the first parameter group."""
        return float(self._updater.reference_lr) * self.lr_factor()

    def noise(self) -> Noise:
        """Return the gradient noise, averaged so far; sigma2 and mu2 are nan before the first estimate.

        Raises:
            RuntimeError: if the noise is not measured.
        """
        return self._updater.noise()

    # State. ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer and, under "vbs", the position in the training; no rank or world.

        Raises:
            RuntimeError: in the middle of a step.
        """
        self._loop.check_phase("state_dict()", Phase.BETWEEN_STEPS)
        own = self._loop.sampler.state_of(self._loop.clock) | self._updater.state_dict() | self._deciding.state_dict()
        return {**self.inner.state_dict(), "vbs": own}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Restore a state, in any world. The sampler moves to its position.

        Args:
            state_dict: state of a `CustomOptimizer`; with `strict=False` also that of a plain torch optimizer.
            strict: whether to raise if the state was saved with another dataset size, seed or past of the trace. That
                the future of the trace is another one, or the rule, is told by a UserWarning.

        Raises:
            ValueError: if the state does not match; then nothing has changed.
        """
        sampler, resumed, position = self._loop.sampler, None, state_dict.get("vbs")
        if position is not None:
            if strict:
                sampler.check_samples(position)
            resumed = sampler.resumed(position)
        elif strict:
            raise ValueError(
                'the state must hold the position in the training under "vbs", but this one has none, like the state '
                "of a plain optimizer; pass strict=False to load the inner optimizer's state only"
            )
        check_hyperparameters(self.inner, state_dict)
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "vbs"})
        self.mark_stepped()
        self._updater.gradient.reduction.restore()
        self._clear()
        self._loop.restart()
        self._updater.load_state_dict(position or {})
        self._deciding.load_state_dict(position or {})
        if resumed is not None:
            sampler.adopt(resumed, followed=True)
            self._loop.clock.follow(resumed.clock)

    # An update. --------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self._updater.clear(discarded=True)
        self._backend.mark_step()  # otherwise the clearing would change the graph of the next microbatch

    def _accumulate(self, microbatch: Microbatch, count: Tensor | float | None) -> bool:
        """Accumulate a microbatch, and return whether it is the last one of its step."""
        loop = self._loop
        following = None if microbatch.ends_step else loop.microbatch(ahead=1)
        scale = {name: getattr(self, name, None) for name in ("found_inf", "grad_scale")}  # set by a GradScaler
        self._updater.gradient.add(microbatch, following, inside_step=loop.begun, **scale, count=count)
        if not microbatch.ends_step:
            loop.next_round()
        return microbatch.ends_step

    def _update(self) -> bool:
        updater, loop = self._updater, self._loop
        if not updater.gradient.agreed:
            consistency.compare_ranks(updater, loop, self.inner, self._backend)
        updated = updater.apply(loop.step, loop.clock.step, loop.clock.samples)
        updater.clear()
        loop.commit(updated=updated)
        updater.gradient.begin(several=loop.several_rounds)
        return updated
