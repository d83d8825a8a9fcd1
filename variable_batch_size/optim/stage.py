"""What an ability may do in an update: a stage, which is called at the moments that it has a method for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar, final

from torch import Tensor

from variable_batch_size.backend import ElasticBackend
from variable_batch_size.backend.agreement import Agreement
from variable_batch_size.data.batches import Batch
from variable_batch_size.microbatching import Microbatch
from variable_batch_size.optim.message import Message
from variable_batch_size.optim.tensors.parameters import Parameters
from variable_batch_size.rules import Rule, RuleInput, Scaling

FIRST_UPDATE = "the first update of a run, of a restored state, or with other parameters"


class Needs(NamedTuple):
    """What an update needs of each microbatch.

    Attributes:
        norm: the squared norm of its gradient.
        elements: the squares of the elements.
    """

    norm: bool = False
    elements: bool = False

    def joined(self, other: Needs) -> Needs:
        """Return what either of two stages needs."""
        return Needs(self.norm or other.norm, self.elements or other.elements)


class MeasuredSquares(NamedTuple):
    """The squares of a microbatch's gradient g, of any scale.

    Attributes:
        norm: |g|^2, 0-D; None if it is not needed.
        elements: g^2 by parameter, if it is needed.
        factor: by which they must be multiplied, to be n_j times those of the gradient of the mean loss.
        scale: that of a `GradScaler`, by which g must be divided first, 0-D; None without one.
    """

    norm: Tensor | None
    elements: dict[Tensor, Tensor]
    factor: float
    scale: Tensor | None


@dataclass(slots=True)
class Counted:
    """A microbatch whose `step()` was called.

    Attributes:
        microbatch: its place and its samples.
        count: what its loss is a sum over, if not its samples.
        divided: whether the losses of the update are divided by totals of the update, see `Counts`.
    """

    microbatch: Microbatch
    count: Tensor | float | None
    divided: bool


@dataclass
class UpdateUnderWay:
    """An update, as its stages find it and change it.

    Attributes:
        batch: its number, its samples and this rank's microbatches.
        asked: what the rules are asked with; who measures the noise replaces it.
        rules: one for each parameter group.
        parameters: what is trained.
        facts: what all ranks must have in common, by name.
        message: the sums over the ranks, by the names of their entries.
        gradients: those that the parameters have, summed over the ranks.
        count: the sum of the counts over all ranks, 0-D; None if the steps have none.
        read_means: returns the means of what the loop has logged, over all samples, 0-D by name.
        square: the squared norm of the reduced gradient, if it is known: a float, or 0-D on a device.
        norm: its norm before clipping, 0-D, if it is known.
        finite: whether it is finite, 0-D where a device decides: then it was zeroed unless it is.
        skipped: whether the update leaves the weights as they are, 0-D where a device decides.
        scalings: the factors of each parameter group.
    """

    batch: Batch
    asked: RuleInput
    rules: tuple[Rule, ...]
    parameters: Parameters
    facts: dict[str, Any]
    message: Message
    gradients: list[Tensor] = field(default_factory=list)
    count: Tensor | None = None
    read_means: Callable[[], dict[str, Tensor]] = dict
    square: float | Tensor | None = None
    norm: Tensor | None = None
    finite: bool | Tensor = True
    skipped: bool | Tensor = False
    scalings: list[Scaling] = field(default_factory=list)

    @property
    def means(self) -> dict[str, Tensor]:
        """The means of what the loop has logged, over all samples, 0-D by name."""
        return self.read_means()

    def skip(self, decision: bool | Tensor) -> None:
        """Combine a stage's decision, whether this update is skipped, with earlier ones: any of them can skip it.

        `decision`: the same on all ranks. A 0-D tensor, where a device decides, is combined without being read.
        """
        if self.skipped is False or decision is True:
            self.skipped = decision
        elif isinstance(decision, Tensor) and self.skipped is not True:
            self.skipped |= decision


class Saved:
    """What has entries of its own in the state of an optimizer. Each method does nothing; override all or none."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a restored training needs, in entries of its own."""
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if entries of its own are damaged; nothing was loaded yet."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take its entries of a state, which may lack them."""


