"""Accumulate, all-reduce once, scale, step: any torch optimizer under a batch size that changes.

The life of an update on one rank: each microbatch's `backward()` adds to `.grad`, each `step()` counts it and weighs
it; the last one makes the gradients of all ranks one, clips them, lets the rule scale the hyperparameters, runs the
inner optimizer's own `step()`, puts the hyperparameters back and moves the clocks.
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
from variable_batch_size.data.plan import Microbatch, Step
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.optim import consistency as agreement
from variable_batch_size.optim.loop import Loop, Watcher
from variable_batch_size.optim.scaling import Rates
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
    """Wraps a torch optimizer so that its updates follow a sampler's trace, with hyperparameters scaled by a rule.

    Each update uses the gradient of the mean loss over exactly the step's samples,
    G = sum_j (n_j / B) g_j over the microbatches j of all ranks. Call `step()` after the `backward()` of every
    microbatch. Between updates every hyperparameter holds the user's reference value, so `torch.optim.lr_scheduler`
    works on the wrapper as on any optimizer; step it only when `step()` returned True. Hooks that are registered on
    the wrapper are the inner optimizer's: those of its step run once an update, when the gradients are whole.

    Args:
        inner: the optimizer that updates the weights; it shares its `param_groups` and `state` with the wrapper.
        sampler: the `CustomSampler` that feeds the loop.
        ref_batchsize: samples an update at which the hyperparameters were tuned; needed by every rule but the
            constant one.
        rule: (batch size, noise) -> factors on the hyperparameters; or a sequence of rules, one a parameter group.
        noise: how to measure the gradient's noise: from the "microbatches" of each update, or also, "differenced",
            from two consecutive updates where one has a single microbatch (one more copy of the gradients); by default
            from microbatches where the rule needs it, else not at all.
        reduction: what the user's loss does over the rows of a microbatch, "mean" or "sum".
        max_grad_norm: clips the step's whole gradient to this norm.
        log_steps: writes scalars every so many updates; by default 10 when there is a tracker, else never.
        tracker: where they go; with `log_steps` alone a `Tracker("runs")`.
        backend: how ranks communicate; by default what fits the parameters' device.

    Raises:
        TypeError, ValueError: where the arguments do not fit together; the text says what to do.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        inner: Optimizer,
        sampler: CustomSampler,
        ref_batchsize: int | None = None,
        *,
        rule: Rule | str | Sequence[Rule | str] = "constant",
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
                raise TypeError(f"{name} must be a vbs.{kind.__name__}, got {value!r:.60}; pass one or leave it out")
        rules = rules_for_groups(rule, len(inner.param_groups))
        references = [check_reference(one, ref_batchsize) for one in rules]
        reference = references[0]
        parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        self._backend = backend if backend is not None else detect(parameters)
        self._updater = Updater(inner, self._backend, rules, reference, noise, reduction, max_grad_norm)
        self._loop = Loop(sampler, self._backend)
        _check_rules(rules, inner, reference, sampler)
        self._rates = Rates()
        self.log_steps = 10 if log_steps is None else check_int(log_steps, "log_steps", 1)
        self.tracker = Tracker("runs") if tracker is None and log_steps is not None else tracker

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rule of each parameter group."""
        return self._updater.rules

    @property
    def backend(self) -> Backend:
        """How its ranks communicate."""
        return self._backend

    @property
    def ref_batchsize(self) -> int | None:
        """Samples an update at which the hyperparameters were tuned."""
        return self._updater.ref_batchsize

    @property
    def reduction(self) -> Reduction:
        """What the loss does over the rows of a microbatch."""
        return self._updater.reduction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank alike; which of them have gradients is agreed anew at the next update."""
        if self._initialized:
            self._refuse_inside_step("add_param_group()")
            one_for_all = len(set(map(id, self.rules))) == 1
            rules = rules_for_groups(self.rules[0] if one_for_all else self.rules, len(self.param_groups) + 1)
            super().add_param_group(param_group)
            self._updater.rules = rules
            self._updater.renew()

    # The loop. ---------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the update that is due."""
        return self._loop.clock.epoch.number

    @property
    def updates(self) -> int:
        """How many updates the training has passed: the step of the trace that is due."""
        return self._loop.clock.step

    @property
    def samples(self) -> int:
        """How many samples the training has passed, over all ranks."""
        return self._loop.clock.samples

    @property
    def progress(self) -> float:
        """How far the training is, in updates at `ref_batchsize`: the sum of the updates' gains."""
        return float(self._updater.progress)

    @property
    def inside_step(self) -> bool:
        """Whether some microbatches of a step are accumulated and others are due."""
        return self._loop.inside_step

    def progress_later(self) -> Callable[[], float]:
        """The progress as it stands now, to be read later without holding up a device."""
        return self._updater.progress.later()

    @property
    def microbatch(self) -> Microbatch:
        """The microbatch that is due: the one whose `backward()` comes next, or has come and was not stepped.

        Raises:
            RuntimeError: when the epoch has had all of its updates.
        """
        return self._loop.microbatch()

    def set_epoch(self, epoch: int) -> None:
        """Go where the sampler goes with `sampler.set_epoch(epoch)`; a half-accumulated step is dropped."""
        self._loop.clock.set_epoch(epoch)
        self.discard_step()

    def discard_step(self) -> None:
        """Drop the microbatches of a step that was broken off, so that it can begin again."""
        self._updater.clear()
        self._backend.mark_step()  # so that what is cleared does not make the next microbatch's graph another one
        self._loop.restart()

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher`, for as long as somebody else holds it, when a step is committed and when one is dropped."""
        self._loop.watchers.add(watcher)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> bool:  # type: ignore[override]
        """Count one microbatch, whose `backward()` has run; after a step's last one, update the weights.

        Returns:
            Whether the weights changed: False in the middle of a step, and where a `GradScaler`, or a measurement of
            the noise on the CPU, found a gradient that is not finite. On another device nobody reads that, so that the
            answer is True: weights, noise and progress stay all the same, `lr_factor()` is 0, and the inner optimizer's
            averages decay as by a gradient of 0.

        Raises:
            RuntimeError: when the loop does not feed the optimizer what its sampler deals; the text says what to do.
        """
        if closure is not None:
            raise RuntimeError("step() runs a microbatch once and takes no closure; call backward() before it instead")
        gradients, loop = self._updater.gradients, self._loop
        if not (gradients.agreed or loop.inside_step):  # before ranks go on with unequal microbatches
            agreement.refuse_distributed_data_parallel(gradients.parameters)
        self._rates.check(self.param_groups, inside_step=loop.inside_step)
        microbatch = loop.arrive()
        gradients.check(replay=microbatch.samples == 0)
        following = None if microbatch.ends_step else loop.microbatch(ahead=1)
        # Both are set by a GradScaler, for this call.
        self._updater.add(microbatch, following, getattr(self, "found_inf", None), getattr(self, "grad_scale", None))
        if not microbatch.ends_step:
            loop.next_turn()
            self._backend.mark_step()
            return False
        step, updated = loop.step, self._update()
        self._backend.mark_step()
        self._track(step)
        return updated

    step.hooked = True  # type: ignore[attr-defined]  # so that torch runs hooks of all optimizers in the inner step alone

    def lr_factor(self) -> float:
        """How far the last update went, in updates at `ref_batchsize`: the (first) rule's factor on its length."""
        scaling = self._updater.scaling
        return float(scaling.lr) * float(scaling.gradient)

    def current_lr(self) -> float:
        """The effective learning rate of the last update, in the first parameter group."""
        return float(self._updater.rate) * self.lr_factor()

    def noise(self) -> Noise:
        """The gradient's noise as it is known now; sigma2 and mu2 are nan before the first estimate.

        Raises:
            RuntimeError: where nothing measures it.
        """
        if self._updater.moments is None:
            raise RuntimeError(
                f"noise() needs measured gradient noise, but {self.rules[0]} does not use it; pass "
                f'noise="microbatches" to the optimizer'
            )
        return self._updater.moments.noise()

    # State. ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, and under "vbs" the position in the training, without rank or world.

        Raises:
            RuntimeError: in the middle of an accumulation.
        """
        self._refuse_inside_step("state_dict()")
        clock = self._loop.clock
        own = {**clock.state_dict(), "samples": clock.samples, **self._updater.state_dict()}
        return {**self.inner.state_dict(), "vbs": {**own, **self._loop.sampler.fingerprint()}}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Restore what `state_dict()` gave, on any world; the sampler follows.

        Args:
            state_dict: of a `CustomOptimizer`; with `strict=False` also that of a plain torch optimizer.
            strict: whether to refuse a state that was made for another dataset size, seed or trace.

        Raises:
            ValueError: when the state does not fit; then nothing has changed.
        """
        sampler, clock = self._loop.sampler, Clock(self._loop.sampler.plan)
        position = state_dict.get("vbs")
        if position is not None:
            if strict:
                sampler.check_fingerprint(position)
            clock.load_state_dict(position)
        elif strict:
            raise ValueError(
                'a state to go on from holds under "vbs" where the training stood, but this one does not, as if a '
                "plain optimizer had made it; pass strict=False to take over the inner optimizer's state alone"
            )
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "vbs"})
        self.discard_step()
        self._updater.load_state_dict(position or {})
        if position is not None:
            self._loop.clock.follow(clock)
            sampler.follow(clock)

    # An update. --------------------------------------------------------------------------------------------------

    def _update(self) -> bool:
        # What this rank still has to compute, of its own and of the user's, may differ from what others have: it must
        # not end up in one graph with the collective, which has to be the same on all.
        self._backend.mark_step()
        if not self._updater.gradients.agreed:
            self._agree()
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
        if self._updater.moments is None:
            return scalars
        noise = self.noise()
        return scalars | {
            "vbs/gain": noise.gain,
            "vbs/progress": self.progress,
            "vbs/noise_scale": noise.noise_scale,
            "vbs/sigma2": noise.sigma2,
            "vbs/mu2": noise.mu2,
        }

    def _agree(self) -> None:
        """Before the first update: compare the ranks, and fix which parameters have gradients."""
        gradients = self._updater.gradients
        mask = gradients.mask()
        if self._backend.world.size > 1:
            device = gradients.parameters[0].device
            agreement.compare(self._facts(), self._backend, device)
            mask = agreement.union(mask, self._backend, device)
        gradients.agree(mask)

    def _facts(self) -> dict[str, int]:
        """What has to be the same on every rank, as numbers below 2**64."""
        plan, samples, updater = self._loop.clock.plan, self._loop.sampler.fingerprint(), self._updater
        parameters = updater.gradients.parameters
        rule = f"{updater.rules} {updater.reduction} {updater.max_grad_norm} {updater.noise_from}"
        return {
            **self._loop.clock.state_dict(),
            **{name: int(samples[name]) for name in ("dataset_size", "seed", "shuffle", "drop_last")},
            "trace": int(samples["trace"][:16], 16),
            "minibatch_size": plan.minibatch_size,
            "fixed_shape": int(plan.fixed_shape),
            "ref_batchsize": 0 if self.ref_batchsize is None else self.ref_batchsize,
            # Without addresses, which differ.
            "rule, reduction, max_grad_norm and noise": zlib.crc32(re.sub(r"(?i) at 0x[0-9a-f]+", "", rule).encode()),
            "number of parameters": len(parameters),
            "parameters": agreement.checksum(parameters, self._backend),
        }

    def _refuse_inside_step(self, what: str) -> None:
        if self._loop.inside_step:
            raise RuntimeError(
                f"{what} needs whole steps, but some microbatches of step {self._loop.clock.step} are accumulated and "
                f"others are due; call it when optimizer.step() has returned True"
            )


def _check_rules(rules: Sequence[Rule], inner: Optimizer, reference: int | None, sampler: CustomSampler) -> None:
    """Let each rule that has a `check` look at the training."""
    context = RuleContext(
        optimizer=tuple(base.__name__ for base in type(inner).__mro__),
        groups=tuple(
            {name: value for name, value in group.items() if name != "params"} for group in inner.param_groups
        ),
        ref_batchsize=reference,
        max_batch_size=sampler.plan.trace.max_batch_size,
    )
    for rule in rules:
        check: Any = getattr(rule, "check", None)
        if check is not None:
            check(context)
