"""What `vbs simulate` says of a command line or a file that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.console import error_of
from helpers.pages import ROOT
from variable_batch_size import cluster

LOG = ROOT / "traces" / "spot_example.json"
RATE = ("--samples-per-second", 20, "--ref-batchsize", 128)
POLICY = ("--policy", "per-device:16")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--policy", "linear:3"], 2, "--policy linear:3: a policy must be per-device:SAMPLES, constant:SAMPLES, "),
        (["--policy", "norm-test:1"], 2, "--policy norm-test:1 needs the gradient noise, got no --noise; pass --noise"),
        (["--policy", "constant:3", "--bounds", 9, 8], 2, "the upper one of --bounds must be an integer >= 9, got 8; "),
        (["--policy", "constant:3", "--rule", "adascale"], 2, "--rule adascale needs the gradient noise, got no --noi"),
        (
            ["--policy", "constant:3", "--rule", "legw"],
            2,
            "--rule must be one of constant, linear, root, linear-moment",
        ),
        (["--policy", "constant:3", "--max-progress", 0], 2, "--max-progress must be > 0 and finite, got 0.0; pass a"),
        (["--policy", "constant:3", "--save-every", 0], 2, "--save-every must be > 0 and finite, got 0.0; pass a "),
        (["--policy", "constant:3", "--on-demand", "inf"], 2, "--on-demand must be a finite number >= 0, got inf; pa"),
        (["--policy", "constant:3", "--price", "inf"], 2, "--price must be a finite number >= 0, got inf; pass the pr"),
        (["--policy", "constant:3", "--start", 1e9], 2, "--start must be < stop, within the 172800.0 seconds of the "),
        (
            ["--policy", "constant:3", "--dataset-size", 2],
            1,
            "a batch must have at most the 2 samples of the dataset, got 3 on 6 devices; limit it with --bounds, or us",
        ),
        (
            ["--policy", "constant:3", "--policy", "constant:4", "--trace-out", "a.csv"],
            2,
            "--trace-out is for one policy and one capacity trace, got 2 and 1; pass one of each",
        ),
        (
            [ROOT / "README.md", "--policy", "constant:3"],
            1,
            f"capacity trace ({ROOT}/README.md:1): a file must begin like seconds,nodes (csv)",
        ),
        (
            ["--policy", "constant:3", "--rule", "root", "--noise", ROOT / "traces" / "noise_example.csv"],
            2,
            "--noise is for a rule that reads the noise, got --rule root; pass --rule adascale",
        ),
        (
            ["--policy", "constant:3", "--json", "--trace-out", "-"],
            2,
            "--trace-out must be a file with --json, which is standard output, got -; pass a name",
        ),
        ([LOG, "--policy", "constant:3"], 2, f"LOG must be given once for each file, got {LOG} twice; remove one"),
        (
            ["--policy", "constant:3", "--seeds", 2],
            2,
            "--nodes, --mean-up, --mean-down and --duration must be given together, got no --nodes; pass all of the",
        ),
        (
            ["--policy", "constant:3", "--nodes", 2, "--mean-up", 60, "--duration", 60],
            2,
            "--nodes, --mean-up, --mean-down and --duration must be given together, got no --mean-down; pass all",
        ),
        (["--policy", "per-device:0"], 2, "--policy per-device:0: samples must be an integer >= 1, got 0; pass an int"),
        (
            ["--policy", "constant:3", "--samples-per-second", -3],
            2,
            "--samples-per-second must be > 0 and finite, got -3.",
        ),
        (["--policy", "constant:3", "--format", "sky"], 2, '--format must be "csv", "skypilot", "bamboo-events", '),
        (["--policy", "constant:3", "--format", "eth"], 1, f"capacity trace ({LOG}:1): the header must be ,Time,GPUs"),
        (["--policy", "constant:3", "--scale-time", 0], 2, "--scale-time must be > 0"),
        (["--policy", "constant:3", "--least-nodes", 0], 2, "Invalid value for '--least-nodes'"),
        ([], 2, "Missing option '--policy'"),
    ],
)
def test_errors_are_one_line(arguments: list[Any], status: int, message: str) -> None:
    found = error_of("simulate", LOG, *RATE, *arguments)
    assert found[0] == status
    assert found[1].startswith(message), found[1]


def test_a_capacity_trace_is_needed() -> None:
    message = "LOG or --nodes must give a capacity trace, got neither; pass one of them"
    assert error_of("simulate", *RATE, *POLICY) == (2, message)


def test_an_error_under_one_of_several_traces_names_it(tmp_path: Path) -> None:
    small = tmp_path / "small.csv"
    cluster.CapacityTrace([0], [1], 60).to_csv(small)
    message = f"per-device:16 under {LOG}: a batch must have at most the 100 samples of the dataset, got "
    found = error_of("simulate", small, LOG, *RATE, *POLICY, "--dataset-size", 100)
    assert found[1].startswith(message)
    found = error_of("simulate", small, LOG, *RATE, *POLICY, "--dataset-size", 100, "--save-every", "60,90")
    assert found[1].startswith(f"per-device:16 --save-every 60 under {LOG}: a batch must have at most the 100 samples")
    small.write_text("seconds,nodes\n0,4\n9,x\n")  # what a file has to hold is no option
    assert " (" + str(small) + ":3): nodes must be" in error_of("simulate", small, *RATE, *POLICY)[1]
