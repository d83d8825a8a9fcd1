"""Saves what belongs together, and goes on from there on any world.

The life of a `save` here: every rank collects its state, which also makes lazy devices compute what is due, and says
so; rank 0 copies its own to the host, writes and publishes it while the others wait; then all hear how it went.
"""

from __future__ import annotations

import io
import os
import random
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import NoneType, TracebackType
from typing import IO, Any, NamedTuple, NoReturn, Protocol, final, runtime_checkable
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from variable_batch_size.backend import Backend
from variable_batch_size.checkpoint_folder import STATE, CheckpointFolder, whole
from variable_batch_size.optimizer import CustomOptimizer
from variable_batch_size.preemption import EXIT_CODE, current, notice
from variable_batch_size.stop import CommonStop
from variable_batch_size.validate import refusal
from variable_batch_size.validate import whole as whole_number

_POSITION = ("epoch", "step", "samples")
_FINGERPRINT = ("trace", "dataset_size", "seed", "shuffle", "drop_last")
_PLAIN = (NoneType, bool, int, float, str, bytes, torch.dtype, torch.Size)  # what loads without executing anything


@runtime_checkable
class Stateful(Protocol):
    """What can be a part of a checkpoint."""

    def state_dict(self) -> Any:
        """Tensors and plain values."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Go on from these."""


