"""Accumulate, all-reduce once, scale, step: any torch optimizer under a batch size that changes.

The life of an update on one rank: each microbatch's `backward()` adds to `.grad`, each `step()` counts it and weighs
it; the last one makes the gradients of all ranks one, clips them, lets the rule scale the hyperparameters, runs the
inner optimizer's own `step()`, puts the hyperparameters back and moves the clocks.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer, SparseAdam

from variable_batch_size import agreement
from variable_batch_size.backend import Backend, detect
from variable_batch_size.bias_correction import BiasCorrection
from variable_batch_size.clock import Clock
from variable_batch_size.gradients import Gradients
from variable_batch_size.hyperparameters import Rates, scaled
from variable_batch_size.loop import Loop
from variable_batch_size.plan import Microbatch, Step
from variable_batch_size.rules import Rule, RuleInput, Scaling, checked_rules, scalings
from variable_batch_size.sampler import CustomSampler
from variable_batch_size.tracker import Tracker
from variable_batch_size.validate import refusal, whole


class CustomOptimizer(Optimizer):
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
        rule: Rule | Sequence[Rule] | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        max_grad_norm: float | None = None,
        log_steps: int | None = None,
        tracker: Tracker | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.inner = _checked(inner)
        own = inner.defaults, inner.state, inner.param_groups
        super().__init__(inner.param_groups, inner.defaults)  # empties the inner one
        inner.defaults, inner.state, inner.param_groups = own
        for register in (name for name in dir(Optimizer) if name.startswith("register_")):
            setattr(self, register, getattr(inner, register))
        self.rule, self.ref_batchsize = checked_rules(rule, ref_batchsize, len(inner.param_groups))
        if reduction not in ("mean", "sum"):
            raise ValueError(f'reduction must be "mean" or "sum", as the loss does, got {reduction!r}; pass one')
        if max_grad_norm is not None and not (isinstance(max_grad_norm, (int, float)) and max_grad_norm > 0):
            raise refusal("max_grad_norm must be a number > 0", repr(max_grad_norm), "leave it out to do without")
        value: Any
        kind: Any
        for name, value, kind in (("tracker", tracker, Tracker), ("backend", backend, Backend)):
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} must be a vbs.{kind.__name__}, got {value!r:.60}; pass one or leave it out")
        self.reduction, self.max_grad_norm = reduction, max_grad_norm
        self.log_steps = 10 if log_steps is None else whole(log_steps, "log_steps", 1)
        self.tracker = Tracker("runs") if tracker is None and log_steps is not None else tracker
        self.progress = 0.0
        self._scaling = Scaling()  # of the last update
        self._rate: Any = inner.param_groups[0].get("lr", 1.0)  # that it used
        self._backend = backend if backend is not None else detect(self._parameters())
        self._loop = Loop(_checked_sampler(sampler, self._backend), self._backend.world)
        self._gradients = Gradients(self._parameters(), self._backend)
        self._bias_correction = BiasCorrection(inner, self._backend)
        self._found_inf: Tensor | None = None  # how many gradients of the step were not finite, under a GradScaler
        self._rates = Rates()

    # What a torch optimizer is made of belongs to the inner one. -------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's parameter groups."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The inner optimizer's state by parameter."""
        return self.inner.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's default hyperparameters."""
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.inner.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank alike; which of them have gradients is agreed anew at the next update."""
        if "_loop" not in self.__dict__:  # torch's own constructor runs
            return
        self._refuse_inside_step("add_param_group()")
        checked_rules(self.rule, self.ref_batchsize, len(self.param_groups) + 1)
        self.inner.add_param_group(param_group)
        self._gradients = Gradients(self._parameters(), self._backend)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies and pickles, which would leave the model and the sampler behind."""
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled; make another and load its state_dict()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: gradients are cleared after the update, and in between they are needed."""

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
        self._gradients.clear()
        self._found_inf = None
        self._loop.restart()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> bool:  # type: ignore[override]
        """Count one microbatch, whose `backward()` has run; after a step's last one, update the weights.

        Returns:
            Whether the weights changed: False in the middle of a step, and where a `GradScaler` found a gradient
            that is not finite.

        Raises:
            RuntimeError: when the loop does not feed the optimizer what its sampler deals; the text says what to do.
        """
        if closure is not None:
            raise RuntimeError("step() runs a microbatch once and takes no closure; call backward() before it instead")
        if not (self._gradients.agreed or self._loop.inside_step):  # before ranks go on with unequal microbatches
            agreement.refuse_distributed_data_parallel(self._gradients.parameters)
        self._rates.check(self.param_groups, inside_step=self._loop.inside_step)
        microbatch = self._loop.arrive()
        self._gradients.check(replay=microbatch.samples == 0)
        weight, grad_scale = self._weight(microbatch), self._take_grad_scale(microbatch)
        if grad_scale is not None:
            self._gradients.put_aside(weight, grad_scale)
            weight = 1.0
        updated = False
        if microbatch.ends_step:
            updated = self._update(weight)
            self._commit()
        else:
            if grad_scale is None:
                self._gradients.keep(weight / self._weight(self._loop.microbatch(ahead=1)))
            self._loop.next_turn()
        self._backend.mark_step()
        return updated

    step.hooked = True  # type: ignore[attr-defined]  # so that torch runs hooks of all optimizers in the inner step alone

    def gain(self) -> float:
        """How far the last update went, in updates at `ref_batchsize`: the (first) rule's factor on its length."""
        return self._scaling.lr * self._scaling.gradient

    def current_lr(self) -> float:
        """The effective learning rate of the last update, in the first parameter group."""
        return float(self._rate) * self._scaling.gradient

    # State. ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, and under "vbs" the position in the training, without rank or world.

        Raises:
            RuntimeError: in the middle of an accumulation.
        """
        self._refuse_inside_step("state_dict()")
        clock = self._loop.clock
        own = {"samples": clock.samples, "progress": self.progress, **self._bias_correction.state_dict()}
        return {**self.inner.state_dict(), "vbs": {**clock.state_dict(), **own, **self._loop.sampler.fingerprint()}}

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
            progress = float(position["progress"])
        elif strict:
            raise ValueError(
                'a state to go on from holds under "vbs" where the training stood, but this one does not, as if a '
                "plain optimizer had made it; pass strict=False to take over the inner optimizer's state alone"
            )
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "vbs"})
        self._bias_correction.load_state_dict(position or {})
        self.discard_step()
        if position is not None:
            self._loop.clock.follow(clock)
            sampler.follow(clock)
            self.progress = progress

    # An update. --------------------------------------------------------------------------------------------------

    def _update(self, weight: float) -> bool:
        """Make this rank's gradients everybody's, and step; False where they are not finite."""
        # What this rank still has to compute, of its own and of the user's, may differ from what others have: it must
        # not end up in one graph with the collective, which has to be the same on all.
        self._backend.mark_step()
        if not self._gradients.agreed:
            self._agree()
        due, clock, clip = self._loop.step, self._loop.clock, self.max_grad_norm
        update = RuleInput(due.batch_size, self.ref_batchsize or due.batch_size, clock.step, clock.samples)
        factors = scalings(self.rule, update, len(self.param_groups))
        late = clip or isinstance(self.rule, tuple)  # otherwise one factor for all gradients rides on their last weight
        gradients = self._gradients.whole(weight if late else weight * factors[0].gradient)
        found_inf = [] if self._found_inf is None else [self._found_inf]
        self._backend.all_reduce_sum([*gradients, *found_inf])
        if any(self._backend.host(found).item() for found in found_inf):
            return False
        if clip:
            torch.nn.utils.clip_grad_norm_(self._gradients.parameters, clip)
        if late:
            self._gradients.multiply_each(self.param_groups, [scaling.gradient for scaling in factors])
        self._rate = self.param_groups[0].get("lr", 1.0) * factors[0].lr
        with self._bias_correction.corrected(factors) as corrected, scaled(self.param_groups, corrected, self._backend):
            self.inner.step()
        self._scaling = factors[0]
        self.progress += self._scaling.progress
        return True

    def _commit(self) -> None:
        due, clock = self._loop.step, self._loop.clock
        self._gradients.clear()
        self._found_inf = None
        self._loop.commit()
        if self.tracker is None or self._backend.world.rank:
            return
        used = clock.samples - clock.epoch.samples_before
        self.tracker.show(clock.epoch.number, used, clock.epoch.samples)
        if clock.step % self.log_steps == 0:
            self.tracker.log(clock.step, self._scalars(due))

    def _scalars(self, due: Step) -> dict[str, float]:
        return {
            "vbs/global_batch_size": due.batch_size,
            "vbs/num_microbatches": due.num_microbatches,
            "vbs/world_size": self._backend.world.size,
            "vbs/lr_effective": self.current_lr(),
            "vbs/lr_factor": self.gain(),
            "vbs/samples": self._loop.clock.samples,
        }

    def _agree(self) -> None:
        """Before the first update: compare the ranks, and fix which parameters have gradients."""
        mask = self._gradients.mask()
        if self._backend.world.size > 1:
            device = self._gradients.parameters[0].device
            agreement.compare(self._facts(), self._backend, device)
            mask = agreement.union(mask, self._backend, device)
        self._gradients.agree(mask)

    def _facts(self) -> dict[str, int]:
        """What has to be the same on every rank, as numbers below 2**64."""
        plan, samples, parameters = self._loop.clock.plan, self._loop.sampler.fingerprint(), self._gradients.parameters
        rule = f"{self.rule} {self.reduction} {self.max_grad_norm}"  # without addresses, which differ
        return {
            **self._loop.clock.state_dict(),
            **{name: int(samples[name]) for name in ("dataset_size", "seed", "shuffle", "drop_last")},
            "trace": int(samples["trace"][:16], 16),
            "minibatch_size": plan.minibatch_size,
            "fixed_shape": int(plan.fixed_shape),
            "ref_batchsize": self.ref_batchsize or 0,
            "rule, reduction and max_grad_norm": zlib.crc32(re.sub(r"(?i) at 0x[0-9a-f]+", "", rule).encode()),
            "number of parameters": len(parameters),
            "parameters": agreement.checksum(parameters, self._backend),
        }

    def _weight(self, microbatch: Microbatch) -> float:
        """The factor on a microbatch's gradient that makes the step's one the mean over its samples."""
        rows = microbatch.rows if self.reduction == "sum" else 1
        return microbatch.samples / (microbatch.batch_size * rows)

    def _take_grad_scale(self, microbatch: Microbatch) -> Tensor | None:
        """The scale of this microbatch's loss; None unless a `GradScaler` drives `step()`, to which it gives both."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is None:
            return None
        found_inf = found_inf * (microbatch.samples > 0)
        self._found_inf = found_inf if self._found_inf is None else self._found_inf + found_inf
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        return torch.ones_like(found_inf) if grad_scale is None else grad_scale

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _refuse_inside_step(self, what: str) -> None:
        if self._loop.inside_step:
            raise RuntimeError(
                f"{what} needs whole steps, but some microbatches of step {self._loop.clock.step} are accumulated and "
                f"others are due; call it when optimizer.step() has returned True"
            )


