"""What is said of controllers, adaptive traces, policies and models of the time of an update with wrong arguments."""

import math
from pathlib import Path

import pytest

import variable_batch_size as vbs
from helpers.adaptive_training import SAMPLES
from helpers.controllers import Halving
from helpers.mistakes import Mistake, check
from variable_batch_size.adaptive import (
    ConstantBatch,
    ControlInput,
    Goodput,
    NoiseScale,
    NormTest,
    PerDevice,
    Seesaw,
    Throughput,
)
from variable_batch_size.adaptive.table import parse_policy

ANSWER = "^the batch size of the controller must be an integer >= 1"
FORMS = "per-device:SAMPLES, constant:SAMPLES, noise-scale:FACTOR, norm-test:ETA or goodput:LOW-HIGH"
TAGS = ("world_size", "global_batch_size", "num_microbatches", "updates_per_second", "samples_per_second")
ABSENT = "^scalars.csv must have the columns .*, got none called vbs/{}; pass the scal"
UNUSED = "must have a row with the seconds of updates of one batch size, got none in {} rows; train for"
FACTOR = r"^schedule\(7\) must be a finite number >= 0, got .*; let it return a factor"
SLOW = [[2, 64, 1, 1], [2, 8, 2, 1], [4, 32, 1, 1.2], [4, 16, 2, 1.2]]  # the same seconds for more rounds


class Early:
    needs_noise = True

    def __call__(self, input):
        return round(input.noise.noise_scale)


def adaptive(controller=None, **options):
    return vbs.AdaptiveTrace(PerDevice(8) if controller is None else controller, **options)


def sampler(controller=None, **options):
    return vbs.CustomSampler(SAMPLES, adaptive(controller, **options), 1, 0)


def from_csv(row, *arguments, tags=TAGS):
    Path("scalars.csv").write_text(",".join(["update", *(f"vbs/{tag}" for tag in tags)]) + f"\n{row}")
    return Throughput.from_csv("scalars.csv", *arguments)


