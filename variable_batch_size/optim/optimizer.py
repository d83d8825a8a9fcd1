"""Accumulate, all-reduce once, scale, step: any torch optimizer with a batch size that changes.

The life of an update on one rank: the `backward()` of each microbatch adds to `.grad`, and each `step()` counts and
weighs it. The last `step()` of an update sums the gradients over the ranks, clips them, lets the rule scale the
hyperparameters, runs the inner optimizer's `step()`, restores the hyperparameters and advances the clocks.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
from torch.optim import Optimizer

from variable_batch_size._validation import check_int
from variable_batch_size.backend import Backend, detect
from variable_batch_size.data.clock import Clock
from variable_batch_size.data.microbatching import Microbatch
from variable_batch_size.data.plan import Step
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.optim import consistency
from variable_batch_size.optim.loop import Loop, Watcher
from variable_batch_size.optim.scaling import LearningRateCheck
from variable_batch_size.optim.update import Estimator, Reduction, Updater
from variable_batch_size.optim.wrapper import OptimizerWrapper
from variable_batch_size.rules import Noise, Rule, RuleContext
from variable_batch_size.rules.base import check_reference
from variable_batch_size.rules.selection import rules_for_groups
from variable_batch_size.tracker import Tracker


class Options(TypedDict, total=False):
    """The keyword arguments of `CustomOptimizer` other than `rule`."""

    noise: Estimator | None
    reduction: Reduction
    max_grad_norm: float | None
    log_steps: int | None
    tracker: Tracker | None
    backend: Backend | None


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
            gradients. Default: "microbatches" if a rule needs the noise, otherwise it is not measured.
        reduction: reduction of the user's loss over the rows of a microbatch, "mean" or "sum".
        max_grad_norm: maximum norm to which the gradient of an update is clipped.
        log_steps: number of updates between two rows of scalars. Default: 10 if there is a tracker, otherwise never.
        tracker: destination of the scalars. Default: `Tracker("runs")` if `log_steps` is given.
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
        log_steps: int | None = None,
        tracker: Tracker | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(inner)
        value: Any
        kind: Any
        for name, value, kind in (("tracker", tracker, Tracker), ("backend", backend, Backend)):
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} must be a vbs.{kind.__name__}, got {value!r:.60}; pass one, or omit it")
        rule = "constant" if rule is None else rule
        rules = rules_for_groups(rule, len(inner.param_groups))
        reference = [check_reference(one, ref_batchsize) for one in rules][0]  # noqa: RUF015 (checks all of them)
        self._rule_per_group = isinstance(rule, Sequence) and not isinstance(rule, str)
        if isinstance(sampler, CustomSampler):  # otherwise Loop raises
            names: Any = rule if self._rule_per_group else [rule] * len(rules)
            _check_named_rules(names, rules, inner, reference, sampler.plan.trace.max_batch_size)
        parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        self._backend = backend if backend is not None else detect(parameters)
        self._updater = Updater(inner, self._backend, rules, reference, noise, reduction, max_grad_norm)
        self._updater.rule_per_group = self._rule_per_group
        self._loop = Loop(sampler, self._backend)
        self._lr_check = LearningRateCheck()
        self.log_steps = 10 if log_steps is None else check_int(log_steps, "log_steps", 1)
        self.tracker = Tracker("runs") if tracker is None and log_steps is not None else tracker

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
        return self._updater.reduction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, the same on every rank. The next update determines which parameters have gradients.

        Raises:
            RuntimeError: in the middle of a step.
            ValueError: if each group has a rule of its own.
        """
        if self._initialized:
            self._check_between_steps("add_param_group()")
            rules = rules_for_groups(self.rules if self._rule_per_group else self.rules[0], len(self.param_groups) + 1)
            super().add_param_group(param_group)
            self._updater.rules = rules
            self._updater.refresh_parameters()

    # The loop. ---------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the next update."""
        return self._loop.clock.epoch.number

    @property
    def updates(self) -> int:
        """The number of updates of the training so far: the step of the trace that comes next."""
        return self._loop.clock.step

    @property
    def samples(self) -> int:
        """The number of samples of the training so far, over all ranks."""
        return self._loop.clock.samples

    @property
    def progress(self) -> float:
        """How far the training is, in updates at `ref_batchsize`: the sum of `Scaling.progress` over the updates."""
        return float(self._updater.progress)

    @property
    def inside_step(self) -> bool:
        """Whether some microbatches of a step are accumulated and others are still to come."""
        return self._loop.inside_step

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
        """Move to the first step of an epoch, as `sampler.set_epoch(epoch)` does; discard an incomplete step."""
        self._loop.clock.set_epoch(epoch)
        self.discard_step()

    def discard_step(self) -> None:
        """Discard the accumulated microbatches of an incomplete step, so that the step can start over."""
        self._updater.clear()
        self._backend.mark_step()  # otherwise the clearing would change the graph of the next microbatch
        self._loop.restart()

    def watch(self, watcher: Watcher) -> None:
        """Notify `watcher`, which is held weakly, when a step is committed and when one is discarded."""
        self._loop.watchers.add(watcher)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> bool:  # type: ignore[override]
        """Count one microbatch, whose `backward()` has run; after the last one of a step, update the weights.

        Returns:
            Whether the weights changed: False in the middle of a step, and if a `GradScaler`, or the measurement of
            the noise on the CPU, found a non-finite gradient. On other devices a non-finite gradient is not read by
            the host, and the result is True: weights, noise and progress stay, `lr_factor()` is 0, and the averages of
            the inner optimizer decay as with a gradient of 0.

        Raises:
            RuntimeError: if a closure is passed, no `backward()` has run, or the loop does not feed the optimizer the
                microbatches of its sampler, each once and in order.
        """
        if closure is not None:
            raise RuntimeError("step() takes no closure; call loss.backward() before it")
        gradients, loop = self._updater.gradients, self._loop
        if not (gradients.membership_fixed or loop.inside_step):  # before ranks with unequal counts diverge
            consistency.check_not_distributed_data_parallel(gradients.parameters)
        self._lr_check.check(self.param_groups, inside_step=loop.inside_step)
        microbatch = loop.receive()
        gradients.check(replay=microbatch.samples == 0)
        following = None if microbatch.ends_step else loop.microbatch(ahead=1)
        # A GradScaler sets both attributes for this call.
        self._updater.add(microbatch, following, getattr(self, "found_inf", None), getattr(self, "grad_scale", None))
        if not microbatch.ends_step:
            loop.next_round()
            self._backend.mark_step()
            return False
        step, updated = loop.step, self._update()
        self._backend.mark_step()
        self._track(step)
        return updated

    step.hooked = True  # type: ignore[attr-defined]  # torch then runs its global hooks in the inner step only

    def lr_factor(self) -> float:
        """Return the factor on lr times the factor on the gradient of the last update, of the first group."""
        scaling = self._updater.last_scaling
        return float(scaling.lr) * float(scaling.gradient)

    def current_lr(self) -> float:
        """Return the effective learning rate of the last update, of the first parameter group."""
        return float(self._updater.reference_lr) * self.lr_factor()

    def noise(self) -> Noise:
        """Return the gradient noise, averaged so far; sigma2 and mu2 are nan before the first estimate.

        Raises:
            RuntimeError: if the noise is not measured.
        """
        if self._updater.gradient_noise is None:
            raise RuntimeError(
                f"noise() needs measured gradient noise, but {self.rules[0]} does not use it; pass "
                f'noise="microbatches" to the optimizer'
            )
        return self._updater.gradient_noise.noise()

    # State. ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer and, under "vbs", the position in the training; no rank or world.

        Raises:
            RuntimeError: in the middle of a step.
        """
        self._check_between_steps("state_dict()")
        clock = self._loop.clock
        own = {**clock.state_dict(), "samples": clock.samples, **self._updater.state_dict()}
        return {**self.inner.state_dict(), "vbs": {**own, **self._loop.sampler.fingerprint()}}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Restore a state, in any world. The sampler moves to its position.

        Args:
            state_dict: state of a `CustomOptimizer`; with `strict=False` also that of a plain torch optimizer.
            strict: whether to raise if the state was saved with another dataset size, seed or trace.

        Raises:
            ValueError: if the state does not match; then nothing has changed.
        """
        sampler, clock = self._loop.sampler, Clock(self._loop.sampler.plan)
        position = state_dict.get("vbs")
        if position is not None:
            if strict:
                sampler.check_fingerprint(position)
            clock.load_state_dict(position)
        elif strict:
            raise ValueError(
                'the state must hold the position in the training under "vbs", but this one has none, like the state '
                "of a plain optimizer; pass strict=False to load the inner optimizer's state only"
            )
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "vbs"})
        self.discard_step()
        self._updater.load_state_dict(position or {})
        if position is not None:
            self._loop.clock.follow(clock)
            sampler.follow(clock)

    # An update. --------------------------------------------------------------------------------------------------

    def _update(self) -> bool:
        # Ranks may have different pending operations. These must not be in the graph of the collective, which has to
        # be the same on all ranks.
        self._backend.mark_step()
        if not self._updater.gradients.membership_fixed:
            self._compare_ranks()
        clock = self._loop.clock
        updated = self._updater.apply(self._loop.step, clock.step, clock.samples)
        self._updater.clear()
        self._loop.commit()
        return updated

    def _track(self, passed: Step) -> None:
        clock = self._loop.clock
        if self.tracker is None or self._backend.world.rank:
            return
        used = clock.samples - clock.epoch.samples_before
        self.tracker.show(clock.epoch.number, used, clock.epoch.samples)
        if clock.step % self.log_steps == 0:
            self.tracker.log(clock.step, self._scalars(passed))

    def _scalars(self, passed: Step) -> dict[str, float]:
        scalars = {
            "vbs/global_batch_size": passed.batch_size,
            "vbs/num_microbatches": passed.num_microbatches,
            "vbs/world_size": self._backend.world.size,
            "vbs/lr_effective": self.current_lr(),
            "vbs/lr_factor": self.lr_factor(),
            "vbs/samples": self._loop.clock.samples,
        }
        if self._updater.gradient_noise is None:
            return scalars
        noise = self.noise()
        return scalars | {
            "vbs/gain": noise.gain,
            "vbs/progress": self.progress,
            "vbs/noise_scale": noise.noise_scale,
            "vbs/sigma2": noise.sigma2,
            "vbs/mu2": noise.mu2,
        }

    def _compare_ranks(self) -> None:
        """Before the first update, compare the ranks and fix which parameters have gradients."""
        gradients = self._updater.gradients
        mask = gradients.mask()
        if self._backend.world.size > 1:
            device = gradients.parameters[0].device
            consistency.check_same_on_all_ranks(self._facts(), self._backend, device)
            mask = self._backend.any_rank(mask, device)
        gradients.fix_membership(mask)

    def _facts(self) -> dict[str, int]:
        """Return what must be the same on every rank, as integers below 2**64."""
        plan, samples, updater = self._loop.clock.plan, self._loop.sampler.fingerprint(), self._updater
        parameters = updater.gradients.parameters
        rule = f"{updater.rules} {updater.reduction} {updater.max_grad_norm} {updater.noise_estimator}"
        return {
            **self._loop.clock.state_dict(),
            **{name: int(samples[name]) for name in ("dataset_size", "seed", "shuffle", "drop_last")},
            "trace": int(samples["trace"][:16], 16),
            "minibatch_size": plan.minibatch_size,
            "fixed_shape": int(plan.fixed_shape),
            "ref_batchsize": 0 if self.ref_batchsize is None else self.ref_batchsize,
            # Without memory addresses, which differ between ranks.
            "rule, reduction, max_grad_norm and noise": zlib.crc32(re.sub(r"(?i) at 0x[0-9a-f]+", "", rule).encode()),
            "number of parameters": len(parameters),
            "parameters": consistency.checksum(parameters, self._backend),
        }

    def _check_between_steps(self, what: str) -> None:
        if self._loop.inside_step:
            raise RuntimeError(
                f"{what} must be called between steps, but step {self._loop.clock.step} has accumulated only some of "
                f"its microbatches; call it when optimizer.step() has returned True, or call discard_step() first"
            )


def _check_named_rules(
    names: Sequence[object], rules: Sequence[Rule], inner: Optimizer, reference: int | None, max_batch_size: int
) -> None:
    """Call the `check` of each rule that was chosen by its name, with the parameter groups that it scales."""
    for rule in {id(rule): rule for rule, name in zip(rules, names, strict=True) if isinstance(name, str)}.values():
        check: Any = getattr(rule, "check", None)
        if callable(check):
            groups = [group for group, own in zip(inner.param_groups, rules, strict=True) if own is rule]
            context = RuleContext(
                optimizer=tuple(base.__name__ for base in type(inner).__mro__),
                groups=tuple({name: value for name, value in group.items() if name != "params"} for group in groups),
                ref_batchsize=reference,
                max_batch_size=max_batch_size,
            )
            check(context)
