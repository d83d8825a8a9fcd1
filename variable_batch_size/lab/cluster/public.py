"""Public capacity traces by name: downloaded once, verified by SHA-256, and kept in a cache."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Final, final

from variable_batch_size._extras import import_extra
from variable_batch_size._validation import type_error, value_error
from variable_batch_size.lab.cluster.capacity_trace import CapacityTrace
from variable_batch_size.lab.cluster.reading import read


@final
@dataclass(frozen=True)
class PublicTrace:
    """A capacity trace that others have published.

    Attributes:
        name: name for `fetch`.
        address: where the file is, at a fixed commit.
        sha256: SHA-256 of the file, as hexadecimal digits.
        format: its format, for `read`.
        license: license under which it is published. This package contains none of the files.
        citation: publication for which it was collected or used.
    """

    name: str
    address: str
    sha256: str
    format: str
    license: str
    citation: str

    def path(self, cache: str | os.PathLike[str] | None = None) -> Path:
        """Return where the file is kept: `name`, with the suffix of the address, in the folder `cache`.

        By default, the folder is variable_batch_size/capacity in the cache of the user, on Linux in $XDG_CACHE_HOME or
        ~/.cache.

        Raises:
            ModuleNotFoundError: if `cache` is None and pooch is not installed.
        """
        if cache is None:
            cache = import_extra("pooch", "cluster").os_cache("variable_batch_size") / "capacity"
        return Path(cache).expanduser() / (self.name + PurePosixPath(self.address).suffix)

    def download(self, cache: str | os.PathLike[str] | None = None) -> Path:
        """Download the file if it is not in the folder yet, or has changed there, and return its path.

        Args:
            cache: folder in which files are kept; by default, that of `path`.

        Raises:
            ModuleNotFoundError: if pooch is not installed.
            OSError: if it cannot be downloaded; the message says where to put it.
            ValueError: if what was downloaded has another SHA-256.
        """
        pooch = import_extra("pooch", "cluster")
        target = self.path(cache)
        try:
            pooch.retrieve(self.address, f"sha256:{self.sha256}", target.name, target.parent)
        except OSError as error:  # those of requests, too
            other = " and the file there has another SHA-256" if target.is_file() else ""
            requirement = f"{self.name} must be downloaded from {self.address} to {target}"
            remedy = "download it by other means and put it there"
            raise OSError(f"{requirement}, got {_failure_reason(error)}{other}; {remedy}") from error
        except ValueError as error:
            requirement = f"{self.name} ({self.address}) must have the SHA-256 {self.sha256}"
            raise value_error(requirement, "another file", f"put the right one at {target}") from error
        return target


def fetch(name: str, *, cache: str | os.PathLike[str] | None = None) -> CapacityTrace:
    """Return a capacity trace that others have published. Its file is downloaded when it is first used.

    `PUBLIC` lists the names, with licenses and publications. `PUBLIC[name].download()` returns the path of the file,
    for other options of `read`. Rows that are out of order are sorted without a warning.

    Args:
        name: name of the trace.
        cache: folder in which files are kept. Default: see `PublicTrace.path`.

    Raises:
        TypeError: if `name` is not a string.
        ModuleNotFoundError: if pooch is not installed.
        OSError: if the file is not there and cannot be downloaded; the message says where to put it.
        ValueError: if the name is not known, or what was downloaded has another SHA-256.
    """
    requirement = f"name must be one of {', '.join(PUBLIC)}"
    if not isinstance(name, str):
        raise type_error(requirement, name, "choose one of these")
    if name not in PUBLIC:
        raise value_error(requirement, f"{name!r:.60}", "choose one of these")
    path = PUBLIC[name].download(cache)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # rows out of order: the file cannot be edited, its hash is pinned
        return read(path, PUBLIC[name].format)


def _failure_reason(error: OSError) -> str:
    """Return in a few words why a download failed, such as "HTTP status 404".

    Errors of `requests` repeat the address and nest other errors, which would make a message long.
    """
    response = getattr(error, "response", None)
    if response is None:
        return error.strerror or type(error).__name__
    response.close()  # pooch leaves it open
    return f"HTTP status {response.status_code}"


def _github_url(repository: str, commit: str, path: str) -> str:
    return f"https://raw.githubusercontent.com/{repository}/{commit}/{path}"


def _skypilot_trace(name: str, path: str, sha256: str) -> PublicTrace:
    """Return the entry for a file of SkyPilot's repository, at a fixed commit."""
    commit = "b26631383e2b5f5b48a3d700b92ed133edaf452e"
    return PublicTrace(
        name=f"skypilot/{name}",
        address=_github_url("skypilot-org/spot-traces", commit, path),
        sha256=sha256,
        format="skypilot",
        license="none stated: decide for yourself whether you may use it",
        citation="Wu et al. 2024, Can't Be Late: Optimizing Spot Instance Savings under Deadlines, NSDI",
    )


