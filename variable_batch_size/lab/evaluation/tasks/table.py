"""The tasks that come with the package, by name; a new one is a line here. Nothing is imported but the one in use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_ROOM = "variable_batch_size.lab.evaluation.tasks"

TASKS: Final[Mapping[str, str]] = {
    "mnist-cnn": f"{_ROOM}.mnist_cnn:MnistCnn",
    "fashion-cnn": f"{_ROOM}.fashion_cnn:FashionCnn",
    "char-gpt": f"{_ROOM}.char_gpt:CharGpt",
    "cifar10-resnet": f"{_ROOM}.cifar10_resnet:Cifar10ResNet",
}
