"""The laws that every trainer's adapter keeps: `class TestLightning(Conformance)` collects those of its features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from helpers.trainings import CASES, Adapter, Case, Run, Trained, expected, fit_in_processes
from helpers.yardstick import ENDS, EPOCHS, MAX_GRAD_NORM, SAMPLES, STOPS, UPDATES

Law = TypeVar("Law", bound=Callable[..., None])
RESUMED = Case("sgd", "adascale", clip=MAX_GRAD_NORM, schedule="cosine")
RANDOM = Case(dropout=0.3)


def needs(feature: str) -> Callable[[Law], Law]:
    """Leave a law out for trainers without a feature."""

    def mark(law: Law) -> Law:
        law.feature = feature  # type: ignore[attr-defined]
        return law

    return mark


class Conformance:
    """The laws of an adapter; a subclass says which features the trainer has.

    Attributes:
        adapter: the trainer.
        features: "evaluation", "controller", "tokens", "to the last bit", and how processes sum: "processes", where the
            library does it, "ddp" and "fsdp2".
        tolerance: the largest relative difference of a weight, a loss or a rate.
    """

    adapter: Adapter
    features: frozenset[str] = frozenset()
    tolerance = 1e-12

    def __init_subclass__(cls) -> None:
        for name, law in vars(Conformance).items():
            if getattr(law, "feature", None) not in {None, *cls.features}:
                setattr(cls, name, None)  # which pytest does not collect

    # One process. ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_whole_batches(self, case: Case, tmp_path: Path) -> None:
        self.check(self.fit(case, tmp_path), case)

    def test_resumes_at_five_places(self, tmp_path: Path) -> None:
        self.check(self.fit(RESUMED, tmp_path / "whole", save_at=STOPS), RESUMED)
        for stop, run in resumes(RESUMED, tmp_path):
            self.check(run.fit(self.adapter), RESUMED, since=stop)

    @needs("to the last bit")
    @pytest.mark.parametrize("case", [RANDOM, replace(RANDOM, workers=1)], ids=str)
    def test_resumes_to_the_last_bit(self, case: Case, tmp_path: Path) -> None:
        whole = self.fit(case, tmp_path / "whole", save_at=STOPS)
        for _, run in resumes(case, tmp_path):
            identical(run.fit(self.adapter), whole)

    @needs("controller")
    def test_a_controller_resumes(self, tmp_path: Path) -> None:
        case = Case(adaptive=True)
        whole = self.fit(case, tmp_path / "whole", save_at=STOPS)
        self.check_adaptive(whole, case)
        for stop, run in resumes(case, tmp_path):
            trained = run.fit(self.adapter)
            assert trained.sizes == whole.sizes, stop
            self.check_adaptive(trained, case, since=stop)

    @needs("tokens")
    def test_whole_batches_of_tokens(self, tmp_path: Path) -> None:
        self.check(self.fit(Case("sgd", tokens=True), tmp_path), Case("sgd", tokens=True))

    @needs("evaluation")
    def test_evaluation_and_early_stopping(self, tmp_path: Path) -> None:
        case = Case("sgd", patience=1)
        trained = self.fit(case, tmp_path)
        by_hand = [expected(case, updates=end).evaluations[0] for end in ENDS[:2]]
        assert by_hand[1] < by_hand[0]
        np.testing.assert_allclose(trained.evaluations, by_hand, rtol=self.tolerance)
        self.check(trained, case, until=ENDS[1])

    # Several processes. ----------------------------------------------------------------------------------------------

    @needs("processes")
    def test_processes(self, tmp_path: Path) -> None:
        self.check_processes("", tmp_path)

    @needs("ddp")
    def test_data_parallel(self, tmp_path: Path) -> None:
        self.check_processes("ddp", tmp_path)

    @needs("fsdp2")
    def test_sharded(self, tmp_path: Path) -> None:
        self.check_processes("fsdp2", tmp_path)

    def check_processes(self, wrapper: str, folder: Path) -> None:
        """Check the cases on two processes, and resumes on as many, and on another number of them."""
        one, two = folder / "one", folder / "two"
        alone = wrapper if wrapper == "fsdp2" else ""  # whose states are those of shards
        self.fit_all([Run(RESUMED, one / "whole", STOPS)], 1, alone, folder / "first")
        # Without workers, for whose end a forked process waits five seconds.
        runs = {"cases": [Run(replace(case, workers=0), two / str(case)) for case in CASES]}
        runs["resumed"] = [Run(RESUMED, two / "whole", STOPS), *(run for _, run in resumes(RESUMED, one))]
        if "to the last bit" in self.features:
            runs["random"] = [
                Run(RANDOM, two / "random/whole", STOPS),
                *(run for _, run in resumes(RANDOM, two / "random")),
            ]
        if "controller" in self.features:
            runs["adaptive"] = [Run(Case(adaptive=True), two / "adaptive")]
        if "tokens" in self.features:
            runs["cases"].append(Run(Case("sgd", tokens=True), two / "tokens"))
        trained = iter(self.fit_all([run for some in runs.values() for run in some], 2, wrapper, folder / "second"))
        came = {name: [next(trained) for _ in some] for name, some in runs.items()}
        for run, each in zip(runs["cases"], came["cases"], strict=True):
            self.check(each, run.case)
        for each, stop in zip(came["resumed"], (0, *STOPS), strict=True):
            self.check(each, RESUMED, since=stop)
        for each in came.get("random", [])[1:]:
            identical(each, came["random"][0])
        for each in came.get("adaptive", []):
            self.check_adaptive(each, Case(adaptive=True))
        back = resumes(RESUMED, two)
        for (stop, _), each in zip(
            back, self.fit_all([run for _, run in back], 1, alone, folder / "third"), strict=True
        ):
            self.check(each, RESUMED, since=stop)

    # What is compared. -----------------------------------------------------------------------------------------------

    def fit(self, case: Case, folder: Path, **options: Any) -> Trained:
        return Run(case, folder, **options).fit(self.adapter)

    def fit_all(self, runs: Sequence[Run], world: int, wrapper: str, folder: Path) -> list[Trained]:
        """Return what comes of runs, in processes unless there is one without a wrapper."""
        runs = [run.within(wrapper) for run in runs]
        if world == 1 and not wrapper:
            return [run.fit(self.adapter) for run in runs]
        return fit_in_processes(self.adapter, runs, world, folder)

    def expected(self, case: Case, **options: Any) -> Trained:
        """Return the training by hand; a trainer whose optimizers are not torch's says what they compute."""
        return expected(replace(case, workers=0, wrapper=""), **options)

    def check(self, trained: Trained, case: Case, since: int = 0, until: int = UPDATES) -> None:
        """Compare a training, or what is left of it after an update, with that by hand."""
        by_hand = self.expected(case, updates=until)
        self.close(trained, by_hand, since)
        assert (trained.updates, trained.samples) == (by_hand.updates, by_hand.samples)

    def check_adaptive(self, trained: Trained, case: Case, since: int = 0) -> None:
        """Compare with a training by hand of the batch sizes that the controller has chosen."""
        assert len(set(trained.sizes)) > 3
        assert trained.samples == EPOCHS * SAMPLES
        self.close(trained, self.expected(case, sizes=tuple(trained.sizes), updates=trained.updates), since)

    def close(self, trained: Trained, by_hand: Trained, since: int) -> None:
        scale = float(by_hand.weights.abs().max())
        np.testing.assert_allclose(
            trained.weights.double() / scale, by_hand.weights / scale, rtol=0, atol=self.tolerance
        )
        for found, wanted in (trained.losses, by_hand.losses), (trained.rates, by_hand.rates):
            np.testing.assert_allclose(found, wanted[since:], rtol=self.tolerance, atol=1e-15)


def resumes(case: Case, folder: Path) -> list[tuple[int, Run]]:
    """Return runs that resume what was saved in `folder / "whole"`, where dropout must not depend on the seed."""
    return [
        (stop, Run(case, folder / f"after-{stop}", resume=folder / "whole" / f"at-{stop}", seed=99)) for stop in STOPS
    ]


def identical(trained: Trained, whole: Trained) -> None:
    assert (trained.weights - whole.weights).abs().max() == 0
    assert [*trained.losses] == [*whole.losses[-len(trained.losses) :]]
