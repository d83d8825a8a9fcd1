"""JSON with its own checksum: a file that is not as it was written is found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

_SEAL: Final = ', "seal": "'


def sealed(facts: Mapping[str, Any]) -> str:
    """Return a JSON object, which must not be empty, whose last entry is the SHA-256 of the object without it."""
    text = json.dumps(facts, allow_nan=False)
    return f'{text[:-1]}{_SEAL}{hashlib.sha256(text.encode()).hexdigest()}"}}\n'


def unsealed(text: str) -> dict[str, Any]:
    """Return the contents of a text that `sealed` returned, with the seal.

    Raises:
        ValueError: if it is not intact.
    """
    body, _, seal = text.rpartition(_SEAL)
    if seal != hashlib.sha256(f"{body}}}".encode()).hexdigest() + '"}\n':
        raise ValueError("its checksum is another one")
    facts: dict[str, Any] = json.loads(text)
    return facts
