"""The table of readers: name -> reader, one line a format.

`cluster.read`, its documentation and messages, and the contract suite read it. No two readers recognize the same file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from variable_batch_size.cluster.readers.bamboo_counts import BambooCountsReader
from variable_batch_size.cluster.readers.bamboo_events import BambooEventsReader
from variable_batch_size.cluster.readers.base import Reader
from variable_batch_size.cluster.readers.eth import EthReader
from variable_batch_size.cluster.readers.gcloud import GcloudReader
from variable_batch_size.cluster.readers.own import OwnReader
from variable_batch_size.cluster.readers.parcae import ParcaeReader
from variable_batch_size.cluster.readers.skypilot import SkyPilotReader

READERS: Final[Mapping[str, Reader]] = {
    "csv": OwnReader(),
    "skypilot": SkyPilotReader(),
    "bamboo-events": BambooEventsReader(),
    "bamboo-counts": BambooCountsReader(),
    "gcloud": GcloudReader(),
    "parcae": ParcaeReader(),
    "eth": EthReader(),
}