def _checked(inner: Optimizer) -> Optimizer:
    remedies = {
        CustomOptimizer: "wrap the optimizer inside it instead",
        LBFGS: "it runs the model itself, by a closure; use an optimizer that steps without one",
        SparseAdam: "it takes sparse gradients only; use Adam, and layers with sparse=False",
    }
    if not isinstance(inner, Optimizer):
        raise TypeError(f"the inner optimizer must be a torch.optim.Optimizer, got {type(inner).__name__}; make one")
    for kind, remedy in remedies.items():
        if isinstance(inner, kind):
            raise TypeError(f"{type(inner).__name__} cannot be the inner optimizer: {remedy}")
    return inner


def _checked_sampler(sampler: CustomSampler, backend: Backend) -> CustomSampler:
    if not isinstance(sampler, CustomSampler):
        raise TypeError(
            f"the sampler must be the vbs.CustomSampler that feeds the loop, got {type(sampler).__name__}; make one "
            f"and give it to the loader as batch_sampler"
        )
    if sampler.world != backend.world:
        raise ValueError(
            f"the sampler must deal for the rank that the optimizer runs on, but it deals for rank "
            f"{sampler.world.rank} of {sampler.world.size} and the optimizer's {type(backend).__name__} is rank "
            f"{backend.world.rank} of {backend.world.size}; pass num_replicas and rank of this process, and start "
            f"torch.distributed (or move the model to its XLA device) before the optimizer is made"
        )
    return sampler
