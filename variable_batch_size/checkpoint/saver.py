"""The course of a save, on every rank.

Every rank collects its state dicts, which also makes lazy devices compute pending tensors, waits for its previous
write, and finds the tensors that any rank could write. The ranks exchange what they have found; then each brings what
it writes to the host while the others wait, and rank 0 creates the place. They write before the call returns on any
rank or, without `wait`, in a thread that uses only a copy. An error of that thread is raised on every rank, by the next
method that uses the folder.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, final

from variable_batch_size.backend import Backend
from variable_batch_size.checkpoint import rng_states
from variable_batch_size.checkpoint.agreement import Agreement
from variable_batch_size.checkpoint.folder import CheckpointFolder
from variable_batch_size.checkpoint.parts import Parts
from variable_batch_size.checkpoint.publication import Publisher, Save
from variable_batch_size.checkpoint.shards import Replicas
from variable_batch_size.checkpoint.snapshot import Snapshot
from variable_batch_size.checkpoint.writer import Writer


@final
class Saver:
    """Saves the state of a training, together with the other ranks.

    Args:
        backend: brings tensors to the host.
        agreement: exchanges the messages of the ranks, and runs writes in a thread.
        parts: what to save.
        folder: where to save it.
        writer: what rank 0 does in the folder.
        publisher: writes files.
        sharded: whether all ranks may write.
    """

    def __init__(
        self,
        backend: Backend,
        agreement: Agreement,
        parts: Parts,
        folder: CheckpointFolder,
        writer: Writer,
        publisher: Publisher,
        sharded: bool,
    ) -> None:
        self._backend, self._agreement, self._parts = backend, agreement, parts
        self._folder, self._writer, self._publisher, self._sharded = folder, writer, publisher, sharded
        self._snapshot, self._number = Snapshot(backend), 0

    def save(self, updates: int, wait: bool, *, in_loop: bool, reported: dict[str, Any]) -> Path:
        """Save the state, and return the path at which it is, or is going to be, published.

        Args:
            updates: number of updates of the training.
            wait: whether to return only after it is published.
            in_loop: whether what the loop does at the end of an epoch is to come.
            reported: what the manifest holds of reported values.

        Raises:
            RuntimeError: on every rank, if the state cannot be saved on one of them.
        """
        rank, parts, found = self._backend.world.rank, dict[str, Any](), list[Replicas]()

        def collect() -> bytes:
            parts.update(self._parts.state_dicts(in_loop=in_loop))
            self._backend.mark_step()  # all ranks compute what is pending, so that rank 0 does not do it alone
            # After state_dict(), which may communicate: an error here would strand other ranks.
            self._agreement.wait_for_write()
            if self._sharded:
                found.append(Replicas.find(parts, self._parts.equal_tensors(parts)))
            summary = found[0].summary if found else ""
            return f"{summary}\n{rng_states.get_rng_states()}".encode()

        messages = [message.decode().partition("\n") for message in self._agreement.on_every_rank(collect)]
        rng, summaries = [text for _, _, text in messages], [summary for summary, _, _ in messages]
        writers = found[0].writers(summaries) if found else {}  # by place; rank 0 is not among them
        contents: dict[str, Any] = {}

        def bring() -> bytes:
            to_host = self._snapshot.view if wait else self._snapshot.copy
            if rank:
                own = {where: found[0].tensors[where] for where, writer in writers.items() if writer == rank}
                contents.update(to_host(own))
                return b""
            contents.update(parts=to_host(parts, writers), rng=rng)
            return self._writer.begin(updates).name.encode()

        path = self._folder.path / self._agreement.on_every_rank(bring)[0].decode()
        self._number += 1
        ranks, facts = sorted({0, *writers.values()}), self._writer.facts(updates, parts, reported)
        save = Save(self._number, path, ranks, contents, facts)
        write = partial(self._publisher.write, save) if rank in ranks else None
        if wait:
            self._agreement.on_every_rank(lambda: (write and write()) or b"")
        else:
            self._agreement.start_write(write)
        return path