class Stage(Saved):
    """An ability of an optimizer. Each method does nothing; override methods of moments that matter.

    The moments of an update, in their order: `check` and `add` of each microbatch; `begin`, and `part` of what the
    ranks sum; then, with the reduced gradient, `reduce`, `judge`, `measure`, `scale`, `clip`; `around` the inner
    optimizer's step, and `begin_step` right before it; `end` with the new weights, or when the update was skipped; and
    `clear`.

    Attributes:
        name: names its entry in the message.
        by_microbatch: whether its part is a sum over the microbatches since the last `clear`.
        whole: whether its part has whole numbers only, whose sum has no order.
        compares_microbatches: whether the update depends on how its samples are cut into microbatches.
        reads_gradient: whether it must find the reduced gradient as it is, without the factor of a rule.
        keeps_lr_on_device: whether factors on the learning rate are 0-D tensors that the host does not read.
        skips_on_device: whether a device decides which updates are skipped.
    """

    name = ""
    by_microbatch = whole = False
    compares_microbatches = False
    reads_gradient = False
    keeps_lr_on_device = False
    skips_on_device = False

    def needs(self, batch: Batch | None) -> Needs:
        """Return what an update, None if it is not known yet, has to measure of each microbatch."""
        return Needs()

    def settings(self) -> dict[str, Any]:
        """Return what the ranks compare before the first update, by name."""
        return {}

    def meet(self, agreement: Agreement) -> None:
        """Compare the ranks before the first update; every rank calls it."""

    def check(self, counted: Counted) -> None:
        """Raise an error unless a microbatch can be counted; nothing has changed yet."""

    def add(self, counted: Counted, squares: MeasuredSquares, like: Tensor) -> None:
        """Take what a microbatch brings; `like` is a tensor of the device, and of the dtype, of the parameters."""

    def begin(self, update: UpdateUnderWay) -> None:
        """Add what all ranks must have in common to the facts of an update whose microbatches are all there."""

    def part(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's part of what the ranks sum in an update, 1-D tensors; an empty list if there is none.

        They are summed in place, in one message with other stages, after the last microbatch of the rank.

        Args:
            like: this rank's parts of the parameters, whose device and dtype the tensors should have.
        """
        return []

    def reduce(self, update: UpdateUnderWay) -> None:
        """Read the sums over the ranks."""

    def judge(self, update: UpdateUnderWay) -> None:
        """Decide whether the update is skipped, alike on all ranks."""

    def measure(self, update: UpdateUnderWay) -> None:
        """Measure the reduced gradient of an update that is made, before the rules are asked."""

    def scale(self, update: UpdateUnderWay) -> None:
        """Check or change what the rules have answered."""

    def clip(self, factor: Tensor) -> None:
        """Follow the clipping of the gradient by a factor, 0-D."""

    def around(self, update: UpdateUnderWay) -> AbstractContextManager[None]:
        """Return a context for the inner optimizer's step, in which hyperparameters are scaled later."""
        return nullcontext()

    def begin_step(self, update: UpdateUnderWay) -> None:
        """Prepare the inner optimizer's step, whose hyperparameters are scaled."""

    def end(self, update: UpdateUnderWay) -> None:
        """Keep what the update has brought; it may have been skipped."""

    def clear(self) -> None:
        """Forget the step, after its update or to start it over."""

    def forget(self) -> None:
        """Forget what the ranks have agreed on: parameters have changed, or a state is loaded."""


class LoopStage(Saved):
    """An ability that follows the loop, from microbatch to microbatch. Each method does nothing; override some."""

    def begin_backward(self, member: object, loss: Tensor, *, divided: bool) -> None:
        """Check that `backward()` of a loss may be called for an optimizer."""

    def begin_microbatch(self, member: object, *, has_backward: bool) -> None:
        """Raise an error unless `step()` may count a microbatch now; `step()` calls it before it changes anything.

        `member`: the optimizer. `has_backward`: whether its `backward()` was called for the microbatch.
        """

    def end_microbatch(self, *, ends_update: bool) -> None:
        """Follow a microbatch that was counted, on whose forward no other optimizer waits."""

    def post(self, backend: ElasticBackend) -> None:
        """Let the next sum of ranks that come and go carry what others have to hear."""

    def follow_up(self, batch: Batch, agreement: Agreement, *, leads: bool) -> None:
        """Follow an update that was committed; `leads`: this is the first optimizer of its sampler."""

    def discard(self) -> None:
        """Forget the step, which starts over, or elsewhere."""


Item = TypeVar("Item", bound="Stage | LoopStage")


@final
class Moments(Generic[Item]):
    """Stages, of updates or of the loop, in their order: a moment costs what those cost that have a method for it."""

    def __init__(self, nothing: type[Item], items: Iterable[Item]) -> None:
        self._nothing, self.items = nothing, list(items)  # the base class, whose methods do nothing; the stages
        self._calls: dict[str, list[Callable[..., Any]]] = {}  # name of a method -> the ones that override it
        self._any: dict[str, bool] = {}  # name of an attribute -> whether it is true for any stage

    def append(self, item: Item) -> None:
        """Add a stage, whose methods are called after those of all others."""
        self.items.append(item)
        self._calls.clear()  # what was found for the stages before
        self._any.clear()

    def calls(self, moment: str) -> list[Callable[..., Any]]:
        """Return the methods named `moment` of the stages whose class overrides it, in the order of the stages.

        The base class has a method for each moment of an update, which does nothing and is not called. The list is
        stored, because it is needed in each update.
        """
        methods = self._calls.get(moment)
        if methods is None:
            nothing = getattr(self._nothing, moment)
            overriding = [item for item in self.items if getattr(type(item), moment) is not nothing]
            methods = self._calls[moment] = [getattr(item, moment) for item in overriding]
        return methods

    def call(self, moment: str, *args: Any, **options: Any) -> None:
        """Call the method named `moment`, with these arguments, of each stage whose class overrides it."""
        for method in self.calls(moment):
            method(*args, **options)

    def any(self, attribute: str) -> bool:
        """Return whether the attribute of this name is true for any stage; stored, because no stage changes it."""
        if attribute not in self._any:
            self._any[attribute] = any(getattr(item, attribute) for item in self.items)
        return self._any[attribute]

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of all stages in one dict."""
        return {name: value for method in self.calls("state_dict") for name, value in method().items()}
