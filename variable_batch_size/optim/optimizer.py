"""Accumulate, all-reduce once, scale, step: any torch optimizer with a batch size that changes.

The `backward()` of each microbatch adds to `.grad`, and each `step()` counts and weighs it. The last one of an update
sums over the ranks, clips, scales by the rule, runs the inner optimizer's `step()` and advances the clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed import ProcessGroup
from torch.nn import Module
from torch.optim import Optimizer

from variable_batch_size._validation import suggests, value_error
from variable_batch_size.backend import Backend, BrokenStepError
from variable_batch_size.data.batches import Batch
from variable_batch_size.data.dealer import Dealer
from variable_batch_size.data.plan.state import check_entries
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.data.steps import Phase
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.abilities import Abilities, measures_microbatches
from variable_batch_size.optim.checks import consistency
from variable_batch_size.optim.checks.normalization import cut_options
from variable_batch_size.optim.checks.same_updates import RanksDifferError
from variable_batch_size.optim.loops.outside import outside
from variable_batch_size.optim.loops.replay import Replays
from variable_batch_size.optim.loops.stages import check_not_begun, continue_with
from variable_batch_size.optim.options import Estimator, NormLimit, Reduction, UpdateOptions, check_objects
from variable_batch_size.optim.properties import Commit, ObservedOptimizer
from variable_batch_size.optim.scaling.rule_check import check_applies_lr, choose_rules
from variable_batch_size.optim.scaling.scaling import LearningRateCheck
from variable_batch_size.optim.stage import Needs
from variable_batch_size.optim.sums.overflows import Scaled
from variable_batch_size.optim.sums.strategies import backend_for, strategy_for, sums_in_backward, unwrap
from variable_batch_size.optim.tensors.hooks import call_before_forward, uncompiled, weakly
from variable_batch_size.optim.tensors.parameters import list_parameters
from variable_batch_size.optim.update import Updater
from variable_batch_size.optim.wrapper import check_kind, check_world, run_closure, wrapper_of
from variable_batch_size.rules import Rule
from variable_batch_size.tracker import Tracker


class CustomOptimizer(ObservedOptimizer):
    """A torch optimizer whose updates follow the trace of a sampler, with hyperparameters scaled by a rule.

    Each update uses the gradient of the mean loss over exactly the samples of its step,
    G = sum_j (n_j / B) g_j over the microbatches j of all ranks. Call `step()` after the `backward()` of every
    microbatch. Between updates every hyperparameter has the user's reference value, so `torch.optim.lr_scheduler`
    works as on any optimizer; step a scheduler only when `step()` returned True. Hooks registered on the wrapper are
    registered on the inner optimizer: step hooks run once an update, on the reduced gradients.

    Args:
        inner: the optimizer that updates the weights. The wrapper shares its `param_groups` and `state`.
        sampler: the `CustomSampler` that feeds the loop, or `ArrivingBatches`.
        ref_batchsize: batch size, in samples, at which the hyperparameters were tuned. Every rule needs it but
            "constant".
        model: the model, as the loop calls it: needed for a `DistributedDataParallel` and for modules that
            `fully_shard` has sharded, which then sum the gradients in `backward()`, and for batch normalization.
        rule: a rule, or its name in `vbs.rules.RULES`, with a number as in "power:0.75" if it takes one; or a sequence
            of these, one for each parameter group.
        noise: how to measure the gradient noise: "microbatches" compares the microbatches of each update;
            "differenced" also compares consecutive updates if one has a single microbatch, for one more copy of the
            gradients. Default: "microbatches" if a rule or a controller needs the noise, otherwise it is not measured.
        reduction: reduction of the user's loss over the rows of a microbatch, "mean" or "sum".
        max_grad_norm: maximum norm to which the gradient of an update is clipped.
        skip_grad_norm: norm of the gradient, before clipping, above which an update is skipped: a number, or a function
            of the batch size, since its square is mu^2 + sigma^2 / B. See `skipped`; on a GPU the host reads one number
            an update for it.
        find_unused_parameters: whether each update of several ranks finds out which parameters have gradients on
            any; the host then waits for the device. Otherwise the first update settles it, and a later change raises.
        grad_norm: whether to measure the norm of the gradient of each update, before clipping: `optimizer.grad_norm`.
        log_steps: number of updates between two rows of scalars. Default: 10 if there is a tracker, otherwise never.
        log_samples: number of samples between two rows of scalars, instead.
        tracker: destination of the scalars. Default: `Tracker("runs")` if `log_steps` or `log_samples` is given.
        sharded_accumulation: whether FSDP2 scatters each microbatch's sum; otherwise ranks keep whole gradients.
        process_group: the ranks that share a batch, if these are not all ranks of the job; the others agree with them
            on everything else. Also pass its size and rank to the sampler.
        backend: how ranks communicate. Default: what fits the device of the parameters, see `vbs.backend.detect`.

    Raises:
        TypeError: if an argument has the wrong type, or the rule cannot be used with the inner optimizer.
        ValueError: if a value is out of range or unknown, `ref_batchsize` is missing, or the sampler's rank differs.
    """

    _step_supports_amp_scaling = True

    @suggests
    def __init__(
        self,
        inner: Optimizer,
        sampler: Dealer,
        ref_batchsize: int | None = None,
        *,
        model: Module | None = None,
        rule: Rule | str | Sequence[Rule | str] | None = "constant",
        noise: Estimator | None = None,
        reduction: Reduction = "mean",
        max_grad_norm: float | None = None,
        skip_grad_norm: NormLimit | None = None,
        find_unused_parameters: bool = False,
        grad_norm: bool = False,
        log_steps: int | None = None,
        log_samples: int | None = None,
        tracker: Tracker | None = None,
        sharded_accumulation: bool = True,
        process_group: ProcessGroup | None = None,
        backend: Backend | None = None,
    ) -> None:
        check_not_begun(wrapper_of(inner), sampler)
        super().__init__(inner)
        check_objects(tracker, backend)
        chosen = choose_rules(rule, inner, ref_batchsize, sampler)
        options = UpdateOptions(noise, reduction, max_grad_norm, find_unused_parameters, grad_norm, skip_grad_norm)
        options = options.validate()
        parameters, module = list_parameters(inner.param_groups), unwrap(model)
        self._agreement = None
        self._backend = backend or backend_for(module, parameters, sampler, process_group)
        strategy = strategy_for(
            module,
            parameters,
            self._backend,
            self.agreement if sums_in_backward(module) else None,  # while every rank is here
            sharded_accumulation=sharded_accumulation,
            find_unused=find_unused_parameters,
            by_rows=reduction == "sum",
            needs=weakly(self._needs_of_microbatch) if measures_microbatches(options, chosen, sampler) else None,
            reproducible=sampler.batches.reproducible,
        )
        check_world(sampler, self._backend)
        self._abilities = Abilities(inner, sampler, self._backend, strategy.ranks, chosen, options, module)
        self._updater = Updater(inner, self._backend, chosen, options, strategy.create, self._abilities.stages)
        check_applies_lr(inner, chosen.rules)
        self._sampler, self._training = sampler, sampler.training
        kind = {"measured": self._updater.stages.any("compares_microbatches"), "alone": self._backend.alone}
        self._cut = {"compiles_shapes": self._backend.static_graph, "elastic": self._backend.elastic}
        self._cut |= self._updater.sum.dealing(**cut_options(module, parameters, **kind))
        sampler.attach(self, **self._cut)
        self._replays = Replays(module, self._backend)
        call_before_forward(self._updater.sum.module, self._announce_microbatch)
        call_before_forward(self._replays.module, self._save_before_replay)
        self._lr_check = LearningRateCheck()
        self._updated = True  # whether the last update changed the weights
        self.tracker = Tracker("runs") if tracker is None and (log_steps, log_samples) != (None, None) else tracker
        self._followers = self._abilities.follow(self._updater, self.tracker, log_steps, log_samples)

    def _announce_microbatch(self) -> None:
        """Tell what sums the gradients, before a forward pass of the model, which microbatch comes."""
        self._updater.sum.prepare(self._training.upcoming(self), forward=True)

    def _needs_of_microbatch(self) -> Needs:
        """Return which squares of the next microbatch's gradient are measured: of its norm, of elements, or none.

        If it is not known to which update the microbatch belongs, all that any update needs is measured.
        """
        is_known = self._training.running or self._training.upcoming(self) is not None
        return self._updater.needs(self._training.batch_of(self) if is_known else None)

    def _save_before_replay(self) -> None:
        self._replays.save_state(self._training.upcoming(self))

    def _change_groups(self, caller: str, number: int, change: Callable[[], None]) -> None:
        """Call `change`, after which there are `number` parameter groups, and train their parameters from now on.

        `caller`: the method that the user has called, for the error if it is called within a step.
        """
        self._training.check_phase(caller, Phase.BETWEEN_STEPS)
        rules = self._updater.rules_for(number)
        self._updater.clear()
        change()
        self._updater.use_groups(rules)

    def _adopt_groups(self, *, keep: bool = True) -> None:
        """Train other parameters if the user has changed the lists of `param_groups` in place between two steps.

        `keep`: whether `.grad` already has gradients that belong to the step which begins.
        """
        if not self._updater.has_new_groups:
            return
        if self._training.round_of(self):
            raise RuntimeError(
                f"the parameters must stay the same within a step, but the lists of param_groups were changed in step "
                f"{self.updates}; change them when optimizer.step() has returned True, or after discard_step()"
            )
        self._updater.use_groups(self._updater.rules_for(len(self.param_groups)), keep=keep)

    # The loop. ---------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Move to the first step of a later epoch; in the epoch under way, continue after the last committed update.

        An incomplete step is discarded. After a whole epoch `sampler.set_epoch` is enough. Warns of skipped updates.

        Raises:
            RuntimeError: if all updates of that epoch are committed, or an exception has interrupted a step.
            ValueError: if the trace ends before the epoch does.
        """
        self._training.set_epoch(epoch)
        self._clear_step()

    def discard_step(self, timeout: float = 10.0) -> None:
        """Discard the accumulated microbatches of an incomplete step, so that the step can start over.

        Iterate the loader again afterwards. Call it, or `load_state_dict`, after an exception in `step()`. With
        `noise="differenced"` an exception of a rule leaves no previous gradient to compare the next one with.

        Args:
            timeout: seconds to wait for the other ranks: if a `DistributedDataParallel` sums, all have to discard it.

        Raises:
            RuntimeError: if the exception came when the inner optimizer's step had begun: only a state repairs that; or
                if ranks that have to discard the step do not.
        """
        self._training.check_phase("discard_step()", Phase.BETWEEN_STEPS, Phase.INSIDE_STEP, Phase.INTERRUPTED)
        self._followers.call("discard")
        self._updater.sum.reset(timeout)
        self._training.restart()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of a `backward()` that no `step()` has counted; what a step has accumulated stays.

        Args:
            set_to_none: accepted as in torch; gradients become None.

        Raises:
            RuntimeError: within a step, if a backward has added to gradients accumulated in `.grad`, as a generator's
                backward does to its discriminator's gradients: pass `inputs=` to it.
        """
        self._adopt_groups(keep=False)
        self._updater.sum.clear(uncounted=True)

    def backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
        *,
        divided: bool = False,
        scaler: GradScaler | None = None,
        others: CustomOptimizer | Sequence[CustomOptimizer] = (),
    ) -> None:
        """Call `backward()` of a loss with its weight in the step, and check that nothing else changes gradients.

        Call it for each loss of a microbatch, before `step()`. With DistributedDataParallel and FSDP2 it is required;
        elsewhere a loop may call `loss.backward()` instead, for all microbatches of a step: then other changes of
        gradients are seen in the first updates only.

        Args:
            loss: the loss of the microbatch.
            gradient: see `torch.Tensor.backward`, like the next three.
            retain_graph: whether the graph is kept.
            create_graph: whether the graph of the gradients is built.
            inputs: the tensors that get gradients.
            divided: whether the loss is a part of the update's loss, whose terms are divided by `update.counts` of
                `vbs.updates(counts=)`; it is needed there, and only there. It then adds its gradient as it is, but for
                repeated rows, which count once, and replays, which do not.
            scaler: scales the loss; its scale at the first microbatch holds for the step. Call `scaler.step(optimizer)`
                and `scaler.update()` after each microbatch, without `scaler.unscale_`.
            others: one or more other optimizers of this sampler, if the loss also depends on their parameters; call
                `step()` of each.

        Raises:
            RuntimeError: if something else has changed the gradients since the last `step()` or `backward()`, or an
                exception has interrupted the step.
            ValueError: if another optimizer has a loss of another reduction, or is at another microbatch; or if a loss
                is divided in an update without counts, or is not in one with counts.
        """
        others = (others,) if isinstance(others, CustomOptimizer) else others
        microbatch, *microbatches = [optimizer._microbatch_of_backward(loss, divided) for optimizer in (self, *others)]
        for optimizer, its_microbatch in zip(others, microbatches, strict=True):
            if (optimizer.reduction, its_microbatch) != (self.reduction, microbatch):
                requirement = "all optimizers of a loss must be at the same microbatch, and have the same reduction"
                has_other_reduction = optimizer.reduction != self.reduction
                found = f"{optimizer.reduction} at {its_microbatch}" if has_other_reduction else f"{its_microbatch}"
                raise value_error(requirement, found, "pass one sampler to them, and call step() of each")
        sums_of_others, sums_of_unnamed = [optimizer._updater.sum for optimizer in others], []
        # The optimizers of the sampler that are not in `others`: an error follows if the loss gives them gradients.
        all_optimizers = self._training.members
        if len(all_optimizers) > 1 + len(others):
            sums_of_unnamed = [
                optimizer._updater.sum for optimizer in list(all_optimizers) if optimizer not in {self, *others}
            ]
        options: Any = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
        sums = sums_of_others, sums_of_unnamed
        self._updater.sum.backward(loss, microbatch, scaler, *sums, divided=divided, **options)

    def _microbatch_of_backward(self, loss: Tensor, divided: bool) -> Microbatch:
        """Return the microbatch of a loss, after checks that `backward()` of the loss may be called now."""
        training = self._training
        training.check_phase("backward()", Phase.BETWEEN_STEPS, Phase.INSIDE_STEP, Phase.PARTLY_MADE)
        training.note_work(self)
        self._followers.call("begin_backward", self, loss, divided=divided)
        self._adopt_groups()
        if training.iteration is not None:
            # Now, before a loop accumulates several microbatches by itself, find out whether the loader reads ahead.
            training.iteration.find_serial()
        return training.microbatch(self)

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
            Whether the weights changed: False in the middle of a step, if all counts of a step sum to 0, if a stage
            skips the update, as for `skip_grad_norm` (on XLA the device decides, and the result is True), and if a
            `GradScaler`, or the measurement of the noise on the CPU, found a non-finite gradient. On other devices
            neither is read by the host, and the result is True: without a count the gradient is 0; with a non-finite
            gradient weights, noise and progress stay, `lr_factor()` is 0, and the averages of the inner optimizer decay
            as with a gradient of 0.

        Raises:
            RuntimeError: if no `backward()` has run, or a microbatch of the sampler was skipped, repeated or reordered.
        """
        training = self._training
        training.begin_step(self)
        if closure is not None:
            run_closure(closure, scaled=getattr(self, "found_inf", None) is not None)
        self._followers.call("begin_microbatch", self, has_backward=self._updater.sum.has_backward)
        self._adopt_groups()
        self._lr_check.check(self.param_groups, inside_step=training.round_of(self) > 0)
        try:
            try:
                training.running = True
                microbatch = training.receive_microbatch(self)
                self._accumulate(microbatch, count)
                updated = microbatch.ends_step and self._make_update()
            except BrokenStepError:  # before anything has changed but gradients; vbs.updates makes the step again
                training.restart()
                return False
            finally:
                training.running = False
        finally:  # again, because an interrupt can come just before
            training.running = False
        training.end_step(self, ends_update=microbatch.ends_step)
        if len(training.members) == 1:  # with several optimizers, others may still compute this microbatch
            self._followers.call("end_microbatch", ends_update=microbatch.ends_step)
        if not microbatch.ends_step or len(training.members) > 1:  # else `follow_up` has ended the graph
            self._backend.mark_step()
        return updated

    step.hooked = True  # type: ignore[attr-defined]  # torch then runs its global hooks in the inner step only

    def outside(self) -> AbstractContextManager[None]:
        """Return a context for forward and backward passes that do not belong to training, between two steps.

        Gradients of the optimizers of the sampler, and of their `model=`, are put back, and neither a
        `DistributedDataParallel` nor this optimizer sums: what all ranks must have in common, such as an estimate of a
        Hessian, is the caller's to average. FSDP2 gathers and sums by itself, so that every rank has to do the same.

        Raises:
            RuntimeError: within a step, or after a `backward()` that no `step()` has counted.
        """
        return outside(self._training)

    def continue_with(self, sampler: CustomSampler) -> None:
        """Continue with another sampler, from its first step: other samples, another trace or `minibatch_size`.

        Moments, noise, progress, schedules, averages and the tracker continue; `updates` and `samples` count through,
        and `stage` counts the samplers. All optimizers of the sampler continue with it. A script that restores a
        checkpoint of a later stage runs through the loops of the earlier ones, which have ended, and continues where it
        was saved.

        Args:
            sampler: a new `CustomSampler`, for the same ranks. Its trace and its epochs count from 0.

        Raises:
            RuntimeError: within a step.
            ValueError: if the sampler was used, or the optimizer cannot continue with it; or if a restored state is of
                this stage, and of other samples.
        """
        continue_with(self._training, sampler)

    # State. ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer and, under "vbs", the position in the training; no rank or world.

        Raises:
            RuntimeError: in the middle of a step, also if another optimizer of the sampler is to make the update.
        """
        self._training.check_phase("state_dict()", Phase.BETWEEN_STEPS)
        inner_class: dict[str, Any] = {"optimizer": type(self.inner).__name__}
        state = inner_class | self._updater.state_dict(self.sampler.plan.minibatch_size) | self._followers.state_dict()
        return {**self.inner.state_dict(), "vbs": {"sampler": self.sampler.state_dict(), **state}}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Restore a state, on any number of ranks. The sampler moves to its position.

        Args:
            state_dict: state of a `CustomOptimizer`; with `strict=False` also of a plain torch optimizer.
            strict: whether to raise an error if the state has a different kind of inner optimizer, dataset size, seed
                or past of the trace. A different future of the trace, a different rule, or a different size of
                microbatches that are compared gives a UserWarning.

        Raises:
            ValueError: if the state does not match, or an entry is missing or damaged; then nothing has changed.
        """
        if self._training.running:
            self._training.check_phase("load_state_dict()")
        position = state_dict.get("vbs")
        restore_place: Callable[[], None] = self._training.restart
        if position is not None:
            saved = position.get("sampler", {}) if isinstance(position, Mapping) else {}
            restore_place = self.sampler.prepare_state(saved, strict=strict)
            check_entries(position, {"optimizer": (str,)})
            self._updater.check_state(position)
            self._followers.call("check_state", position)
            if strict:
                check_kind(self.inner, position["optimizer"])
        elif strict:
            raise ValueError(
                'the state must hold the position in the training under "vbs", but this one has none, like the state '
                "of a plain optimizer; pass strict=False to load the inner optimizer's state only"
            )
        self._load_inner(state_dict)
        self._updater.sum.reset()
        self._last_batch = None
        restore_place()
        # A state of a later sampler, which `continue_with` will get, is not compared with the present one.
        minibatch_size = self.sampler.plan.minibatch_size if self._training.later is None else None
        self._updater.load_state_dict(position or {}, minibatch_size)
        self._followers.call("load_state_dict", position or {})

    # An update. --------------------------------------------------------------------------------------------------

    def _clear_step(self) -> None:
        """Discard what a step has accumulated, before it starts over or a state is loaded."""
        self._updater.clear()
        self._replays.drop_state()
        self._backend.mark_step()  # otherwise the clearing would change the graph of the next microbatch

    def _accumulate(self, microbatch: Microbatch, count: Tensor | float | None) -> None:
        """Add a microbatch, whose `backward()` has run, to the step, with the `count` that `step()` was called with."""
        training = self._training
        following = None if microbatch.ends_step else training.microbatch(self, ahead=1)  # the next one of this rank
        scaled = Scaled(getattr(self, "found_inf", None), getattr(self, "grad_scale", None))  # set by a GradScaler
        divided = training.batch_of(self).totals is not None  # whether the loop divides losses by `update.counts`
        inside = training.round_of(self) > 0  # whether this rank has had a microbatch of the step before
        self._updater.add(microbatch, following, inside_step=inside, scaled=scaled, count=count, divided=divided)
        self._replays.restore_state()  # if it was a replay, with weight 0, its forward pass must not change buffers

    def _make_update(self) -> bool:
        """Make the update, after the last microbatch of this rank in the step; return whether the weights changed."""
        updater, training = self._updater, self._training
        if not updater.agreed:  # before the first update
            consistency.compare_ranks(updater, self.sampler, self.inner, self._backend, self.agreement)
        try:
            self._updated = updater.apply(training.due_of(self), training.begin_update)
        except RanksDifferError as error:
            consistency.name_difference(error, self.agreement)
            raise
        updater.clear()
        return self._updated

    def note_commit(self, batch: Batch) -> None:
        """Tell the observers, such as averages of the weights, that an update of this batch was made and counted."""
        self._last_batch = batch
        commit = Commit(batch, self._updater.last_scaling, self._updated)
        for observer in list(self._observers):
            observer.commit(commit)

    def follow_up(self, batch: Batch, *, first: bool) -> None:
        """Prepare for the next step, and call what acts after each update, such as a controller of the batch size.

        `first`: whether this is the first of the sampler's optimizers, for what is done once for all of them.
        """
        self._updater.sum.prepare(self._training.upcoming(self))
        self._backend.mark_step()  # ends the graph of the update, with what observers have computed of its results
        self._followers.call("follow_up", batch, self.agreement, leads=first)
        self.agreement.after_update()

    def note_discard(self) -> None:
        """Forget what a step has accumulated, because it starts over, and tell the observers, such as metrics."""
        self._clear_step()
        for observer in list(self._observers):
            observer.discard()

    def note_iteration(self) -> None:
        """At the start of a loop, drop gradients that no `step()` has counted, as a loop before it may have left them.

        Within a step they stay.
        """
        if self._training.round_of(self) == 0:  # number of microbatches of the step that were counted
            self._updater.sum.clear(uncounted=True)
