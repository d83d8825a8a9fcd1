"""What an optimizer is able to do, by the arguments that ask for it: the only list of what the core does not know.

An ability is a file with a `Stage` of an update, or a `LoopStage` of the loop. It has a line here, or a user passes it
to `optimizer.register`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from torch.nn import Module, Parameter
from torch.optim import Optimizer

from variable_batch_size._validation import value_error
from variable_batch_size.adaptive.base import check_rule_of
from variable_batch_size.backend import Backend
from variable_batch_size.data.dealer import Dealer
from variable_batch_size.optim.beside.controller import ControllerRunner
from variable_batch_size.optim.beside.means import StepMeans, TokenCount
from variable_batch_size.optim.beside.report import Reporter
from variable_batch_size.optim.beside.skipping import LargeGradients
from variable_batch_size.optim.checks.buffers import Buffers
from variable_batch_size.optim.checks.normalization import check_reproducible
from variable_batch_size.optim.checks.owners import Owners
from variable_batch_size.optim.checks.same_updates import SameUpdates
from variable_batch_size.optim.loops.counts import Counts
from variable_batch_size.optim.noise.differenced import DifferencedEstimator
from variable_batch_size.optim.noise.gradient_noise import GradientNoise, check_measurable
from variable_batch_size.optim.noise.second_moment import SecondMoment, create_second_moment
from variable_batch_size.optim.options import UpdateOptions
from variable_batch_size.optim.reproducible.seeding import Seeding
from variable_batch_size.optim.scaling.rule_check import Chosen
from variable_batch_size.optim.stage import LoopStage, Moments, Stage
from variable_batch_size.optim.sums.ranks import Ranks
from variable_batch_size.optim.tensors.parameters import list_parameters
from variable_batch_size.optim.update import Updater
from variable_batch_size.rules import Noise
from variable_batch_size.rules.base import needs_noise, needs_squares
from variable_batch_size.tracker import Tracker


def measures_noise(options: UpdateOptions, chosen: Chosen, sampler: Dealer) -> bool:
    """Return whether an optimizer measures gradient noise: for a rule, a controller, or because the user asks for it.

    A controller chooses the batch sizes of the sampler while the training runs.
    """
    decided = sampler.batches.decided  # the batch sizes that a controller chooses; None without one
    controller_needs_noise = decided is not None and decided.adaptive.needs_noise
    return options.noise is not None or controller_needs_noise or any(map(needs_noise, chosen.rules))


def measures_microbatches(options: UpdateOptions, chosen: Chosen, sampler: Dealer) -> bool:
    """Return whether an update reads the gradients of single microbatches."""
    return measures_noise(options, chosen, sampler) or any(map(needs_squares, chosen.rules))


@final
class Abilities:
    """The abilities of an optimizer.

    Attributes:
        same_updates: compares the ranks, if there are several.
        counts: those of `step(count=)`.
        means: the values of `log`.
        totals: what `vbs.updates(counts=)` counts.
        skipper: skips updates by `skip_grad_norm`; None without it, like the others if nobody asks for them.
        noise: the gradient noise.
        second_moment: that of Adam, as at the reference.
        seeding: the random numbers of `reproducible=True`.
        owners: looks for parameters that are in no group and are trained.
        buffers: looks for buffers that forward writes.
        module: the model, if it is known.
    """

    def __init__(
        self,
        inner: Optimizer,
        sampler: Dealer,
        backend: Backend,
        ranks: Ranks,
        chosen: Chosen,
        options: UpdateOptions,
        module: Module | None,
    ) -> None:
        parameters, reproducible = list_parameters(inner.param_groups), sampler.batches.reproducible
        decided = sampler.batches.decided  # the batch sizes that a controller chooses; None without one
        if decided is not None:
            for rule in chosen.rules:
                check_rule_of(decided.adaptive.controller, rule)
        compares = backend.job.world.size > 1 and not backend.elastic  # an elastic backend compares ranks by itself
        self.same_updates = SameUpdates(inner, backend) if compares else None
        self.counts = TokenCount(backend, options.reduction)
        self.means = StepMeans(backend, self.counts, options.reduction, by_rows_of_message=reproducible)
        self.totals = Counts(sampler.training, ranks, parameters[0], whole=reproducible)
        self.skipper: LargeGradients | None = None
        if options.skip_grad_norm is not None:
            self.skipper = LargeGradients(options.skip_grad_norm, inner, backend, parameters)
        self.noise: GradientNoise | None = None
        if measures_noise(options, chosen, sampler):
            check_measurable(inner, chosen.rules, chosen.reference, backend)
            on_device = not backend.reads(parameters[0])  # where the host would wait for numbers
            differenced = options.noise == "differenced"  # compares consecutive updates
            pair_estimator = DifferencedEstimator(backend, on_device=on_device) if differenced else None
            self.noise = GradientNoise(backend, parameters, pair_estimator)
        self.second_moment: SecondMoment | None = None
        if any(map(needs_squares, chosen.rules)):
            self.second_moment = create_second_moment(inner, chosen.reference, backend, sampler)
        self.seeding: Seeding | None = None
        if reproducible:
            check_reproducible(module, parameters)
            self.seeding = Seeding(sampler.training, backend)
        self.owners = Owners(inner, module)
        self.buffers = Buffers(module, backend, sampler.training, reproducible=reproducible)
        self.module = module
        if any(stage.compares_microbatches for stage in self.stages):  # why `step(count=)` raises an error
            self.counts.refused = (
                "the rule, the controller or noise= compares those of microbatches, by their samples; choose another "
                "rule or controller, or omit noise="
            )
        if chosen.reference is not None:
            sampler.batches.check_reference(chosen.reference)
        if sampler.batches.packs:
            self.counts.refused = "lengths= of the sampler counts tokens already; pass means over the tokens"
        self._training, self._backend = sampler.training, backend
        self._controlled = decided is not None

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages, which act at moments of an update, in the order in which they are called."""
        always = self.counts, self.means, self.totals
        stages = self.same_updates, *always, self.skipper, self.noise, self.second_moment, self.owners
        return [stage for stage in stages if stage is not None]  # None: the user has not asked for it

    @property
    def noise_reader(self) -> Callable[[], Callable[[], Noise]] | None:
        """Return a function that returns a reader of the present noise; None if it is not measured."""
        return None if self.noise is None else self.noise.reader

    @property
    def skipped(self) -> int | None:
        """The number of updates that were skipped; None if none is."""
        return None if self.skipper is None else self.skipper.skipped

    @property
    def parameters_of_model(self) -> Sequence[Parameter]:
        """The parameters of the model, if it is known, also those of other optimizers."""
        return [] if self.module is None else list(self.module.parameters())

    def check_continues(self, sampler: Dealer) -> None:
        """Raise ValueError unless an optimizer that was created for one sampler can continue with this one."""
        before, now = self._training.batches, sampler.batches
        if before.reproducible != now.reproducible:
            found = f"reproducible={now.reproducible} after {before.reproducible}"
            raise value_error("a run must stay reproducible, or not", found, "pass the same")
        if before.in_tokens != now.in_tokens:
            found = "tokens after samples" if now.in_tokens else "samples after tokens"
            raise value_error("a run must count its batches in one unit", found, "pass lengths= to both samplers")
        if now.decided is not None and not (self._controlled and (self.noise or not now.decided.adaptive.needs_noise)):
            requirement = "a controller must follow one that the optimizer was created with, and that measures as much"
            raise value_error(requirement, "a new AdaptiveTrace", "also create the first sampler with a controller")

    def follow(
        self, updater: Updater, tracker: Tracker | None, log_steps: int | None, log_samples: int | None
    ) -> Moments[LoopStage]:
        """Return the stages that follow the loop, from microbatch to microbatch, in the order in which they are called.

        `tracker`: destination of scalars, a row after each `log_steps` updates or `log_samples` samples.
        """
        core = updater, self._training, self._backend
        stages: list[LoopStage] = [self.totals, self.owners, self.buffers]
        if self.seeding is not None:
            stages.append(self.seeding)
        if self._controlled:
            stages.append(ControllerRunner(*core, self.noise_reader, tracker))
        if tracker is not None:
            stages.append(Reporter(*core, self, tracker, log_steps, log_samples))
        return Moments(LoopStage, stages)
