"""Make an update from the gradients of a step's microbatches, by one road.

    sum         this rank's share of the gradient, over the ranks; with what the stages sum besides
    judge       whether the update is made: stages may skip it
    measure     the reduced gradient, by stages; only where one of them asks for it
    scale       the hyperparameters and the gradient, by the factors of the rules
    clip        the reduced gradient, to the maximum norm, before it is scaled
    step        the inner optimizer

What is not in every training is a `Stage`: see `stage.py` for their moments, and `abilities.py` for their list.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size._validation import value_error, without_addresses
from variable_batch_size.backend import Backend
from variable_batch_size.backend.base import scalar_dtype
from variable_batch_size.data.batches import Batch
from variable_batch_size.data.plan.state import NUMBER, check_entries
from variable_batch_size.data.steps import Due
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.options import UpdateOptions
from variable_batch_size.optim.scaling.rule_check import Chosen, scalings_of_groups
from variable_batch_size.optim.scaling.scaling import HyperparameterScaling, scaling_if
from variable_batch_size.optim.stage import Counted, Moments, Needs, Stage, UpdateUnderWay
from variable_batch_size.optim.sums.base import Sum
from variable_batch_size.optim.sums.overflows import Scaled
from variable_batch_size.optim.tensors.arithmetic import (
    WITHOUT_FLOAT64,
    check_dense,
    collect_gradients,
    multiply,
    squared_norm,
)
from variable_batch_size.optim.tensors.late import copy_later
from variable_batch_size.optim.tensors.parameters import Parameters, list_parameters, versions_of
from variable_batch_size.optim.wrapper import lr_of, stepping
from variable_batch_size.rules import Rule, RuleInput, Scaling
from variable_batch_size.rules.base import scales_betas
from variable_batch_size.rules.selection import rules_for_groups


@final
class Progress:
    """A sum of floats on the host, or of 0-D tensors on a device without a host sync.

    On a device the sum is a float64, so that it loses no digits in a long training. Where the device has none, it is
    stored as an integer part and a fractional part.
    """

    def __init__(self, value: float = 0.0) -> None:
        self._value: float | Tensor = value  # without float64 (2,): the integer part, and the fraction in [0, 1)

    def add(self, progress: Any) -> None:
        """Add the progress of one update, a float or a 0-D tensor, in updates at the reference batch size."""
        if not isinstance(progress, Tensor):
            self._value += progress
            return
        if progress.device.type not in WITHOUT_FLOAT64:
            self._value = progress.double() + self._value
            return
        value = self._value if isinstance(self._value, Tensor) else progress.new_tensor(divmod(self._value, 1.0))
        integer, fraction = value.unbind()  # two parts, see the class
        fraction = fraction + progress
        self._value = torch.stack([integer + fraction.floor(), fraction - fraction.floor()])

    def reader(self) -> Callable[[], float]:
        """Return a function that returns the sum as it is now; called some updates later, it waits for no device."""
        value = self._value
        if isinstance(value, float):
            return lambda: value
        read = copy_later(value)
        return lambda: sum(read().reshape(-1).tolist())  # on the host, so that no digits are lost

    def __float__(self) -> float:
        return self.reader()()


class OtherSettingsWarning(UserWarning):
    """A state was saved with other rules, another reference batch size, or other microbatches to measure."""


@final
class Updater:
    """Makes an update of the gradient of each step; see `CustomOptimizer`.

    Args:
        inner: the optimizer that is stepped.
        backend: how ranks communicate.
        chosen: the rules.
        options: the arguments of the user that concern every update.
        create_sum: returns what sums the gradients of parameters.
        stages: the abilities.
    """

    def __init__(
        self,
        inner: Optimizer,
        backend: Backend,
        chosen: Chosen,
        options: UpdateOptions,
        create_sum: Callable[[Parameters], Sum],
        stages: Sequence[Stage],
    ) -> None:
        self.rules, self.ref_batchsize, self.rule_per_group = chosen
        self.options = options
        self.progress = Progress()
        self._loaded: Mapping[str, Any] = {}  # the restored state, until the next update
        self.last_scaling = Scaling()  # of the first parameter group in the last update
        self.reference_lr: Any = lr_of(inner.param_groups[0])  # its lr then, before scaling
        self.grad_norm: Tensor | None = None  # of the last update before clipping, 0-D, if it is asked for or limited
        self._inner, self._backend, self._create_sum, self._abilities = inner, backend, create_sum, list(stages)
        self._use_parameters()
        selects = self.stages.any("skips_on_device")  # whether a device, and not the host, decides what is skipped
        self._scaling = HyperparameterScaling(
            inner,
            backend,
            deferred_lr=self.stages.any("keeps_lr_on_device"),
            selects=selects,
            scale_betas=[*map(scales_betas, self.rules)] if selects else [],
        )
        self._numbers_of_rules = backend.numbers_as_inputs(inner)

    # What is trained. --------------------------------------------------------------------------------------------

    def _use_parameters(self, *, keep: bool = False) -> None:
        """Train the parameters that the inner optimizer's groups have now: create what sums their gradients.

        It is called at the beginning, and when the groups have changed. `keep`: whether gradients stay, because `.grad`
        has those of the first microbatch of a step.
        """
        self.parameters = Parameters.of_groups(self._inner.param_groups)
        self.sum = self._create_sum(self.parameters)
        self.stages = Moments(Stage, [*self._abilities, *self.sum.stages])
        # Stages with a name have an entry in the message, which the ranks sum: before those of the sum itself.
        self.sum.message.entries[:0] = [stage for stage in self._abilities if stage.name]
        if not keep:
            self.clear()
        self._await_agreement()

    def _await_agreement(self) -> None:
        """Let the ranks compare their settings and parameters again before the next update."""
        self.agreed = False  # whether they have done so
        self.stages.call("forget")

    def add_stage(self, stage: Stage) -> None:
        """Add an object whose methods are called at the moments of an update, after all others. See `Stage`.

        Raises:
            ValueError: if another stage has its name, or an entry of its state, or if it needs squares of gradients,
                which this optimizer does not measure.
        """
        taken_names = {entry.name for entry in self.sum.message.entries} & {stage.name} - {""}
        any_minibatch_size = 1  # only the names of the entries are compared
        taken = taken_names | (self.state_dict(any_minibatch_size).keys() & stage.state_dict().keys())
        if taken:
            requirement = "a stage must have a name, and entries of its state, that no other has"
            raise value_error(requirement, ", ".join(sorted(taken)), "choose other names, one for each instance")
        overrides_needs = type(stage).needs is not Stage.needs
        if overrides_needs and not self.stages.calls("needs"):
            requirement = "a stage that needs squares of microbatches must be in an optimizer that measures them"
            raise value_error(requirement, f"{self._settings()['rule']}", 'pass noise="microbatches" to the optimizer')
        if self._loaded:  # a state was restored before, of which the stage takes its entries
            stage.check_state(self._loaded)
            stage.load_state_dict(self._loaded)
        self._abilities.append(stage)
        self.stages.append(stage)
        if stage.name:
            self.sum.message.entries.append(stage)

    @property
    def has_new_groups(self) -> bool:
        """Whether the groups of the inner optimizer have other parameters than those that are trained."""
        return not self.parameters.are_those_of(self._inner.param_groups)

    def rules_for(self, number: int) -> tuple[Rule, ...]:
        """Return one rule for each of `number` parameter groups. Raise ValueError if the user chose one for each."""
        return rules_for_groups(self.rules if self.rule_per_group else self.rules[0], number)

    def use_groups(self, rules: tuple[Rule, ...], *, keep: bool = False) -> None:
        """Train the parameters that the groups have now, after a change, by the rule of each group.

        `keep`: whether gradients stay, because `.grad` has those of the first microbatch of a step.
        """
        if keep:
            self._check_no_earlier_gradients()
        parameters_before, self.rules = self.parameters, rules
        for group in self._inner.param_groups:  # a dict that the user has appended may lack some hyperparameters
            for name, default in self._inner.defaults.items():
                group.setdefault(name, copy.deepcopy(default))
        self._use_parameters(keep=keep)
        self._scaling.regroup(parameters_before.groups, self.parameters.groups)

    def _check_no_earlier_gradients(self) -> None:
        """Raise RuntimeError if parameters that are new in the groups may have gradients of earlier microbatches."""
        trained = set(map(id, self.parameters))
        new = [parameter for parameter in list_parameters(self._inner.param_groups) if id(parameter) not in trained]
        # The version of a tensor counts its changes in place: the gradient of a single backward() has version 0.
        if any(version > 0 for version in versions_of([parameter.grad for parameter in new])):
            raise RuntimeError(
                "a parameter that is new in param_groups needs the gradient of this microbatch only, but its .grad was "
                "added to; call optimizer.add_param_group(), or optimizer.zero_grad() after the change of the lists"
            )

    # A microbatch. -----------------------------------------------------------------------------------------------

    def needs(self, batch: Batch | None) -> Needs:
        """Return which squares of each microbatch's gradient the stages need together; `batch`: None if not known."""
        needs = Needs()
        for needs_of_stage in self.stages.calls("needs"):
            needs = needs.joined(needs_of_stage(batch))
        return needs

    def add(
        self,
        microbatch: Microbatch,
        following: Microbatch | None,
        *,
        inside_step: bool,
        scaled: Scaled,
        count: Any = None,
        divided: bool = False,
    ) -> None:
        """Add the gradients of a microbatch, whose `backward()` has run, to those of its step.

        Args:
            microbatch: number and size of the microbatch.
            following: the next microbatch of this rank in the same step, None after the last one.
            inside_step: whether the step already has microbatches of this rank.
            scaled: whether a `GradScaler` has found non-finite gradients, and its scale.
            count: number of tokens, say, of which the loss of the microbatch is a sum; None for samples.
            divided: whether the user has divided the losses of the step by totals of the update, see `Counts`.
        """
        if not (self.agreed or inside_step):  # once, before the first update
            check_dense(self.parameters)
        counted = Counted(microbatch, count, divided)
        self.stages.call("check", counted)
        self.sum.add(counted, following, scaled, partial(self.stages.call, "add", counted))

    def clear(self) -> None:
        """Discard the accumulated microbatches, after an update or to start the step over."""
        self.sum.clear()
        self.stages.call("clear")

    # An update. --------------------------------------------------------------------------------------------------

    def apply(self, due: Due, begin: Callable[[], None]) -> bool:
        """Sum the gradients of a step over the ranks, clip and scale them, and step the inner optimizer.

        Args:
            due: the update: its epoch, its number, its batch, and the samples of the updates before it.
            begin: function that is called right before the first change that cannot be undone: the step of the inner
                optimizer, or the counting of an update that is skipped.

        Returns:
            False if the host has found that the gradient is non-finite or too large, so that the update was skipped.

        Raises:
            RanksDifferError: on every rank, if `facts`, which must be equal on all ranks, differ in this update. A
                device is read later, so that it may also be an update some updates ago.
        """
        self._loaded, batch = {}, due.batch
        reference = batch.batch_size if self.ref_batchsize is None else self.ref_batchsize
        asked = RuleInput(batch.batch_size, reference, due.updates, due.samples)
        facts: dict[str, Any] = {
            "epoch": due.epoch,
            "step": due.updates,
            "batch_size": batch.batch_size,
            "samples": due.samples,
        }
        facts["max_grad_norm"] = self.options.max_grad_norm  # it may be set between updates
        update = UpdateUnderWay(batch, asked, self.rules, self.parameters, facts, self.sum.message)
        self.stages.call("begin", update)
        factor = None  # on all gradients, if it is known before they are
        is_factor_known = self._shares_factor
        if is_factor_known:
            self._ask_rules(update)
            factor = float(update.scalings[0].gradient)
        if not self._reduce(update, factor):
            self._keep_norm_of_skipped(update)
            begin()
            self.stages.call("end", update)
            return False
        self.stages.call("measure", update)
        if not is_factor_known:  # the rules need the noise, say, which was measured just now
            self._ask_rules(update)
        self._clip(update)
        if not is_factor_known:
            self._scale_gradients(update.scalings)
        self._step_inner(update, begin)
        self.last_scaling = update.scalings[0]
        # Where a device decides, the progress of a skipped update must be 0. If `finite` is a tensor, the measurement
        # of the noise has done the same already.
        if isinstance(update.skipped, Tensor) and update.finite is True:
            made = (~update.skipped).to(scalar_dtype(self.parameters))
            self.last_scaling = scaling_if(made, self.last_scaling, self._backend, "made")
        self.progress.add(self.last_scaling.progress)
        self.stages.call("end", update)
        return True

    @property
    def _shares_factor(self) -> bool:
        """Whether the rule multiplies all gradients by one factor that does not depend on them.

        It is then multiplied together with weights of microbatches, which saves a pass over the gradients. Clipping,
        for example, prevents that, because it needs the norm of gradients without the factor.
        """
        return not (self.rule_per_group or self.options.measures_norm or self.stages.any("reads_gradient"))

    def _reduce(self, update: UpdateUnderWay, factor: float | None) -> bool:
        """Sum gradients over the ranks, times a factor if there is one. Return False if the host skips the update."""
        gradients = self.sum.finish(update.batch, factor)
        update.gradients, update.skipped = gradients or [], gradients is None
        self.stages.call("reduce", update)
        if update.skipped is True:
            return False
        if not update.gradients:
            raise RuntimeError(
                "an update needs a gradient of at least one parameter, but backward() gave none to the parameters of "
                "this optimizer; compute the loss from them, and set requires_grad"
            )
        self.stages.call("judge", update)
        if not self.stages.any("skips_on_device"):
            update.skipped = bool(update.skipped)  # if it is a tensor, the host waits for it
        return update.skipped is not True

    def _ask_rules(self, update: UpdateUnderWay) -> None:
        """Compute the factors of each parameter group by its rule, from the batch size and, if measured, the noise.

        Stages then check or change these factors.
        """
        on_device = self.stages.any("keeps_lr_on_device")  # factors on lr are 0-D tensors, which the host does not read
        with self._numbers_of_rules if on_device else nullcontext():
            device = self.parameters[0].device if on_device else None
            update.scalings = scalings_of_groups(self.rules, update.asked, device)
            self.stages.call("scale", update)

    def _keep_norm_of_skipped(self, update: UpdateUnderWay) -> None:
        """Set `grad_norm` for an update that is skipped: nan if it was skipped before the norm was computed."""
        if update.norm is not None:
            self.grad_norm = update.norm
        elif self.options.measures_norm:
            self.grad_norm = torch.full((), math.nan, device=self.parameters[0].device)

    def _clip(self, update: UpdateUnderWay) -> None:
        """Multiply the gradients G by min(1, max_grad_norm / |G|). Keep |G| as `grad_norm` if it is known or needed."""
        max_norm = self.options.max_grad_norm
        if (max_norm is not None or self.options.grad_norm) and update.gradients and update.norm is None:
            update.norm = squared_norm(update.gradients).sqrt()
        if update.norm is not None:
            self.grad_norm = update.norm
        if max_norm is None or update.norm is None:
            return
        factor = torch.clamp(max_norm / (update.norm + 1e-6), max=1.0)  # 1e-6 as in torch.nn.utils.clip_grad_norm_
        for device in dict.fromkeys(gradient.device for gradient in update.gradients):
            on_device = [gradient for gradient in update.gradients if gradient.device == device]
            multiply(on_device, factor.to(device), self._backend)
        self.stages.call("clip", factor)

    def _scale_gradients(self, scalings: Sequence[Scaling]) -> None:
        """Multiply the gradients of each parameter group, in place, by the factor that its rule has for gradients."""
        factors = [scaling.gradient for scaling in scalings]
        scales = any(isinstance(factor, Tensor) or factor != 1 for factor in factors)
        if self.stages.any("compares_microbatches") and not scales:
            return  # as most rules that use the noise, which scale the learning rate only
        for group, factor in zip(self._inner.param_groups, factors, strict=True):
            multiply(collect_gradients(dict.fromkeys(group["params"])), factor, self._backend)

    def _step_inner(self, update: UpdateUnderWay, begin: Callable[[], None]) -> None:
        """Step the inner optimizer with scaled hyperparameters, and call `begin` right before."""
        lr = lr_of(self._inner.param_groups[0])
        self.reference_lr = lr.clone() if isinstance(lr, Tensor) else lr
        skips_on_device = update.skipped if isinstance(update.skipped, Tensor) else None
        with ExitStack() as stack:
            # First, because a stage moves the optimizer's step counts to the device, and `apply` must find them there.
            for context_of_stage in self.stages.calls("around"):
                stack.enter_context(context_of_stage(update))
            stack.enter_context(self._scaling.apply(update.scalings, skips_on_device))
            stack.enter_context(stepping(self._inner))  # allows the call of `inner.step()`
            begin()
            self.stages.call("begin_step", update)
            self._inner.step()

    # The state. --------------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        """Return the rules as text, and the reference batch size: two states with equal ones scale alike."""
        rules = [without_addresses(repr(rule)) for rule in self.rules]
        return {"rule": ", ".join(dict.fromkeys(rules)), "ref_batchsize": self.ref_batchsize}

    def state_dict(self, minibatch_size: int) -> dict[str, Any]:
        """Return the rules, the progress, and the entries of the stages, for a checkpoint; waits for a device.

        `minibatch_size`: of the sampler. It is an entry if gradients of microbatches are compared.
        """
        last_rates = {key: float(getattr(self.last_scaling, key)) for key in ("lr", "gradient")}
        last_rates["reference_lr"] = float(self.reference_lr)
        compares = self.stages.any("compares_microbatches")
        # If the noise is measured, its stage replaces the entry "noise" below.
        of_microbatches = {"minibatch_size": minibatch_size, "noise": {}} if compares else {}
        state: dict[str, Any] = {"progress": float(self.progress), "last_rates": last_rates}
        state = {**self._settings(), **of_microbatches, **state}
        return {**state, **self.stages.state_dict(), **self._scaling.state_dict()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if an entry of a state is missing or damaged, before anything is loaded."""
        check_entries(state, {"rule": (str,), "ref_batchsize": (int, type(None)), "progress": NUMBER})
        if not 0 <= state["progress"] < math.inf:
            raise value_error(
                "progress must be a finite number >= 0", state["progress"], "restore a state as it was saved"
            )
        check_entries(state, {"last_rates": (dict,)})
        check_entries(state["last_rates"], dict.fromkeys(("lr", "gradient", "reference_lr"), NUMBER), "last_rates.")
        if {"noise", "minibatch_size"} & state.keys():  # microbatches were compared
            check_entries(state, {"minibatch_size": (int,), "noise": (dict,)})
        self.stages.call("check_state", state)
        self._scaling.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any], minibatch_size: int | None) -> None:
        """Restore a state. Without an entry in it a stage is reset, but the progress stays.

        `minibatch_size`: of the sampler. None if the state belongs to a later sampler, which is not known yet.
        Warns by `OtherSettingsWarning` if it was saved with other rules, another reference, or other microbatches.
        """
        present = self._settings()
        if minibatch_size is not None and self.stages.any("compares_microbatches"):
            present["minibatch_size"] = minibatch_size
        saved = {key: state.get(key, now) for key, now in present.items()}
        changed = [f"{key} was {saved[key]} and is {now}" for key, now in present.items() if saved[key] != now]
        if changed and self._backend.world.rank == 0:
            warnings.warn(
                f"Resumed with other settings: {', '.join(changed)}", OtherSettingsWarning, stacklevel_of_user()
            )
        if "progress" in state:
            self.progress = Progress(float(state["progress"]))
            rates = state["last_rates"]
            self.last_scaling = Scaling(lr=rates["lr"], gradient=rates["gradient"])
            self.reference_lr = rates["reference_lr"]
        self._await_agreement()
        self._loaded = state
        self.stages.call("load_state_dict", state)
        self._scaling.load_state_dict(state)
