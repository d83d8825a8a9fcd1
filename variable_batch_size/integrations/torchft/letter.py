"""The letter that goes ahead of each sum: the model and the settings of every replica group, and a text of the first.

Its bytes are summed, and each group writes its own ones:

    random number | length of the text | the text | whether it votes, chain and facts of group 0 | of group 1 | ...
"""

from __future__ import annotations

import hashlib
import secrets
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from variable_batch_size._validation import value_error
from variable_batch_size.world import World

START = bytes(8)  # the chain of a model that has taken no sum
_NONCE, _LENGTH, _TEXT = 8, 2, 4096
_CHAIN, _FACT, _FACTS = len(START), 2, 128  # the last one is the number of facts that are told apart
_HEAD, _OWN = _NONCE + _LENGTH + _TEXT, 1 + _CHAIN + _FACT * _FACTS


def write(groups: World, text: str, chain: bytes, facts: Mapping[str, Any], *, votes: bool) -> bytearray:
    """Return the letter with what this group has to write, and zeros elsewhere.

    Args:
        text: at most 4096 bytes, of which those of the first group arrive.
        chain: a hash of all sums that the model of this group has taken.
        facts: what all groups must have in common.
        votes: whether this group has not just come.
    """
    message = text.encode()
    if len(message) > _TEXT:
        raise value_error(f"the answer of a controller must have at most {_TEXT} bytes", len(message), "shorten it")
    written = bytearray(_HEAD + groups.size * _OWN)
    if groups.rank == 0:
        head = secrets.token_bytes(_NONCE) + len(message).to_bytes(_LENGTH, "big") + message
        written[: len(head)] = head
    own = bytes([votes]) + chain
    for name in _names(facts):
        own += zlib.crc32(f"{name}: {facts[name]}".encode()).to_bytes(4, "big")[:_FACT]
    begin = _HEAD + groups.rank * _OWN
    written[begin : begin + len(own)] = own
    return written


def text_of(letter: bytes) -> str:
    """Return the text of the first group."""
    begin = _NONCE + _LENGTH
    length = int.from_bytes(letter[_NONCE:begin], "big")
    return letter[begin : begin + length].decode()


def next_chain(chain: bytes, letter: bytes) -> bytes:
    """Return the hash of all sums when the one of this letter was taken, too."""
    return hashlib.sha256(chain + letter).digest()[:_CHAIN]


def differences(letter: bytes, rank: int, facts: Mapping[str, Any]) -> tuple[list[str], bool] | None:
    """Return the facts in which this group differs from most, and whether its model does; None: all groups agree.

    Those that vote are asked, if there are any: the ones that come do not outvote the ones that train.
    """
    rows = [letter[at : at + _OWN] for at in range(_HEAD, len(letter), _OWN)]
    if len({row[1:] for row in rows}) == 1:
        return None
    facts_at, voters = 1 + _CHAIN, [row for row in rows if row[0]] or rows
    own, most = rows[rank][facts_at:], _most([row[facts_at:] for row in voters])
    parts = [slice(at, at + _FACT) for at in range(0, len(own), _FACT)]
    found = [name for name, part in zip(_names(facts), parts, strict=False) if own[part] != most[part]]
    if own != most and not found:
        found = ["the names of its settings"]
    return found, rows[rank][1:facts_at] != _most([row[1:facts_at] for row in voters])


def _names(facts: Mapping[str, Any]) -> list[str]:
    return sorted(facts)[:_FACTS]


def _most(rows: Sequence[bytes]) -> bytes:
    """Return the most frequent one, of equally frequent ones the first."""
    return max(rows, key=lambda row: (rows.count(row), -rows.index(row)))