MISTAKES = [
    Mistake(lambda: adaptive(bounds=(65, 127), multiple_of=64), ValueError, "^the bounds must include a multiple of m"),
    Mistake(lambda: adaptive(start=4, bounds=(8, 16)), ValueError, "^start must be an integer >= 8"),
    Mistake(lambda: adaptive(start=20, multiple_of=8), ValueError, "^start must be a multiple of multiple_of=8, got 2"),
    Mistake(lambda: adaptive(every=0), ValueError, "^every must be an integer >= 1"),
    Mistake(lambda: adaptive(delay=2.5), TypeError, "^delay must be an integer >= 0"),
    Mistake(lambda: adaptive(64), TypeError, r"^controller must be a callable object such as PerDevice\(64\)"),
    Mistake(lambda: sampler(delay=3), ValueError, "^delay must be > 3 for training, got 3; pass 16"),
    Mistake(lambda: sampler(bounds=(1, 121)), ValueError, "^the upper one of bounds must be at most the dataset's siz"),
    Mistake(lambda: sampler(multiple_of=200), ValueError, "^multiple_of must be at most the dataset's size of 120 sam"),
    Mistake(lambda: sampler(start=300), ValueError, "^start must be at most the dataset's size of 120 samples, got 30"),
    Mistake(lambda: sampler(NoiseScale()), ValueError, "needs a batch size to keep while it knows too little"),
    Mistake(lambda: vbs.CustomSampler(9, PerDevice(8), 1, 0), TypeError, "^trace must be a batch trace, or an Adaptiv"),
    Mistake(lambda: vbs.CustomSampler(9, adaptive(), 1, 0, on_end="stop"), ValueError, "^on_end must be left out with"),
    Mistake(lambda: sampler(lambda input: 0), ValueError, ANSWER),
    Mistake(lambda: sampler(lambda input: 2.5), TypeError, ANSWER),
    Mistake(lambda: sampler(lambda input: True), TypeError, ANSWER),
    Mistake(lambda: sampler(lambda input: 2**60), ValueError, ANSWER),
    Mistake(lambda: sampler(lambda input: round(input.noise.sigma2)), AttributeError, r"lambda>\(\) must say what it "),
    Mistake(
        lambda: sampler(Early()), ValueError, r"must also return a batch size before the first estimate.*return input"
    ),
    Mistake(lambda: sampler(lambda input: round(math.nan)), ValueError, "^cannot convert float NaN", free=True),
    Mistake(lambda: NoiseScale(0), ValueError, "^factor must be > 0, got 0; "),
    Mistake(lambda: NoiseScale("1"), TypeError, r"^factor must be a finite number >= 0, got '1' \(str\); "),
    Mistake(lambda: NormTest(math.inf), ValueError, "^eta must be a finite number >= 0, got inf; "),
    Mistake(lambda: Goodput((9, 8)), ValueError, "^the upper one of bounds must be an integer >= 9, got 8; "),
    Mistake(lambda: Goodput(64), TypeError, r"^bounds must be two integers, got 64 \(int\); pass \(least, largest\)$"),
    Mistake(lambda: Goodput((1, 2), -1), ValueError, "^threshold must be a finite number >= 0, got -1; "),
    Mistake(lambda: Seesaw(0.5, 8, 9), TypeError, r"^schedule must be a function of the samples so far, got 0\.5 \(fl"),
    Mistake(lambda: Seesaw(Halving(1, 2), 8, 7), ValueError, "^critical must be an integer >= 8, got 7; "),
    Mistake(lambda: Seesaw(lambda samples: -0.5, 8, 16)(ControlInput(1, samples=7)), ValueError, FACTOR),
    Mistake(lambda: adaptive(NoiseScale), TypeError, r"^controller must be a callable object such as PerDevice\(64\)"),
    Mistake(lambda: PerDevice(1.5), TypeError, r"must be an integer >= 1, got 1\.5"),
    Mistake(lambda: ConstantBatch(1.5), TypeError, r"must be an integer >= 1, got 1\.5"),
    *(
        Mistake(lambda text=text: parse_policy(text), ValueError, rf"^a policy must be {FORMS}, got '{text}'; pass per")
        for text in ("", "64", "per-device:", "linear:64", "constant:1.5", "noise-scale:.5", "goodput:9")
    ),
    Mistake(lambda: parse_policy("per-device:0"), ValueError, "must be an integer >= 1, got 0; "),
    Mistake(lambda: parse_policy("noise-scale:0"), ValueError, r"must be > 0, got 0\.0; "),
    Mistake(lambda: parse_policy("goodput:0-9"), ValueError, "must be an integer >= 1, got 0; "),
    Mistake(lambda: Throughput(0, 0), ValueError, r"^a microbatch must take time, accum_base \+ accum_row >= 1e-15 se"),
    Mistake(lambda: Throughput(-1, 1), ValueError, "^accum_base must be a finite number >= 0, got -1; pass seconds"),
    Mistake(lambda: Throughput(1, 1, 0, 0, 11), ValueError, r"^overlap must be in \[1, 10\], got 11\.0; pass 1 for no"),
    Mistake(lambda: Throughput.simple(0), ValueError, "^samples_per_second must be > 0, got 0"),
    Mistake(lambda: from_csv("", tags=TAGS[1:]), ValueError, ABSENT.format("world_size")),
    Mistake(lambda: from_csv("", tags=TAGS[:4]), ValueError, ABSENT.format("samples_per_second")),
    Mistake(lambda: from_csv(""), ValueError, UNUSED.format(0)),
    Mistake(lambda: from_csv("0,1,8,1,nan,nan"), ValueError, UNUSED.format(1)),
    Mistake(lambda: from_csv("0,1,8,1,1,6"), ValueError, UNUSED.format(1)),
    Mistake(lambda: from_csv("0,1,8,1,1,8", 0), ValueError, "^minibatch_size must be an integer >= 1"),
    Mistake(lambda: from_csv("0,1,8,1,1,8", 2.5), TypeError, "^minibatch_size must be an integer >= 1"),
    Mistake(lambda: Throughput.fit([]), ValueError, r"^the measurements must have the shape \(updates, 4\), got the s"),
    Mistake(lambda: Throughput.fit([[1, 2, 3]]), ValueError, r"got the shape \(1, 3\)"),
    Mistake(lambda: Throughput.fit([["a", 1, 1, 1]]), TypeError, "^the measurements must have"),
    Mistake(lambda: Throughput.fit([[1, 8, 1, 1], [1, 8, 1, 0]]), ValueError, "^seconds in row 1 must be finite and >"),
    Mistake(lambda: Throughput.fit([[1, math.nan, 1, 1]]), ValueError, "^rows in row 0 must be finite"),
    Mistake(lambda: Throughput.fit([[1, 8, 1, 0.5], [0.5, 1, 8, 1]]), ValueError, "^devices in row 1 must be whole, g"),
    Mistake(lambda: Throughput.fit([[2, 8, 1.5, 1]]), ValueError, "^rounds in row 0 must be whole"),
    Mistake(lambda: Throughput.fit(SLOW), ValueError, "^the measurements must show how long a microbatch takes, got s"),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(mistake)
