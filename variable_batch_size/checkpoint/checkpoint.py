"""Saves what belongs together, and goes on from there on any world.

The life of a `save` here: every rank collects its state, which also makes lazy devices compute what is due, and says
so; rank 0 brings its own to the host while the others wait, and writes and publishes it: before all hear how it went,
or, where nobody is to wait, in a thread that touches nothing but its copy. What that thread failed with, all hear at
the next call that has to do with the folder.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol, final, runtime_checkable
from uuid import uuid4

import torch
from torch import Tensor

from variable_batch_size._validation import check_int, value_error
from variable_batch_size.checkpoint import rng_states, stored_state
from variable_batch_size.checkpoint.background import Background
from variable_batch_size.checkpoint.coordinated_stop import CommonStop
from variable_batch_size.checkpoint.folder import CheckpointFolder, whole
from variable_batch_size.checkpoint.snapshot import Snapshot
from variable_batch_size.checkpoint.stored_state import StoredState
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.preemption import EXIT_CODE, current, notice

_POSITION = ("epoch", "step", "samples")
_FINGERPRINT = ("trace", "dataset_size", "seed", "shuffle", "drop_last")


@runtime_checkable
class Stateful(Protocol):
    """What can be a part of a checkpoint."""

    def state_dict(self) -> Any:
        """Tensors and plain values."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Go on from these."""


