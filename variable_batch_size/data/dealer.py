"""The base class of what feeds optimizers, a sampler or batches that arrive: it joins batches and a training."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from variable_batch_size._log import stacklevel_of_user
from variable_batch_size.adaptive.decided_trace import describe, warn_if_changed
from variable_batch_size.data.batches import Batch, Batches, Place, Position, Split
from variable_batch_size.data.plan.deal import Dealing
from variable_batch_size.data.plan.plan import Plan
from variable_batch_size.data.plan.state import ROWS, check_position, check_same_samples
from variable_batch_size.data.training import Member, Training, check_can_attach
from variable_batch_size.world import World


class Dealer:
    """The interface through which optimizers are fed: which microbatches each rank gets, and how far the training is.

    Args:
        batches: what is dealt; an optimizer that attaches says how it is split.
        epochs: number of epochs that will be trained, if known.
        cut_is_known: whether the user has said whether shapes are fixed.
        facts: further arguments of the user that must be equal on all ranks, by name; `Consistency` compares them.
        content: function that returns a text that is the same for equal rows, empty if nothing can be compared.

    Attributes:
        training: how far the training is, and which optimizers take part.
        facts: as the argument.
    """

    def __init__(
        self,
        batches: Batches,
        *,
        epochs: int | None,
        cut_is_known: bool,
        facts: dict[str, Any] | None = None,
        content: Callable[[], str] | None = None,
    ) -> None:
        """Begin the training of these batches, at their first update."""
        super().__init__()
        self.training = Training(batches, epochs=epochs, cut_is_known=cut_is_known)
        self.facts, self._content = facts or {}, content

    def content(self) -> str:
        """Return a text that is equal on two ranks if their datasets have the same rows; empty if that is not compared.

        The first call may read some rows.
        """
        return "" if self._content is None else self._content()

    def __copy__(self) -> Any:
        return copy.deepcopy(self)  # a shallow copy would share the training, so that one moved the other

    def __repr__(self) -> str:
        """Return, as text, what is dealt, for which rank, and how far the training is."""
        rank = f"rank {self.rank} of {self.num_replicas}, at {self.position}"
        if self.batches.arriving:
            return f"{type(self).__name__}({rank})"
        decided = self.batches.decided
        trace = self.plan.trace if decided is None else describe(decided.adaptive)
        tokens = f" of {self.plan.dataset_size:,} tokens" if self.batches.packs else ""
        return f"{type(self).__name__}({self.batches.dataset_size:,} samples{tokens}, {trace}, {rank})"

    # What is dealt. --------------------------------------------------------------------------------------------------

    @property
    def batches(self) -> Batches:
        """What is dealt: pure functions of positions."""
        return self.training.batches

    @property
    def world(self) -> World:
        """This rank, and the number of ranks."""
        return self.batches.world

    @property
    def rank(self) -> int:
        """This rank."""
        return self.world.rank

    @property
    def num_replicas(self) -> int:
        """The number of ranks."""
        return self.world.size

    @property
    def plan(self) -> Plan:
        """Which samples make up which update."""
        return self.batches.plan

    @property
    def dealing(self) -> Dealing:
        """How steps are split into microbatches and rounds."""
        return self.batches.dealing

    @property
    def max_batch_size(self) -> int:
        """The largest batch size that an update may have, in samples."""
        return self.batches.max_batch_size

    def attach(
        self,
        member: Member | None = None,
        *,
        spread: bool = True,
        compiles_shapes: bool = False,
        elastic: bool = False,
        equal_rounds: bool = False,
        padded: bool = False,
    ) -> None:
        """Deal for an optimizer that will call `step()` for every microbatch.

        Args:
            member: the optimizer, if it is not attached yet.
            spread: whether steps may be split further, so that no rank is idle.
            compiles_shapes: whether the device of its parameters compiles each shape, so that shapes are fixed by
                default.
            elastic: whether the world may change between two steps.
            equal_rounds: whether every rank must compute equally many microbatches, without replays.
            padded: whether every rank must compute equally many microbatches, where replays may fill up.

        Raises:
            ValueError: if the trace is constant, and `equal_rounds` are not possible; or if ranks have unequal speeds,
                and one graph for all ranks, or a world that may change.
        """
        check_can_attach(self.batches, compiles_shapes=compiles_shapes, elastic=elastic)
        split = Split(spread, padded, equal_rounds)
        self.training.attach(member, compiles_shapes=compiles_shapes, elastic=elastic, split=split)

    # Where the training is. ------------------------------------------------------------------------------------------

    @property
    def place(self) -> Place:
        """How far the training is."""
        return self.training.place

    @property
    def position(self) -> Position:
        """The next update of the training; after the last one of an epoch, the end of that epoch."""
        return self.training.position

    @property
    def due(self) -> Position:
        """Where the next iteration begins: the next update, or an epoch's end that the loop has not handled yet."""
        return self.training.due

    @property
    def epoch(self) -> int:
        """The epoch of the next update: the following one if all updates of an epoch are committed."""
        return self.training.epoch

    @property
    def updates(self) -> int:
        """The number of updates of the training so far, including skipped epochs and earlier samplers."""
        return self.training.updates

    @property
    def samples(self) -> int:
        """The number of samples that were trained on so far, over all ranks, including earlier samplers."""
        return self.training.samples

    @property
    def epochs(self) -> int | None:
        """The number of epochs that will be trained, if known."""
        return self.training.epochs

    @property
    def done(self) -> bool:
        """Whether the training has ended: by `max_updates` or `max_samples`, or with its trace."""
        return self.training.done

    @property
    def batch(self) -> Batch:
        """The next update, its samples and microbatches, for a loop without an optimizer of this library."""
        return self.batches.batch(self.batches.next_update(self.position))

    def advance(self) -> None:
        """Commit the next update, in a loop without an optimizer of this library, which would do that by itself."""
        self.training.advance()

    def set_epoch(self, epoch: int) -> None:
        """Move to the first step of a later epoch; in the epoch under way, continue after the last committed update.

        It is optional for an epoch that follows the one that was trained. An incomplete step starts over. Warns of
        skipped updates.

        Raises:
            ValueError: if the trace ends before the epoch does.
            RuntimeError: if all updates of that epoch are committed, or an exception has interrupted a step.
        """
        self.training.set_epoch(epoch)

    # State. ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the committed position and what determines its samples: plain numbers, without rank or world."""
        training = self.training
        if training.later is not None:  # a state of a later sampler was loaded, and waits for that sampler
            return dict(training.later)
        state = self.batches.state_dict(training.place, end_pending=training.end_pending)
        return {**state, ROWS: self.content(), **training.earlier.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Move to a saved position, unless an optimizer, whose state has the position, already defines it.

        The past of the trace must be as in the saved run; its future may change, with a UserWarning.

        Args:
            state_dict: what `state_dict` has returned, in a run with any number of ranks.
            strict: whether the samples so far must be as in the saved run.

        Raises:
            ValueError: if the state was saved with another dataset size, seed or past of the trace, unless `strict` is
                False; or if there is no such position.
        """
        if self.training.owned:  # the optimizer's state moves the training, but a loop must still begin anew
            self.training.restarts += 1
            return
        check_position(state_dict)
        is_of_later_sampler = self.training.check_stage(state_dict)
        if is_of_later_sampler and self.training.members:  # the state of the optimizer announces that sampler
            return
        if strict:
            self.check_samples(state_dict)
        self.adopt_state(state_dict, self.resume(state_dict), owned=False)

    def prepare_state(self, state: dict[str, Any], *, strict: bool) -> Callable[[], None]:
        """Check the state that an optimizer loads, without changes; return the function that then moves the training.

        It continues at the saved position, or waits for the later sampler that the state is of.

        Raises:
            ValueError: as `load_state_dict`.
        """
        check_position(state)
        if self.training.check_stage(state):
            return partial(self.training.wait_for_sampler, state)
        if strict:
            self.check_samples(state)
        return partial(self.adopt_state, state, self.resume(state), owned=True)

    def adopt_state(self, state: dict[str, Any], batches: Batches, *, owned: bool) -> None:
        """Continue at a saved position.

        Args:
            state: the saved state.
            batches: the batches of the continued training.
            owned: whether an optimizer has loaded the state, and counts from there.
        """
        self.training.load(state, batches, owned=owned)

    def check_samples(self, state: dict[str, Any]) -> None:
        """Check that a state was saved with the same samples up to its position, and warn if later ones differ.

        Raises:
            ValueError: if not, naming each difference.
        """
        batches = self.batches
        fingerprint = batches.fingerprint()
        trace = fingerprint.pop("trace")  # of the trace only the past must be the same
        if state[ROWS]:
            rows = self.content()
            if rows:
                fingerprint[ROWS] = rows
        check_same_samples(state, fingerprint, batches.past_of_state(state))
        if batches.decided is None and trace != state["trace"] and self.world.rank == 0:
            warnings.warn(
                f"The batch trace differs from the saved run's trace after update {state['step']} (allowed)",
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )

    def resume(self, state: dict[str, Any]) -> Batches:
        """Return the batches of a training that continues at a saved position.

        Raises:
            ValueError: if there is no such position, or the trace ends before the training does.
        """
        batches = self.batches.resume(state, None if self.training.elastic else self.world.size)
        if batches.decided is not None and "growth" in state and self.world.rank == 0:
            warn_if_changed(batches.decided.adaptive, state["growth"])
        batches.plan.check_trace(self.epochs)
        return batches
