"""One checkpoint: what its files say, and its tensors as a stream that verifies each byte.

Each rank that writes has a `tensors-1.safetensors` and a `rank-1.json`, which says what is in it; that of rank 0 has
all else. The last entry of such a JSON is its own SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, final

from torch import Tensor

from variable_batch_size.checkpoint import tensor_file
from variable_batch_size.checkpoint.shards import Part
from variable_batch_size.checkpoint.storage import DAMAGE, Storage, seal_json, unseal_json

FORMAT: Final = "vbs-checkpoint"
VERSION: Final = 2
MANIFEST: Final = "rank-0.json"

# A key that readers may ignore, and for which they have a default, is added without another version.
KEYS: Final = {
    *("format", "version", "name", "ranks", "writer", "file", "seal"),  # of the JSON of each rank
    *("library", "torch"),  # the others are in that of rank 0: what has written it,
    *("epoch", "step", "samples", "updates", "reads_epoch", "world", "batch_size"),  # the position,
    *("trace", "dataset_size", "seed", "shuffle", "drop_last"),  # what the samples follow from,
    *("best", "metrics"),  # what was reported,
    *("state", "random", "tensors"),  # states;
    "own",  # in that of another rank: the states and tensors that it has for itself
}
_STATES: Final = ("state", "random", "tensors", "file", "seal", "name", "ranks", "writer")


@final
class VersionError(ValueError):
    """A checkpoint has a version of the format that this library does not know."""


@final
class DamagedError(ValueError):
    """A checkpoint is not intact; the message says why.

    Args:
        why: what is wrong.
        seal: see `seal_of`; "" if its small files cannot be read.
        temporary: whether the disk failed to read, so that the checkpoint may turn out to be intact later.
    """

    def __init__(self, why: str, seal: str = "", *, temporary: bool = False) -> None:
        super().__init__(why)
        self.seal, self.temporary = seal, temporary


def write_manifest(facts: Mapping[str, Any]) -> str:
    """Return the JSON file that a rank writes into a checkpoint, as text, with its own checksum at the end.

    Args:
        facts: its entries, beside the name and the version of the format.

    Raises:
        ValueError: if a key is not in `KEYS`.
    """
    facts = {**facts, "format": FORMAT, "version": VERSION}
    if unknown := facts.keys() - KEYS:
        raise ValueError(f"the keys of a checkpoint's JSON must be in KEYS, got {', '.join(sorted(unknown))}; add them")
    return seal_json(facts)


def parse_manifest(text: str) -> dict[str, Any]:
    """Return the entries of a rank's JSON file, after a check of its checksum, which is the entry "seal".

    Raises:
        VersionError: if it has another version.
        ValueError: if it is not intact.
    """
    facts = unseal_json(text)
    if facts.get("format") != FORMAT or type(facts.get("version")) is not int:
        raise ValueError(f"it is no JSON of {FORMAT}")
    if facts["version"] != VERSION:
        raise VersionError(
            f"a checkpoint must have version {VERSION} of the format {FORMAT}, got version {facts['version']}; install "
            f"the release of variable_batch_size that wrote it"
        )
    return facts


@final
class Contents(NamedTuple):
    """What a rank has read of a checkpoint.

    Attributes:
        parts: state dicts by name.
        rng: states of the hosts' random numbers, by rank.
        facts: what the JSON of rank 0 says of the training.
        seal: checksum of the JSON of all ranks.
        of_ranks: names of what differed between the ranks that saved, and of which this rank has read rank 0's.
    """

    parts: dict[str, Any]
    rng: list[str]
    facts: dict[str, Any]
    seal: str
    of_ranks: list[str]


# A checkpoint. -------------------------------------------------------------------------------------------------------


def read_texts(storage: Storage, name: str) -> list[str]:
    """Return the JSON of each rank of a checkpoint, that of rank 0 first, as text.

    Raises:
        DamagedError: if one is missing, or that of rank 0 is damaged.
        VersionError: if it has another version.
    """
    with _as_damage(storage, name, "the JSON of a rank"):
        text_of_rank_0 = storage.read(name, MANIFEST).decode()
        other_ranks = range(1, int(parse_manifest(text_of_rank_0)["ranks"]))
        return [text_of_rank_0, *(storage.read(name, f"rank-{rank}.json").decode() for rank in other_ranks)]


def read_manifests(storage: Storage, name: str, texts: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the contents of the JSON of each rank of a checkpoint, by rank.

    Args:
        storage: the folder in which the checkpoint is.
        name: its name.
        texts: what `read_texts` returned, if it was called before.

    Raises:
        DamagedError: if one is missing or damaged, or that of another checkpoint.
        VersionError: if it has another version.
    """
    texts = read_texts(storage, name) if texts is None else texts
    with _as_damage(storage, name, "the JSON of a rank"):
        ranks = [parse_manifest(text) for text in texts]
        if any((manifest["name"], manifest["ranks"]) != (name, len(ranks)) for manifest in ranks):
            raise ValueError("the JSON of a rank belongs to another checkpoint")
    if len({manifest.get("writer") for manifest in ranks}) > 1:  # the writer's id; earlier releases wrote none
        raise DamagedError("the files of its ranks are of two saves", seal_of(ranks))
    return ranks


