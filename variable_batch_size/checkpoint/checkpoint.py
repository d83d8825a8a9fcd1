"""Save the state of a training to a folder, and restore it on any world."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import warnings
import weakref
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, final

import torch
from torch import Tensor

from variable_batch_size._log import log
from variable_batch_size._validation import check_int, check_interval, suggests, value_error
from variable_batch_size.checkpoint.best import Criterion
from variable_batch_size.checkpoint.contents import Contents
from variable_batch_size.checkpoint.events import Events
from variable_batch_size.checkpoint.folder import Folder, update_of
from variable_batch_size.checkpoint.parts import Parts, Stateful
from variable_batch_size.checkpoint.reading import read_first
from variable_batch_size.checkpoint.saving import Saver, few_of
from variable_batch_size.checkpoint.write_thread import wait_for_all
from variable_batch_size.optim.checks.normalization import check_model_known
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.tensors.hooks import uncompiled
from variable_batch_size.preemption import EXIT_CODE, Interrupts, signal_notice

_STOP = "stop"  # the wish by which a rank with a signal asks that all ranks save and exit after the same update
_RESTORE, _EXIT = "Checkpoint.restore()", "the save after a signal"  # names of collective calls, for messages
# The folders in which each optimizer has saved or restored: a new Checkpoint continues there without a restore.
_folders = weakref.WeakKeyDictionary[CustomOptimizer, set[str]]()
UNCALLED_STEP: Final = (
    "Checkpoint.step() was never called, so that nothing was saved at the interval `every`; call it in the loop, after "
    "every optimizer.step()"
)


@final
class Checkpoint:
    """The checkpoints of one training in a folder: saves them, and restores the newest intact one.

    Create it on every rank, which communicates, and call its methods on all ranks after the same updates; every rank
    must see the same folder to restore. A checkpoint is a folder `update-00001234-0001-1-2` in the format
    `vbs-checkpoint`, version 2, of JSON and safetensors, which `read_checkpoint` reads: the states of rank 0's parts,
    the shards of all ranks, and the host's random numbers, which resume in a world of the same size.
    docs/checkpoint_format.md has the format, docs/checkpoints.md what a dataset needs that workers read.

    Args:
        dir: folder of the checkpoints, a path or a URL, as "gs://bucket/runs/a" (extra `cloud`); created if needed, and
            closed to other processes until `close()`. Another object of this process on the folder takes over,
            after what this one still writes.
        model: the model. Frozen parameters, and buffers such as the running statistics of batch normalization, are
            saved from rank 0.
        optimizer: the wrapper whose updates are counted.
        sampler: the sampler; optional, because the state of the optimizer includes its state.
        scheduler: a `ProgressScheduler`, or the scheduler of torch whose `step()` the loop calls.
        keep: number of checkpoints to keep, >= 1; older ones are deleted, except the best one.
        every: interval at which `step()` saves, none by default. A number of updates, >= 1: it saves when the training
            has passed another multiple. A timedelta: it saves when so much time has passed on the clock of rank 0, at
            most about a second or two updates later: the ranks agree on an update without waiting for one another.
        best: what makes a checkpoint the best one, "min:" or "max:" and the name of a metric, such as "min:val_loss".
            `report()` then keeps the best one beside the `keep` newest ones.
        run: name of the job, by which a restarted process takes over a folder from the earlier one at once, and
            otherwise 10 minutes after its end, in an object store or where a disk does not tell that it has ended.
            Default: `TORCHELASTIC_RUN_ID` or `SLURM_JOB_ID`.
        on_interrupt: "save" to save at Ctrl-C after the update, as at the signals of a `Preemption`, and exit; create
            the checkpoint in the main thread then. By default Ctrl-C ends the training without a save.
        parts: further objects with `state_dict()` and `load_state_dict()`, whose states hold only tensors and plain
            Python values.

    Raises:
        TypeError: if `model` is not a Module, `optimizer` is not a CustomOptimizer, another part is None or has no
            state_dict() or load_state_dict(), `keep` is not an integer, `every` is neither an integer nor a timedelta,
            or `best` is not a string.
        ValueError: if `keep` or `every` is not positive, `best` is not "min:" or "max:" and a name, `on_interrupt` is
            not "save", or a part is a scheduler that a `ProgressScheduler` steps.
        RuntimeError: on every rank, if the folder cannot be written or another process writes there, the state of a
            part holds other values, or the stream that feeds the optimizer has a state and is no part. `step()` looks
            once more after the first update.
    """

    @suggests
    def __init__(
        self,
        dir: str | os.PathLike[str],
        *,
        model: torch.nn.Module,
        optimizer: CustomOptimizer,
        sampler: Stateful | None = None,
        scheduler: Stateful | None = None,
        keep: int = 2,
        every: int | timedelta | None = None,
        best: str | None = None,
        run: str | None = None,
        on_interrupt: Literal["save"] | None = None,
        **parts: Stateful,
    ) -> None:
        """Lock the folder on rank 0, check on all ranks that the parts can be saved, and find out who writes."""
        optional = {"sampler": sampler, "scheduler": scheduler}
        passed = {name: part for name, part in optional.items() if part is not None}
        self._parts = Parts(model, optimizer, passed | parts)
        check_model_known(model, optimizer.sampler)
        self._optimizer, self._backend = optimizer, optimizer.backend
        keep = check_int(keep, "keep", 1)
        self._every = None if every is None else check_interval(every, "every", "pass a positive one, or omit it")
        self._criterion = None if best is None else Criterion.parse(best)
        if on_interrupt not in (None, "save"):
            raise value_error('on_interrupt must be "save" or None', repr(on_interrupt), "pass one of these")
        self._folder = Folder(dir, run)
        self._folder.goes_on = self._folder.storage.location in _folders.get(optimizer, ())
        self._agreement = agreement = optimizer.agreement
        self._first_update = optimizer.updates  # at the creation of this object, or after the last restore
        self._updated = self._stepped = False  # whether an update was made, and step() called, since then
        self._looked = optimizer.updates  # at the last `step()`, or restore
        self._restored = False
        if not optimizer.inside_step:
            agreement.run_on_all("Checkpoint()", partial(self._parts.check_storable, updated=False))
        self._interrupts: Interrupts | None = None
        in_one_process = agreement.world.size == 1 or self._backend.threads
        try:
            self._interrupts = Interrupts() if on_interrupt == "save" else None
            agreement.run_on_all("Checkpoint()", wait_for_all)  # what another object on the folder still writes
            token = self._folder.id = agreement.run_on_rank_0("Checkpoint()", self._folder.lock)
            shares = list[str]()  # whether each rank shares the folder; in one process rank 0 writes alone
            if not in_one_process:
                shares = agreement.run_on_all("Checkpoint()", lambda: str(self._folder.is_shared(token)))
            self._due = f"save {token}"  # the wish by which rank 0 asks for a save after an interval of time
            together = {*shares} == {str(True)}
            self._saver = Saver(self._backend, agreement, self._parts, self._folder, keep, together=together)
            self._last_update, self._saved_time = optimizer.updates, time.monotonic()
            self._events = Events(self._folder.storage, agreement.world)
            self._events.add("start", optimizer.updates, **({"every": every} if isinstance(every, int) else {}))
            self._events.large_told = optimizer.skipped
            optimizer.register(self._events)
        except BaseException:  # also an interrupt
            self._release_folder()
            raise

    @property
    def latest(self) -> str | None:
        """The path or URL of the newest intact checkpoint, as this rank reads the folder; None if there is none."""
        folder = Folder(self._folder.storage.location)
        name = folder.newest()
        return None if name is None else folder.storage.at(name)

    @property
    def best(self) -> str | None:
        """The path or URL of the best intact checkpoint, as this rank reads the folder; None without a reported value.

        Without `best=` it is the best by the criterion with which the newest of them was reported.
        """
        folder = Folder(self._folder.storage.location)
        name = folder.best(self._criterion)
        return None if name is None else folder.storage.at(name)

    def save(self, wait: bool = True, *, in_loop: bool = False) -> str:
        """Save the state after the last update.

        Args:
            wait: whether to return only after the checkpoint is there. If False, all ranks return as soon as each
                has copied what it writes within host memory, and a thread writes the copy, whose memory is kept for
                later saves. A subsequent `save`, `restore()` or `close()` first waits for these writes.
            in_loop: whether what is saved at the end of an epoch resumes as if `step()` had saved it.

        Returns:
            The path or URL at which the checkpoint is, or is going to be.

        Raises:
            RuntimeError: on every rank, if an accumulation is in progress, the state cannot be saved, or the folder
                cannot be written, now or by the previous save with `wait=False`; if ranks hold other parameters or
                states of optimizers, of which the first save and every tenth compare the contents. Earlier checkpoints
                are unchanged, and the next save tries again.
        """
        return self._save(wait, in_loop=in_loop)

    def _save(self, wait: bool, *, in_loop: bool, reported: dict[str, Any] | None = None) -> str:
        """Save the state, add the time that it took to the events, and return the location; see `Saver.save`."""
        updates, start_time = self._optimizer.updates, time.monotonic()
        name = self._saver.save(updates, wait, in_loop=in_loop, reported=reported or {})
        self._events.add("save", updates, seconds=time.monotonic() - start_time)
        self._mark_saved()
        return self._folder.storage.at(name)

    @uncompiled
    def step(self) -> bool:
        """Save with `wait=False` if a save is due; call it in the loop, after every `optimizer.step()`.

        Without a new update since the last call, it does nothing. What it saves at the end of an epoch resumes before
        the loop's code for that end: `optimizer.epoch` is then that epoch, the loader yields nothing, and the loop
        continues: it evaluates, steps a scheduler, reads metrics. What `save()` saves resumes with the next epoch. So
        does what `step()` saves if several updates were made since its last call, as in a call after each epoch.

        Returns:
            Whether it saved; the same on every rank.

        Raises:
            SystemExit: with code 143 on every rank, after a save that a signal to a `Preemption` requested.
            RuntimeError: as `save(wait=False)`.
        """
        self._stepped, updates = True, self._optimizer.updates
        if updates == self._looked or self._optimizer.inside_step:
            return False
        # Also where `save()` came before: a signal is still to be answered.
        looked_before, self._looked = self._looked, updates
        updates_before, self._last_update = self._last_update, updates
        self._events.note_update(updates, self._optimizer.skipped)
        in_loop = updates == looked_before + 1  # and not once an epoch, after what the loop does at its end
        if not self._updated:  # an update may have added to the state what no checkpoint can hold
            self._updated = True
            self._agreement.run_on_all("Checkpoint.step()", partial(self._parts.check_storable, updated=True))
        self._wish_to_meet()
        if self._agreement.take_granted(_STOP):
            self._save_and_exit(in_loop)
        # The training has passed a multiple of `every`, or all ranks have agreed, after an interval of time.
        is_due = isinstance(self._every, int) and updates // self._every > updates_before // self._every
        is_due = self._agreement.take_granted(self._due) or is_due
        if is_due:
            self._save(wait=False, in_loop=in_loop)
        return is_due

    @uncompiled
    def report(self, **metrics: float | Tensor | None) -> bool:
        """Report the values of the present weights, and save with `wait=False` if they are the best so far.

        Call it on every rank, between steps, after an evaluation. The best checkpoint stays in the folder until a
        better one is published, beside the `keep` newest ones; a run that resumes compares with it. If the folder
        already has a checkpoint of this update, that one becomes the best and is not written again. As with `save()`,
        what is saved at the end of an epoch resumes with the next epoch: call `report()` last, after a scheduler's
        `step()`. A checkpoint that `step()` has saved at that end resumes before the evaluation.

        Args:
            metrics: the values by name, each a number or a tensor with one; the manifest stores all of them. Rank 0's
                count, and others may be None. The lowest or highest finite value of the metric in `best=` is the best;
                NaN and infinity never are, and an equal value is not better.

        Returns:
            Whether the value is better than in every intact checkpoint; the same on every rank.

        Raises:
            TypeError: if a value is not a real number.
            ValueError: if the metric in `best=` is missing.
            RuntimeError: if `best=` was not passed or an accumulation is in progress; on every rank, as
                `save(wait=False)`.
        """
        if self._criterion is None:
            raise RuntimeError(
                'report() was called on a Checkpoint that has no criterion; pass for example best="min:val_loss" to it'
            )
        if self._optimizer.inside_step:
            raise RuntimeError(
                "report() was called within an accumulation; call it after the last microbatch of a step"
            )
        self._criterion.check_metrics(metrics, decides=self._agreement.world.rank == 0)
        self._backend.mark_step()  # all ranks compute what is pending, so that rank 0 can read its values
        self._saver.finish_pending("Checkpoint.report()")
        criterion, reported = self._criterion, dict[str, Any]()

        def mark_best() -> str:
            reported.update(criterion.manifest_entries(metrics))
            return self._saver.mark_best(self._optimizer.updates, reported, criterion)

        outcome = self._agreement.run_on_rank_0("Checkpoint.report()", mark_best)  # see `Saver.mark_best`
        if outcome == "save":
            self._save(wait=False, in_loop=False, reported=reported)
        return outcome != ""

    def restore(self, strict: bool = True, *, best: bool = False, required: bool = False) -> bool:
        """Restore the newest intact checkpoint, or the best one, and return whether there is one.

        After `restore(best=True)` the training continues from there: the first save deletes the checkpoints that are
        newer, which `restore()` would otherwise prefer. Until then nothing is deleted.

        Args:
            strict: whether to raise an error if the samples differ (dataset size, seed, past of the trace), or if a
                part was not saved. With False, such a part keeps its initial state. A warning tells in any case if the
                future of the trace, the rule or `ref_batchsize` differs.
            best: whether to restore the checkpoint with the best value that was reported. Without `best=` of the
                constructor, the newest such checkpoint tells which metric counts.
            required: whether to raise an error if there is nothing to restore.

        Rank 0 logs which checkpoint was restored, or that there is none. A checkpoint whose state or manifest is
        damaged is skipped with a RuntimeWarning. A UserWarning names each tensor of the model whose dtype differs from
        the saved one. Every rank reads each file once, and executes no code from it. If the number of ranks is the
        same, passes over the sampler begin with the saved RNG states until the next update.

        Raises:
            RuntimeError: on every rank, if the checkpoint has other parts, another model, or other samples than this
                training, if it is not the same on every rank, if there are checkpoints and all of them are damaged, or
                if the previous save failed.
        """
        began, folder, is_rank_0 = time.monotonic(), self._folder, self._agreement.world.rank == 0
        made = self._optimizer.updates  # by this run, if it has restored or made any
        is_of_this_run = self._restored or made != self._first_update
        self._agreement.forget()  # ranks may have made unequal numbers of updates until now
        self._saver.finish_pending(_RESTORE)
        candidates = partial(folder.candidates, best=best, criterion=self._criterion)
        names = self._agreement.run_on_rank_0(_RESTORE, lambda: " ".join(candidates())).split()
        name, contents, damaged = read_first(folder, names, self._parts.sharded_tensors(), self._agreement, _RESTORE)
        location, which = folder.storage.location, " with a reported value" if best else ""
        reasons = ", ".join(f"{name} ({reason})" for name, reason in (self._lost(best) | damaged).items())
        if contents is None and damaged:
            remedy = "restore() takes the newest one, copy" if best else "copy"
            raise RuntimeError(
                f"no checkpoint{which} in {location} can be read: {reasons}; {remedy} an intact one to another folder"
            )
        if reasons and is_rank_0:
            text = f"Damaged checkpoints in {location}: {reasons}; restoring {name or 'nothing'} instead"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        if contents is None:
            absent = f"No checkpoint{which} in {location}: nothing is restored."
            if required:
                raise RuntimeError(absent)
            if is_rank_0:
                log(absent, rank=0, update=self._optimizer.updates)
            return False
        self._agreement.run_on_all(_RESTORE, partial(self._parts.load, contents, folder.storage.at(name), strict))
        self._mark_saved()
        self._restored, self._first_update = True, self._optimizer.updates
        self._looked = self._first_update
        folder.mark_restored(name, best=best)
        if is_rank_0:
            updates = self._optimizer.updates
            lost = (max(0, made - updates),) * 2 if is_of_this_run else self._events.lost(updates)
            self._announce(name, contents, [*damaged], time.monotonic() - began, lost)
        return True

    def _lost(self, best: bool) -> dict[str, str]:
        """Return the checkpoints that are recorded but gone, by name, with what is missing; see `Folder.lost`.

        There are none on ranks other than 0, which alone warns of them, or if the folder cannot be listed.
        """
        with suppress(Exception):
            return {} if self._agreement.world.rank else self._folder.lost(best=best)
        return {}

    def _announce(
        self, name: str, contents: Contents, damaged: list[str], seconds: float, lost: tuple[int, int | None]
    ) -> None:
        """Log that a checkpoint was restored, and add it to the events.

        Args:
            name: name of the checkpoint.
            contents: what this rank has read of it.
            damaged: names of the checkpoints that were skipped.
            seconds: how long the restore took.
            lost: between which numbers of updates are lost; the second is None if it is not known.
        """
        optimizer, folder, updates = self._optimizer, self._folder, self._optimizer.updates
        saved_world, world = len(contents.rng), self._agreement.world.size
        saved_size, size = contents.facts.get("batch_size", 0), self._parts.batch_size(updates)  # 0: not known
        is_decided = optimizer.sampler.batches.decided is not None and optimizer.sampler.training.later is None
        line = f"Checkpoint {name} restored: "
        if saved_world not in (0, world):
            line += f"world {saved_world} -> {world}, "
        if is_decided and saved_size and size and saved_size != size:
            line += f"batch size {saved_size} -> {size}, "
        if optimizer.stage:
            line += f"stage {optimizer.stage}, "
        line += f"update {updates}, epoch {optimizer.epoch}, {optimizer.samples} samples, "
        least, most = lost
        more = "" if most == least else " or more" if most is None else f" to about {most}"
        line += f"lost {least}{more} update{'s' if {*lost} != {1} else ''}"
        line += f"; the next save deletes {', '.join(folder.left)}." if folder.left else "."
        if contents.of_ranks:
            line += f" In this world all ranks have what rank 0 had of {few_of(contents.of_ranks)}."
        log(line, rank=0, update=updates)
        self._events.large_told = self._optimizer.skipped
        self._events.add("restore", updates, lost=least, seconds=seconds, damaged=", ".join(damaged))

    def close(self) -> None:
        """Wait for the write in progress, if any, and unlock the folder.

        While an exception propagates, perhaps on this rank only, as in a `with` block or in `finally`, it waits for no
        other rank, and an error of the write is a RuntimeWarning. Rank 0 then logs what to resume from, unless the
        exception is a SystemExit. Without an exception, a RuntimeWarning on rank 0 tells if updates are not saved
        because `step()`, which saves at the interval `every`, was never called.

        Raises:
            RuntimeError: on every rank, if that write failed.
        """
        self._close_after(sys.exc_info()[1])

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the checkpoint at the end of a `with` block, after an exception or without one."""
        self._close_after(error)

    def _close_after(self, error: BaseException | None) -> None:
        """Close the checkpoint, after an exception or, if `error` is None, at the end of the training.

        After an exception it communicates with no other rank: perhaps only this one has it.
        """
        try:
            if error is None:
                self._saver.finish_pending("Checkpoint.close()", asks=False)
                missed = self._every is not None and not self._stepped and self._optimizer.updates > self._last_update
                if missed and self._agreement.world.rank == 0:
                    warnings.warn(UNCALLED_STEP, RuntimeWarning, stacklevel=3)
            else:
                self._saver.finish_alone()
            if isinstance(error, (Exception, KeyboardInterrupt)) and self._folder.writer.writes:
                self._log_what_to_resume_from()
        finally:
            if self._folder.writer.writes:  # else another process writes to the folder now
                self._events.add("end", self._optimizer.updates, error=type(error).__name__ if error else "")
            if not self._saver.thread.busy:  # else an interrupt ended the wait, and the thread still writes
                self._release_folder()

    def _release_folder(self) -> None:
        """Unlock the folder, and restore the handling of Ctrl-C."""
        self._folder.writer.release()
        if self._interrupts is not None:
            self._interrupts.end()
            self._interrupts = None

    def _log_what_to_resume_from(self) -> None:
        """Log after an exception which checkpoint to resume from, once and if there were updates."""
        updates, best = self._optimizer.updates, self._folder.current if self._folder.restored_best else ""
        try:
            newest = self._folder.newest()
        except Exception:  # a store that cannot be reached; the exception of the training is the one to propagate
            return
        newest_update = update_of(newest) if newest else 0
        lost = updates - (self._first_update if best else newest_update)  # best: nothing was saved since the restore
        if updates != self._first_update and lost >= 0:  # lost < 0: the folder has another training
            count = {0: "no update is lost", 1: "1 update is lost"}.get(lost, f"{lost} updates are lost")
            which, call = ("best", "restore(best=True)") if best else ("newest", "restore()")
            message = f"Checkpoint {best or newest} is the {which} one; {count}; {call} resumes from it."
            if not (best or newest):
                place = self._folder.storage.location
                message = f"No checkpoint is in {place}; {count}, and the training has to begin again."
            log(message, level=logging.WARNING if lost else logging.INFO, rank=0, update=updates)
        self._first_update = updates

    def _save_and_exit(self, in_loop: bool) -> NoReturn:
        """Save after a signal, log it on rank 0 when all ranks have saved, and raise SystemExit."""
        try:
            self._saver.finish_pending(_EXIT)
        except RuntimeError as error:  # of the previous save; this one may still succeed
            warnings.warn(str(error), RuntimeWarning, stacklevel=3)
        updates = self._optimizer.updates
        self._events.add("notice", updates)
        name = self._save(wait=True, in_loop=in_loop).rpartition("/")[2]
        notices = self._agreement.gather(_EXIT, signal_notice())
        earliest = max(notices, key=lambda notice: float(notice.partition(" ")[0] or 0))  # the longest time ago

        def report() -> str:
            log(f"Checkpoint {name} saved {earliest}; exiting with {EXIT_CODE}.", rank=0, update=updates)
            return ""

        self._agreement.run_on_rank_0(_EXIT, report)  # all wait: a launcher may end rank 0 when another rank has exited
        raise SystemExit(EXIT_CODE)

    # On every rank. ----------------------------------------------------------------------------------------------

    def _mark_saved(self) -> None:
        """Record that the training and the folder now hold the same state."""
        self._last_update, self._saved_time = self._optimizer.updates, time.monotonic()
        _folders.setdefault(self._optimizer, set()).add(self._folder.storage.location)

    def _wish_to_meet(self) -> None:
        """Ask the other ranks to save after the same update: for an exit after a signal, or as time has passed.

        `Agreement.take_granted` tells each rank after which update it is done.
        """
        if signal_notice():
            self._agreement.wish(_STOP)
        every = self._every.total_seconds() if isinstance(self._every, timedelta) else math.inf
        if self._agreement.world.rank == 0 and time.monotonic() - self._saved_time >= every:
            self._agreement.wish(self._due)
