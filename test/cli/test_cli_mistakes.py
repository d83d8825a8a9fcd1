"""What the commands say of a command line or a file that is wrong, in one line, and that they then write nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.console import error_of
from helpers.mistakes import check_shape
from helpers.pages import ROOT

LOG, README, NOISE = ROOT / "traces" / "spot_example.json", ROOT / "README.md", ROOT / "traces" / "noise_example.csv"
THROUGHPUT = ROOT / "traces" / "throughput_example.csv"
FILES = {
    "batches.csv": "step,batchsize\n0,20\n1,20\n2,20\n3,20\n",
    "others.csv": "step,batch_size\n0,64\n",
    "capacity.csv": "seconds,nodes\n0,1\n60,1\n",
    "damaged.csv": "seconds,nodes\n0,4\n9,x\n",
    "other.csv": "a,b\n",
    "file": "",
}
RATE = ("--samples-per-second", 20, "--ref-batchsize", 128)
SIMULATE = ("simulate", LOG, *RATE)
THREE = (*SIMULATE, "--policy", "constant:3")
SIXTEEN = (*RATE, "--policy", "per-device:16")
TWO = ("capacity.csv", LOG, *SIXTEEN, "--dataset-size", 100)
NODES = ("--nodes", 1, "--mean-up", 600, "--mean-down", 60, "--duration", 900)
FITTED = ("simulate", LOG, "--policy", "per-device:16", "--ref-batchsize", 128, "--throughput", THROUGHPUT)
CONVERT = ("capacity", "convert", LOG, "-o", "x.csv")
PLAN = ("--dataset-size", 50, "--microbatch", 4)
MAKE = ("trace", "make", "0:8 4:12 10:6", "--steps")
MACHINES = "--nodes, --mean-up, --mean-down and --duration must be given together, got no"
SEVERAL = "a batch must have at most the 100 samples of the dataset, got "
KIND = r"capacity trace \({}.csv:1\): .* nodes, not .* of a batch trace, got 'step,{}'; pass a log, .* vbs trace show$"
TRACE_OUT = "--trace-out is for one policy and one capacity trace, got 2 and 1; pass one of each$"
EVALUATE = ("evaluate", "own:Task", "--rule", "linear", "--trace")
MISTAKES = [
    ((*EVALUATE, 64, "--restart", 90), 2, "a cost of restarts or saves needs a trace POLICY@LOG, got none; pass one"),
    ((*EVALUATE, 64, "--noise", NOISE), 2, "--noise needs a trace POLICY@LOG, got none; pass one"),
    ((*EVALUATE, 64, "--devices", 8), 2, "--devices needs the time of an update, got none; pass --samples-per-second"),
    ((*EVALUATE, 64, "--save-every", "10m,20m"), 2, "--save-every must be one time, got 2; compare them with vbs sim"),
    ((*SIMULATE, "--policy", "linear:3"), 2, "--policy linear:3: a policy must be per-device:SAMPLES, constant:SAMPLE"),
    ((*SIMULATE, "--policy", "norm-test:1"), 2, "--policy norm-test:1 needs the .* noise, got no --noise; pass --nois"),
    ((*SIMULATE, "--policy", "per-device:0"), 2, "--policy per-device:0: samples must be an integer >= 1, got 0; pass"),
    ((*THREE, "--bounds", 9, 8), 2, "the upper one of --bounds must be an integer >= 9, got 8; "),
    ((*THREE, "--bounds", "9k", "8k"), 2, "the upper one of --bounds must be an integer >= 9000, got 8000; "),
    ((*THREE, "--rule", "adascale"), 2, "--rule adascale needs the gradient noise, got no --noise; "),
    ((*THREE, "--rule", "legw"), 2, "--rule must be one of constant, linear, root, linear-moment"),
    ((*THREE, "--max-progress", 0), 2, "--max-progress must be > 0 and finite, got 0.0; pass a"),
    ((*THREE, "--save-every", 0), 2, "--save-every must be > 0 and finite, got 0.0; pass a "),
    ((*THREE, "--on-demand", "inf"), 2, "--on-demand must be a finite number >= 0, got inf; pa"),
    ((*THREE, "--price", "inf"), 2, "--price must be a finite number >= 0, got inf; pass the pr"),
    ((*THREE, "--start", 1e9), 1, "start must be < stop, within the 172800.0 seconds of the "),
    ((*THREE, "--dataset-size", 2), 1, "a batch must have at most the 2 samples .*, got 3 on 6 devices; limit"),
    ((*THREE, "--policy", "constant:4", "--trace-out", "a.csv"), 2, TRACE_OUT),
    ((*THREE, "--save-every", "60,90", "--trace-out", "a.csv"), 2, TRACE_OUT),
    ((*THREE, "capacity.csv", "--png", "a.png"), 2, "--png is for one capacity trace, got 2; pass one LOG, or "),
    ((*THREE, README), 1, rf"capacity trace \({README}:1\): a file must begin like seconds,nodes \(csv\)"),
    ((*THREE, "--rule", "root", "--noise", NOISE), 2, "--noise is for .*, got --rule root; pass --rule adascale"),
    ((*THREE, "--json", "--trace-out", "-"), 2, "--trace-out must be a file with --json, .*, got -; pass a name"),
    ((*THREE, LOG), 2, f"LOG must be given once for each file, got {LOG} twice; remove one"),
    ((*THREE, "--seeds", 2), 2, f"{MACHINES} --nodes; pass all of the"),
    ((*THREE, "--samples-per-second", -3), 2, "--samples-per-second must be > 0 and finite, got -3."),
    ((*THREE, "--format", "sky"), 1, 'format must be "csv", "skypilot", "bamboo-events", '),
    ((*THREE, "--format", "eth"), 1, rf"capacity trace \({LOG}:1\): the header must be ,Time,GPUs"),
    ((*THREE, "--scale-time", 0), 2, "--scale-time must be > 0"),
    (("simulate", *SIXTEEN), 2, "LOG or --nodes must give a capacity trace, got neither; pass one of them"),
    (("simulate", *TWO), 1, f"per-device:16 under {LOG}: {SEVERAL}"),
    (("simulate", *TWO, "--save-every", "60,90"), 1, f"per-device:16 --save-every 60 under {LOG}: {SEVERAL}"),
    (("simulate", "damaged.csv", *SIXTEEN), 1, r"capacity trace \(damaged.csv:3\): nodes must be"),
    (("simulate", "batches.csv", *SIXTEEN), 1, KIND.format("batches", "batchsize")),
    (("simulate", *NODES, *SIXTEEN, "--max-gap", 9), 2, "--format, .* and --cores-per-node are for a LOG, got none; "),
    ((*FITTED, "--samples-per-second", 9), 2, "--throughput takes .* --samples-per-second, got both; leave"),
    ((*FITTED[:-2],), 2, "--samples-per-second or --throughput must give the time of an update, got neither; pass one"),
    (("capacity", "show", "none.csv"), 1, r"capacity trace \(none.csv\) must be a"),
    (
        ("capacity", "show", "other.csv"),
        1,
        r"capacity .*; pass time_column= \(--time-column\) and nodes_column= \(--nodes-column\) for another table, s",
    ),
    (
        ("capacity", "show", "other.csv", "--time-column", "a"),
        1,
        r".*; rename .*, or pass time_column= \(--time-column\) and nodes_column= \(--nodes-column\)$",
    ),
    (
        ("capacity", "show", LOG, "--inverted", 4),
        1,
        r".* got 6; pass the number of nodes of the cluster as .* \(--inverted\)$",
    ),
    (("capacity", "show", "batches.csv"), 1, KIND.format("batches", "batchsize")),
    (("capacity", "show", "others.csv"), 1, KIND.format("others", "batch_size")),
    (("capacity", "show", LOG, "--max-gap", 5), 1, "max_gap must be left out except for the "),
    (("capacity", "show", LOG, "--format", "aws"), 1, 'format must be "csv", "skypilot"'),
    ((*CONVERT, "--policy", "norm-test:1"), 2, "--policy must need no gradient noise, got norm-test:1; .* vbs simulat"),
    ((*CONVERT, "--policy", "constant:3"), 2, "--policy needs the time of an update, got none; "),
    ((*CONVERT, "--max-updates", 5), 2, "--policy must be given with the options of a run, got none; pass it, or"),
    ((*CONVERT, "--communication-seconds", 5), 2, "--communication-seconds needs the rate of a"),
    ((*CONVERT, "--start", 200000), 1, "start must be < stop, within the 172800.0 seconds of"),
    (("capacity", "fetch", "--out", "x.csv"), 2, "--out needs the name of a public trace, got none; pass one of"),
    (
        ("capacity", "fetch", "parcae/bert-hl", "--json", "--out", "-"),
        2,
        "--out must be a file with --json, which is st",
    ),
    (("capacity", "fetch", "aws/none"), 1, "name must be one of skypilot/"),
    (("plan", "0:9", *PLAN), 2, "--epochs, --max-updates or --max-samples must be given for a trace .*, got "),
    (("plan", "0:90", *PLAN, "--epochs", 1), 1, "every batch size .* must be at most the dataset's size of 50"),
    (("plan", "no.csv", *PLAN), 1, r"trace must be a CSV file, got 'no.csv' \(No such file or directory\); correct th"),
    (("plan", "batches.csv", *PLAN, "--on-end", "error", "--epochs", 2), 1, "the trace must last longer"),
    (("trace", "make", "5:8", "--steps", 3, "-o", "a.csv"), 1, r"schedule entry 1 \('5:8'\) must start at step 0, got"),
    ((*MAKE, 3, "-o", "a.csv"), 1, "steps must be > 10"),
    ((*MAKE, 30, "-o", "."), 1, "'.' must be a file that can be written, got Is a directory; choose another"),
    (("trace", "show", "capacity.csv"), 1, "TRACE must be .*, got .* of the format csv .*; use vbs capacity show"),
    (("trace", "show", "other.csv"), 1, r"trace header \(other.csv:1\) must have one column"),
    *(
        (
            (*command, "absent.csv", "--png", path),
            2,
            f"Invalid value for '--png': {message}; see vbs {' '.join(command)} --help",
        )
        for command in (["trace", "show"], ["capacity", "show"], ["simulate"])
        for path, message in (
            ("a.jpg", "a picture must be a file that ends in .png or .svg, got 'a.jpg'; rename it"),
            ("no/a.png", "the folder of a picture must be there, got 'no'; create it"),
        )
    ),
]
OF_OTHERS = [  # of typer, and of the operating system
    (SIMULATE, 2, "Missing option '--policy'; see vbs simulate --help"),
    ((*THREE, "--least-nodes", 0), 2, "Invalid value for '--least-nodes'"),
    (("plan", "9", "--microbatch", 4), 2, "Missing option '--dataset-size'; see vbs plan --help"),
    (("plan", "9", *PLAN, "--world", "0", "--epochs", 1), 2, "Invalid value for '--world': they must be numbers"),
    (("plan", "9", *PLAN, "--on-end", "never"), 2, "Invalid value for '--on-end'"),
    (("plan", "9", *PLAN, "--epoch", 3), 2, "No such option: --epoch"),
    ((*MAKE, 30, "-o", "file/a.csv"), 1, "file"),
    (("pln",), 2, "No such command 'pln'"),
    (("trace", "mke"), 2, r"No such command 'mke'. Did you mean 'make'\?; see vbs trace --help"),
]


@pytest.mark.parametrize(("command", "status", "message"), [*MISTAKES, *OF_OTHERS])
def test_a_mistake_is_one_line(command, status, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    found = error_of(*command)
    assert found[0] == status
    assert re.match(message, found[1]), found[1]
    if (command, status, message) in MISTAKES:
        check_shape(found[1])
    else:
        assert found[1].endswith(("--help", "; pass a path that can be used"))
    assert {path.name for path in tmp_path.iterdir()} == {*FILES}