def seal_of(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Return a checksum of a whole checkpoint: of the JSON of all ranks, which has the checksums of the tensors."""
    return hashlib.sha256("".join(manifest["seal"] for manifest in ranks).encode()).hexdigest()


def facts_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the JSON of rank 0 says of the training, without the states and the description of its files."""
    return {name: value for name, value in manifest.items() if name not in _STATES}


def name_on(rank: int, name: str) -> str:
    """Return the name in a checkpoint of a tensor that differs between ranks, so that each rank writes its own.

    >>> name_on(0, "model/running_mean"), name_on(2, "model/running_mean")
    ('model/running_mean', '/2/model/running_mean')
    """
    return f"/{rank}/{name}" if rank else name  # no other name begins with "/"


def describe_tensors(ranks: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return dtype and shape of each tensor of a checkpoint, as the JSON of its ranks says, by names in the checkpoint.

    Args:
        ranks: the JSON of each rank; rank 0's names all tensors, the others only what differs from it.
    """
    described: dict[str, dict[str, Any]] = dict(ranks[0]["tensors"])
    for rank, manifest in enumerate(ranks[1:], start=1):
        own_tensors = manifest.get("own", {}).get("tensors", {})
        described |= {name_on(rank, name): facts for name, facts in own_tensors.items()}
    return described


def stream_tensors(
    storage: Storage,
    name: str,
    ranks: Sequence[Mapping[str, Any]],
    wants: Callable[[str, Part], object] = lambda *_: True,
) -> Iterator[tuple[str, Part, Tensor]]:
    """Yield the tensors of a checkpoint, or the parts in its files, in the order of their bytes, each verified.

    Args:
        storage: the folder in which it is.
        name: its name.
        ranks: the JSON of each rank.
        wants: called with the name of a tensor and the part of it in a file: whether to read that part.

    Raises:
        DamagedError: if a file is missing or damaged.
    """
    dtypes = {key: facts["dtype"] for key, facts in describe_tensors(ranks).items()}
    for rank, manifest in enumerate(ranks):
        file = manifest["file"]
        if not file:  # this rank has written no tensors
            continue
        with _as_damage(storage, name, f"tensors-{rank}.safetensors", seal_of(ranks)):
            chunks = file["chunks"]  # where each tensor, or part of one, is in the file
            parts = {key: Part(tuple(chunk["offset"]), tuple(chunk["shape"])) for key, chunk in chunks.items()}
            wanted_keys = [key for key, part in parts.items() if wants(key, part)]
            if not wanted_keys:
                continue
            with storage.open(name, f"tensors-{rank}.safetensors") as stream:
                tensor_file.check(stream, file)
                for key in sorted(wanted_keys, key=lambda key: int(chunks[key]["begin"])):
                    yield key, parts[key], tensor_file.read(stream, chunks[key], dtypes[key])


def verify(storage: Storage, name: str) -> None:
    """Check that all bytes of a checkpoint are as they were written, by their checksums.

    Raises:
        DamagedError: if they are not.
        VersionError: if it has another version.
    """
    for _ in stream_tensors(storage, name, read_manifests(storage, name)):
        pass  # a tensor that is yielded was verified


@contextmanager
def _as_damage(storage: Storage, name: str, what: str, seal: str = "") -> Iterator[None]:
    """Turn errors within a block that mean that a file is damaged into DamagedError; raise others as they are.

    Args:
        storage: the folder in which the checkpoint is.
        name: its name.
        what: the file that is read, for the message.
        seal: see `seal_of`, if it is known.
    """
    try:
        yield
    except VersionError as error:
        raise VersionError(f"Checkpoint {storage.at(name)} cannot be read: {error}") from None
    except DAMAGE as error:
        if not storage.is_damage(error):
            raise
        if isinstance(error, FileNotFoundError):
            raise DamagedError(f"{what} is missing", seal) from None
        how = "checksum mismatch of {}" if isinstance(error, ValueError) else "{} is unreadable"
        raise DamagedError(how.format(what), seal, temporary=isinstance(error, OSError)) from None
