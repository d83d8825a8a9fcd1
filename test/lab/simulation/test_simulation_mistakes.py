"""What is said of simulations, sweeps and conversions with wrong arguments, and of curves of the noise."""

from functools import partial
from pathlib import Path

import pytest

from helpers.mistakes import Mistake, check
from variable_batch_size.adaptive import ConstantBatch, PerDevice, Throughput
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.simulation import NoiseCurve, Overheads, plot_runs, simulate, sweep, to_batch_trace
from variable_batch_size.trace.runs import TraceEndError

SECOND = Throughput.simple(samples_per_second=64)
CAPACITY = CapacityTrace([0, 60, 90], [4, 2, 4], 180)
COSTS = {"throughput": SECOND, "ref_batchsize": 256}
POLICIES, TRACES = {"z": PerDevice(64), "a": ConstantBatch(200)}, {"t": CAPACITY, "large": CapacityTrace([0], [9], 60)}
run = partial(simulate, CAPACITY, PerDevice(64), devices_per_node=2, **COSTS)
several = partial(sweep, TRACES, POLICIES, **COSTS)


def from_csv(text):
    Path("scalars.csv").write_text(text)
    return NoiseCurve.from_csv("scalars.csv")


def convert(end):
    return to_batch_trace(CapacityTrace([0], [1], end), PerDevice(1), Throughput.simple(1000))