def _bamboo_trace(name: str, commit: str, path: str, sha256: str, format: str) -> PublicTrace:
    """Return the entry for a file of Bamboo's repository, at a commit."""
    return PublicTrace(
        name=f"bamboo/{name}",
        address=_github_url("uclasystem/bamboo", commit, path),
        sha256=sha256,
        format=format,
        license="MIT",
        citation="Thorpe et al. 2023, Bamboo: Making Preemptible Instances Resilient for Affordable Training of Large "
        "DNNs, NSDI",
    )


_TRACES = (
    _skypilot_trace(
        "availability-16-node-us-east-2b",
        "availability/16-node/aws-08-27-2023/us-east-2b_v100_1.json",
        "fa1f117fd25696aa36250d73f4a47954a281c04243cadbe47074b9ae4a70659f",
    ),
    _skypilot_trace(
        "availability-16-node-us-west-2c",
        "availability/16-node/aws-08-27-2023/us-west-2c_v100_1.json",
        "0a540de491d1e1764c1e913ecef04e0475717acb328cf1a8d601948cac138c83",
    ),
    _skypilot_trace(
        "preemption-4-node-us-east-1f",
        "preemption/4-node/aws-08-03-2023/us-east-1f_v100_1.json",
        "bfd67f8b3bfb267f3145e22ff1c52a036e0151ad2c3826f08d7668c54fd60dbe",
    ),
    _bamboo_trace(
        "aws-g4dn-us-east-1c",
        "ef0fbc79f8afbe0e03cedb539c833d016b2111fa",
        "doc/data/aws-spot-instances-g4dn-xlarge-us-east-1c-2020-11-20-1930-to-2020-11-21-2200.csv",
        "ae2d777db0631989c6f0e8014219f563bb59e1be13aa6b61e46c3aa7f6c29420",
        "bamboo-counts",
    ),
    _bamboo_trace(
        "gcloud-v100-us-east1-c",
        "eb21347c6d7b9bf1dda521c408140e0914d4907e",
        "traces/gcloud/v100x1-east1c.txt",
        "3d8f0c0c8c088b38883913579e47c9d2823c0c739ba27dc81c7ab4c7ae783d35",
        "gcloud",
    ),
    PublicTrace(
        name="parcae/bert-hl",
        address=_github_url(
            "JF-D/Parcae", "7cb3059bd3c6034dac69d30b062e67e2578622e3", "aws/traces/bert/trace_hl_15_25.txt"
        ),
        sha256="a843a8fcc454c6f62fbbe5eee99c9688534a3f619446fbc9c4bfd66dd04fb308",
        format="parcae",
        license="MIT",
        citation="Duan et al. 2024, Parcae: Proactive, Liveput-Optimized DNN Training on Preemptible Instances, NSDI",
    ),
)

PUBLIC: Final[Mapping[str, PublicTrace]] = MappingProxyType({trace.name: trace for trace in _TRACES})
"""The public traces by name, read-only."""