@final
class Checkpoint:
    """Saves a training in a folder, and restores the newest whole state that is in there.

    Every rank makes one and calls its methods, all at the same updates; rank 0 writes, and every rank has to see the
    same folder when it restores. A checkpoint is a folder `update-00001234` with `state.pt`, which
    `torch.load(weights_only=True)` reads, and `manifest.json`: the position (epoch, step, samples, updates), the
    fingerprint of the trace, and the size and SHA-256 of the state. It holds rank 0's parts, buffers of the model
    included, and every rank's random states on the host (torch, numpy and random), which are restored in a world of
    the same size only; generators of devices are not saved.

    Args:
        dir: where the checkpoints are; made if need be, and locked for other writers until `close()` (POSIX only).
        model: the same on all ranks, as after any update.
        optimizer: the wrapper, whose updates are counted.
        sampler: its state is that of the optimizer too, so it may be left out.
        scheduler: a `ProgressScheduler`, or one of torch's.
        keep: how many checkpoints stay, the newest ones.
        every: how often `step()` saves, while the training goes on: each time that it has passed another multiple of
            so many updates, or so much time on rank 0's clock, whose decision the ranks hear by one small message an
            update.
        parts: more things that have a state of tensors and plain values.

    Raises:
        TypeError, ValueError: where the arguments do not fit together; the text says what to do.
        RuntimeError: on every rank, when the folder cannot be made or has another writer.
    """

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
        **parts: Stateful,
    ) -> None:
        named = {"optimizer": optimizer, "model": model, "sampler": sampler, "scheduler": scheduler, **parts}
        self._parts: dict[str, Stateful] = {name: part for name, part in named.items() if part is not None}
        for name, part in self._parts.items():
            kind = {"optimizer": CustomOptimizer, "model": torch.nn.Module}.get(name, Stateful)
            if not isinstance(part, kind):
                needed = {"optimizer": "a vbs.CustomOptimizer", "model": "a torch.nn.Module"}.get(
                    name, "something with state_dict() and load_state_dict()"
                )
                raise TypeError(f"{name} must be {needed}, got {part!r:.60}; pass one or leave it out")
        self._model, self._optimizer, self._backend = model, optimizer, optimizer.backend
        self._keep = check_int(keep, "keep", 1)
        self._every = _checked_every(every)
        self._folder = CheckpointFolder(Path(dir))
        self._snapshot, self._background = Snapshot(self._backend), Background()
        self._unheard = False  # whether a write was begun, on rank 0, of which the ranks do not know how it went
        self._on_rank_0(self._lock)
        self._stop: CommonStop | None = None
        if self._any(lambda: current() is not None):  # then all have to agree
            name = self._on_rank_0(lambda: uuid4().hex)
            self._stop = CommonStop(self._backend.store(), name, self._backend.world)
        self._seen, self._saved = optimizer.updates, time.monotonic()

    @property
    def latest(self) -> Path | None:
        """The newest whole checkpoint in the folder, as this rank reads it."""
        return next((entry.path for entry in self._folder.entries() if whole(entry.path) is not None), None)

    def save(self, wait: bool = True) -> Path:
        """Save the state after the last update; returns where it is published, or is going to be.

        Args:
            wait: whether every rank waits until it is published. If not, all go on as soon as rank 0 has copied the
                state within the host's memory, of which it keeps that much from then on, and a thread writes it. A
                save, `restore()` or `close()` that follows waits for that one first.

        Raises:
            RuntimeError: on every rank, in the middle of an accumulation, or when the state cannot be saved or the
                folder written, now or by the save before, for which nobody waited; earlier checkpoints are as they
                were, and the next save tries again.
        """
        parts: dict[str, Any] = {}

        def collect() -> bytes:
            parts.update((name, part.state_dict()) for name, part in self._parts.items())
            self._backend.mark_step()  # what is pending is computed by all ranks, and not by rank 0 alone
            self._finish()  # where it fails, others may not wait in a part that communicates
            return rng_states.current().encode()

        rng = [states.decode() for states in self._everywhere(collect)]
        path = Path(self._on_rank_0(lambda: str(self._publish(parts, rng, wait))))
        self._unheard = not wait
        self._note()
        return path

    def step(self) -> bool:
        """Save if that is due, without waiting; call it after `optimizer.step()`. Without a new update it does nothing.

        Returns:
            Whether it has saved, the same on every rank.

        Raises:
            SystemExit: with code 143 on every rank, when it has saved because a `Preemption` was asked to stop.
            RuntimeError: as `save(wait=False)` does.
        """
        updates = self._optimizer.updates
        if updates == self._seen or self._optimizer.inside_step:
            return False
        before, self._seen = self._seen, updates
        if self._stop is None and current() is not None:
            raise RuntimeError(
                "a Checkpoint heeds a Preemption that was there before it, but this one was made first; enter the "
                "Preemption before the Checkpoint is made"
            )
        if self._stop and self._stop.after_update(wanted=notice() != ""):
            self._leave()
        if self._every is None:
            return False
        if isinstance(self._every, timedelta):
            seconds = self._every.total_seconds()
            due = self._any(lambda: self._backend.world.rank == 0 and time.monotonic() - self._saved >= seconds)
        else:
            due = updates // self._every > before // self._every
        if due:
            self.save(wait=False)
        return due

    def restore(self) -> bool:
        """Go on from the newest checkpoint that is whole; returns whether there is one.

        One that was damaged, in its contents or its manifest, is left out with a warning. Nothing in it is executed.

        Raises:
            RuntimeError: on every rank, when a checkpoint has other parts or another model than this object, was made
                for other samples, or is not the same on every rank; or when the save before failed.
        """
        self._hear()
        damaged: list[str] = []
        read: StoredState | None = None
        for name in self._on_rank_0(lambda: "/".join(entry.path.name for entry in self._folder.entries())).split("/"):
            read = self._read_alike(self._folder.path / name) if name else None
            if read is not None:
                break
            damaged += [name] * bool(name)
        if damaged and self._backend.world.rank == 0:
            rest = f"goes on from {read.path.name}" if read else "begins anew, because there is no other"
            warnings.warn(
                f"a checkpoint must be as it was published, but in {self._folder.path} {' and '.join(damaged)} cannot "
                f"be read as such; the training {rest}",
                RuntimeWarning,
                stacklevel=2,
            )
        if read is None:
            return False
        found = read
        self._everywhere(lambda: self._load(found))
        self._note()
        return True

    def close(self) -> None:
        """Wait for the save that is being written, if any, and let others write in the folder.

        Raises:
            RuntimeError: on every rank, when that save failed. Where an exception is on its way through here, as in a
                `with` block or `finally`, perhaps on this rank alone, no other one is waited for, and it is a warning.
        """
        self._close(alone=sys.exc_info()[0] is not None)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(alone=kind is not None)

    def _close(self, alone: bool) -> None:
        try:
            if alone:
                self._finish_alone()
            else:
                self._hear()
        finally:
            if self._background.idle:  # else this was interrupted, and the folder has its writer to the end
                self._folder.unlock()

    def _leave(self) -> NoReturn:
        try:
            self._hear()
        except RuntimeError as error:  # of the save before; this one may still succeed
            warnings.warn(str(error), RuntimeWarning, stacklevel=3)
        path = self.save()

        def tell() -> str:
            print(f"stops: {path.name} was whole {longest}", flush=True)
            return ""

        notices = [said.decode() for said in self._everywhere(lambda: notice().encode())]
        longest = max(notices, key=lambda text: float(text.partition(" ")[0] or 0))
        self._on_rank_0(tell)
        raise SystemExit(EXIT_CODE)

    # On rank 0. --------------------------------------------------------------------------------------------------

    def _lock(self) -> str:
        try:
            self._folder.lock()
        except OSError as error:
            if error.errno is None:  # not the system's, but that there is another writer
                raise
            raise OSError(
                f"dir must be a folder that can be written, but {self._folder.path} is not ({error.strerror}); choose "
                f"another one"
            ) from error
        return ""

    def _publish(self, parts: dict[str, Any], rng: list[str], wait: bool) -> Path:
        folder, updates = self._folder, self._optimizer.updates
        if later := folder.newest_after(updates):
            raise ValueError(
                f"the checkpoints of a folder must be those of one training, but {later} is there and this training "
                f"has passed {updates} updates; restore() it before going on, or choose another folder"
            )
        position, path = parts["optimizer"]["vbs"], folder.next_path(updates)
        facts = {key: position[key] for key in (*_POSITION, *_FINGERPRINT)}
        facts |= {"updates": updates, "parts": sorted(parts)}
        on_host = self._snapshot.view(parts) if wait else self._snapshot.copy(parts)
        write = partial(stored_state.write, folder, self._keep, path, facts, on_host, rng)
        if wait:
            write()
        else:
            self._background.begin(write)
        return path

    # On every rank. ----------------------------------------------------------------------------------------------

    def _note(self) -> None:
        """That the state is now the same here and in the folder."""
        self._seen, self._saved = self._optimizer.updates, time.monotonic()

    def _finish(self) -> bytes:
        """Wait for the write that is pending here; raises what it failed with."""
        self._unheard = False
        self._background.finish()
        return b""

    def _finish_alone(self) -> None:
        """The same where other ranks may not come, and another exception is to be heard."""
        try:
            self._finish()
        except Exception as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=3)

    def _hear(self) -> None:
        """Wait for the write that is pending on rank 0; raises what it failed with on every rank."""
        if self._unheard:
            self._everywhere(self._finish)

    def _read_alike(self, path: Path) -> StoredState | None:
        """The checkpoint, if it is whole, which it is everywhere or nowhere."""
        read: list[StoredState | None] = []

        def look() -> bytes:
            read.append(stored_state.read(path))
            return read[0].sha256.encode() if read[0] else b""

        answers = self._everywhere(look)
        for rank, answer in enumerate(answers):
            if answer != answers[0]:
                raise RuntimeError(
                    f"all ranks must restore the same checkpoint, but {path} on rank {rank} is another one than on "
                    f"rank 0, or is whole on one of them only; pass a folder that all ranks share"
                )
        return read[0]

    def _load(self, read: StoredState) -> bytes:
        saved, own = set(read.parts), set(self._parts)
        if saved != own:
            missing = [f"{name} is not in it" for name in sorted(own - saved)]
            unknown = [f"{name} is in it and was not passed" for name in sorted(saved - own)]
            raise ValueError(
                f"a checkpoint must have the parts that are restored, but of {read.path} "
                f"{' and '.join(missing + unknown)}; pass what was saved, by the same names"
            )
        self._check_model(read)
        for name, part in self._parts.items():  # the optimizer comes first: it refuses before it changes anything
            part.load_state_dict(read.parts[name])
        world = self._backend.world
        if len(read.rng) == world.size:
            rng_states.go_on(read.rng[world.rank])
        self._backend.mark_step()
        return b""

    def _check_model(self, read: StoredState) -> None:
        saved, own = (_shapes(state) for state in (read.parts["model"], self._model.state_dict()))
        for name in {**own, **saved}:
            if saved.get(name) != own.get(name):
                raise ValueError(
                    f"a checkpoint must be of the model that is restored, but {name} is {saved.get(name, 'missing')} "
                    f"in {read.path} and {own.get(name, 'missing')} here; make the model that was saved"
                )

    def _any(self, met: Callable[[], bool]) -> bool:
        """Whether it is so on any rank."""
        return any(self._everywhere(lambda: b"yes" * met()))

    def _on_rank_0(self, work: Callable[[], str]) -> str:
        """What rank 0 gets from `work`, on every rank."""
        rank = self._backend.world.rank
        return self._everywhere(lambda: b"" if rank else work().encode())[0].decode()

    def _everywhere(self, work: Callable[[], bytes]) -> list[bytes]:
        """What each rank gets from `work`; where it fails on one, the same error on all."""
        failure = None
        try:
            said = b"+" + work()
        except Exception as error:
            failure, said = error, b"-" + str(error).encode()
        answers = self._backend.exchange(said)
        for answer in answers:
            if not answer.startswith(b"+"):
                raise RuntimeError(answer[1:].decode()) from failure
        return [answer[1:] for answer in answers]


def _checked_every(every: int | timedelta | None) -> int | timedelta | None:
    if every is None or (isinstance(every, timedelta) and every > timedelta(0)):
        return every
    if isinstance(every, timedelta):
        raise value_error("every must be a positive timedelta", repr(every), "pass a positive one, or leave it out")
    return check_int(every, "every", 1, remedy="pass such an int, or a datetime.timedelta")


def _shapes(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
