"""transformers' Trainer with a variable batch size: the laws of all trainers, and what is its own."""

from __future__ import annotations

from conformance import Conformance

from helpers.transformers_adapter import Transformers


class TestTransformers(Conformance):
    adapter = Transformers()
    features = frozenset({"to the last bit", "controller", "tokens", "evaluation", "ddp", "fsdp2"})