HEAD = "vbs/progress,vbs/sigma2,vbs/mu2"
ENDED = "^an update must end within the capacity trace, got none in CapacityTrace"
PRICE = r"^each price must be finite and >= 0, got \["
MISTAKES = [
    Mistake(lambda: simulate(4, PerDevice(64), **COSTS), TypeError, r"^capacity must be a CapacityTrace, got 4 \(int"),
    Mistake(lambda: run(throughput=None), TypeError, "^throughput must be a Throughput, got None"),
    Mistake(lambda: run(noise=1.0), TypeError, "^noise must be a NoiseCurve, got 1.0 "),
    Mistake(lambda: run(overheads=60), TypeError, "^overheads must be an Overheads, got 60 "),
    Mistake(lambda: simulate(CAPACITY, PerDevice, **COSTS), TypeError, "^controller must be a controller or a batch t"),
    Mistake(lambda: simulate(CAPACITY, "0:64", every=5, **COSTS), ValueError, "^every must be left out with a trace, "),
    Mistake(lambda: simulate(CAPACITY, 64, delay=1, **COSTS), ValueError, "^delay must be left out with a trace"),
    Mistake(lambda: simulate(CAPACITY, lambda _: 0, **COSTS), ValueError, "^the batch size of the controller must be "),
    Mistake(lambda: run(bounds=(9, 8)), ValueError, "^the upper one of bounds must be an integer >= 9, got 8"),
    Mistake(lambda: run(bounds=8), TypeError, r"^bounds must be two integers, got 8 \(int\); pass \(least, largest\)"),
    Mistake(lambda: run(bounds=(1, 8), start=9), ValueError, "^start must be an integer >= 1 and <= 8, got 9"),
    Mistake(lambda: run(every=0), ValueError, "^every must be an integer >= 1"),
    Mistake(lambda: run(rule="adascale"), ValueError, r"^AdaScaleRule\(\) needs the gradient noise, got noise=None; p"),
    Mistake(lambda: run(ref_batchsize=None), ValueError, r"^LinearRule\(\) needs ref_batchsize"),
    Mistake(lambda: run(rule="none"), ValueError, "^rule must be one of constant, "),
    Mistake(lambda: run(by="epochs"), ValueError, '^by must be "progress", "samples", "updates" or "seconds"'),
    Mistake(lambda: run(until=0), ValueError, "^until must be > 0"),
    Mistake(lambda: run(dataset_size=100), ValueError, "^a batch must have at most the 100 samples .*, got 512 on 8"),
    Mistake(lambda: simulate(CAPACITY, 128, dataset_size=9, **COSTS), ValueError, "^every batch size of the trace mus"),
    Mistake(lambda: run(prices="3"), TypeError, r"^prices must be a number, or \(seconds, prices\), got '3' \(str\)"),
    Mistake(lambda: run(prices=([1, 0], [1, 1])), ValueError, "^the seconds of prices must be finite and ascend"),
    Mistake(
        lambda: run(prices=([0, 2e9], [1, 1])), ValueError, "^the seconds .* since the beginning .* Unix time, 2000"
    ),
    Mistake(lambda: run(prices=([0, 9], [1, -1])), ValueError, PRICE + r"1, -1\]"),
    Mistake(lambda: run(prices=([0, 1], [1])), ValueError, r"^prices must have the shape \(2,\) of seconds, got \(1,"),
    Mistake(lambda: run(overheads=Overheads(restart=lambda *_: -1)), ValueError, "^the seconds of a restart must be a"),
    Mistake(lambda: run(until=0.5, by="seconds", overheads=Overheads(restart=20)).trace, ValueError, ENDED),
    Mistake(lambda: simulate(CAPACITY, [64] * 3, **COSTS), TraceEndError, '^step must be < 3, .* or on_end="stop", "h'),
    Mistake(lambda: Overheads(save_every=0), ValueError, "^save_every must be > 0, got 0; pass seconds, or None for n"),
    Mistake(lambda: Overheads(restart="1"), TypeError, "^restart must be a finite number >= 0"),
    Mistake(lambda: Overheads(notice=-1), ValueError, "^notice must be a finite number >= 0"),
    Mistake(lambda: Overheads(least_nodes=0), ValueError, "^least_nodes must be an integer >= 1"),
    Mistake(lambda: Overheads(blocking=1), TypeError, "^blocking must be a bool"),
    Mistake(lambda: several(dataset_size=500), ValueError, "^z under large: a batch must have at most the 500 samples"),
    Mistake(lambda: sweep(TRACES, {"short": [64, 64]}, **COSTS), ValueError, "^short under t: step must be < 2"),
    Mistake(lambda: several(throughput=None), TypeError, "^throughput must be a Throughput"),
    Mistake(lambda: sweep({}, POLICIES, **COSTS), ValueError, r"^traces must have at least one item, got none; pass "),
    Mistake(lambda: sweep(TRACES, {}, **COSTS), ValueError, "^policies must have at least one item"),
    Mistake(lambda: sweep([CAPACITY], POLICIES, **COSTS), TypeError, r"^traces must be a mapping .*, got \[Capacity"),
    Mistake(lambda: sweep(TRACES, PerDevice(64), **COSTS), TypeError, r"^policies must be a mapping .* got PerDevice"),
    Mistake(lambda: plot_runs({}), ValueError, r"^runs must have at least one run, got none; pass \{name: run\}"),
    Mistake(lambda: convert(100_001), ValueError, r"^a batch trace must have at most 10\^8 steps, got more; check the"),
    Mistake(lambda: convert(1e10), ValueError, r"^a batch trace must have at most 10\^8 steps, got more; check the"),
    Mistake(lambda: to_batch_trace([1], PerDevice(1), SECOND), TypeError, "^capacity must be a CapacityTrace, got "),
    Mistake(lambda: to_batch_trace(CAPACITY, PerDevice(1), None), TypeError, "^throughput must be a Throughput, got "),
    Mistake(lambda: from_csv("update,loss\n1,2\n"), ValueError, "must have the columns .*, got none called vbs/mu2; l"),
    Mistake(lambda: from_csv(f"{HEAD}\n1,nan,nan\n"), ValueError, "must have a row with an estimate of the noise, got"),
    Mistake(lambda: from_csv(f"{HEAD}\n1,x,1\n"), ValueError, "must have numbers in vbs/progress, .*, got 'x'; c"),
    Mistake(lambda: NoiseCurve([0], [1.0, 2.0], [1.0]), ValueError, "equally many rows"),
    Mistake(lambda: NoiseCurve([0, 0], [1.0, 2.0], [1.0, 1.0]), ValueError, r"^progress\[1\] must be > 0.0, .*, got 0"),
    Mistake(lambda: NoiseCurve([0], [0.0], [0.0]), ValueError, r"^sigma2\[0\] or mu2\[0\] must be > 0"),
    Mistake(lambda: NoiseCurve([0], [-1.0], [0.0]), ValueError, r"^sigma2\[0\] must be a finite number >= 0, got -1.0"),
    Mistake(lambda: NoiseCurve([0], ["a"], [0.0]), TypeError, r"^sigma2\[0\] must be"),
    Mistake(lambda: NoiseCurve(0, 1, 1), TypeError, r"^progress must be a sequence of numbers, got 0 \(int\); pass a "),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(mistake)