@final
class _Read(NamedTuple):
    path: Path
    sha256: str
    parts: dict[str, Any]
    rng: list[dict[str, Any]]  # by rank


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
        every: how often `step()` saves: each time that the training has passed another multiple of so many updates,
            or so much time on rank 0's clock, whose decision the ranks hear by one small message an update.
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
        self._keep = whole_number(keep, "keep", 1)
        self._every = _checked_every(every)
        self._folder = CheckpointFolder(Path(dir))
        name = self._on_rank_0(self._lock)
        taken = any(self._everywhere(lambda: b"taken" * (current() is not None)))  # on any rank: all have to agree
        self._stop = CommonStop(self._backend.store(), name, self._backend.world) if taken else None
        self._seen, self._saved = optimizer.updates, time.monotonic()

    @property
    def latest(self) -> Path | None:
        """The newest whole checkpoint in the folder, as this rank reads it."""
        return next((entry.path for entry in self._folder.entries() if whole(entry.path) is not None), None)

    def save(self) -> Path:
        """Publish the state after the last update, with every rank waiting for it; returns where it is.

        Raises:
            RuntimeError: on every rank, in the middle of an accumulation, or when the state cannot be saved or the
                folder written; earlier checkpoints are as they were.
        """
        parts: dict[str, Any] = {}

        def collect() -> bytes:
            parts.update((name, part.state_dict()) for name, part in self._parts.items())
            self._backend.mark_step()  # what is pending is computed by all ranks, and not by rank 0 alone
            return _packed(_random_states())

        rng = [_unpacked(states) for states in self._everywhere(collect)]
        published = Path(self._on_rank_0(lambda: str(self._publish(parts, rng))))
        self._note()
        return published

    def step(self) -> bool:
        """Save if that is due; call it after `optimizer.step()`. Without a new update it does nothing.

        Returns:
            Whether it has saved, the same on every rank.

        Raises:
            SystemExit: with code 143 on every rank, when it has saved because a `Preemption` was asked to stop.
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
            due = self._on_rank_0(lambda: "due" * (time.monotonic() - self._saved >= seconds)) != ""
        else:
            due = updates // self._every > before // self._every
        if due:
            self.save()
        return due

    def restore(self) -> bool:
        """Go on from the newest checkpoint that is whole; returns whether there is one.

        One that was damaged, in its contents or its manifest, is left out with a warning. Nothing in it is executed.

        Raises:
            RuntimeError: on every rank, when a checkpoint has other parts or another model than this object, was made
                for other samples, or is not the same on every rank.
        """
        damaged: list[str] = []
        read: _Read | None = None
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
        """Let others write in the folder."""
        self._folder.unlock()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _leave(self) -> NoReturn:
        path = self.save()
        notices = [said.decode() for said in self._everywhere(lambda: notice().encode())]
        longest = max(notices, key=lambda text: float(text.partition(" ")[0] or 0))
        self._on_rank_0(lambda: print(f"stops: {path.name} was whole {longest}", flush=True) or "")
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
        return uuid4().hex

    def _publish(self, parts: dict[str, Any], rng: list[dict[str, Any]]) -> Path:
        folder, updates = self._folder, self._optimizer.updates
        if later := folder.newest_after(updates):
            raise ValueError(
                f"the checkpoints of a folder must be those of one training, but {later} is there and this training "
                f"has passed {updates} updates; restore() it before going on, or choose another folder"
            )
        state = {"parts": {name: _on_host(part, name, self._backend) for name, part in parts.items()}, "rng": rng}
        position = parts["optimizer"]["vbs"]
        facts = {key: position[key] for key in (*_POSITION, *_FINGERPRINT)}

        def write(file: IO[bytes]) -> None:
            torch.save(state, file)

        try:
            published = folder.publish(updates, {"updates": updates, "parts": sorted(parts), **facts}, write)
        except OSError as error:
            raise OSError(
                f"a checkpoint must be written whole, but the one of update {updates} could not be, in {folder.path} "
                f"({error.strerror}); make room or choose another folder (earlier checkpoints are as they were)"
            ) from error
        folder.prune(self._keep)
        return published

    # On every rank. ----------------------------------------------------------------------------------------------

    def _note(self) -> None:
        """That the state is now the same here and in the folder."""
        self._seen, self._saved = self._optimizer.updates, time.monotonic()

    def _read_alike(self, path: Path) -> _Read | None:
        """The checkpoint, if it is whole, which it is everywhere or nowhere."""
        read: list[_Read | None] = []

        def look() -> bytes:
            read.append(_read(path))
            return read[0].sha256.encode() if read[0] else b""

        answers = self._everywhere(look)
        for rank, answer in enumerate(answers):
            if answer != answers[0]:
                raise RuntimeError(
                    f"all ranks must restore the same checkpoint, but {path} on rank {rank} is another one than on "
                    f"rank 0, or is whole on one of them only; pass a folder that all ranks share"
                )
        return read[0]

    def _load(self, read: _Read) -> bytes:
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
            _set_random_states(read.rng[world.rank])
        self._backend.mark_step()
        return b""

    def _check_model(self, read: _Read) -> None:
        saved, own = (_shapes(state) for state in (read.parts["model"], self._model.state_dict()))
        for name in {**own, **saved}:
            if saved.get(name) != own.get(name):
                raise ValueError(
                    f"a checkpoint must be of the model that is restored, but {name} is {saved.get(name, 'missing')} "
                    f"in {read.path} and {own.get(name, 'missing')} here; make the model that was saved"
                )

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
        raise refusal("every must be longer than no time at all", repr(every), "pass a positive one, or leave it out")
    return whole_number(every, "every", 1, remedy="pass such an int, or a datetime.timedelta")


def _on_host(tree: Any, where: str, backend: Backend) -> Any:
    """The same with its tensors in host memory; refuses what could not be read again."""
    if isinstance(tree, Tensor):
        return backend.host(tree)
    if type(tree) in (dict, OrderedDict, Counter):
        for key in tree:
            _on_host(key, f"a key of {where}", backend)
        copy = type(tree)({key: _on_host(value, f"{where}[{key!r}]", backend) for key, value in tree.items()})
        if isinstance(tree, OrderedDict):
            copy.__dict__.update(vars(tree))  # the versions of a model's modules
        return copy
    if type(tree) in (list, tuple):
        return type(tree)(_on_host(value, f"{where}[{index}]", backend) for index, value in enumerate(tree))
    if type(tree) in _PLAIN:
        return tree
    raise TypeError(
        f"a checkpoint must hold nothing but tensors and plain values, but {where} is a "
        f"{type(tree).__module__}.{type(tree).__qualname__}; let that part's state_dict() give numbers, strings, lists"
    )


def _read(path: Path) -> _Read | None:
    """A checkpoint that is whole."""
    facts = whole(path)
    if facts is None:
        return None
    try:
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
        return _Read(path, facts["file"]["sha256"], dict(state["parts"]), list(state["rng"]))
    except MemoryError:
        raise
    except Exception:  # whatever it is made of, somebody else has made it
        return None


def _shapes(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}


def _random_states() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "python": random.getstate(),
    }


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    random.setstate(states["python"])


def _packed(states: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(states, file)
    return file.getvalue()


def _unpacked(states: bytes) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(io.BytesIO(states), weights_only=True)
    return loaded
