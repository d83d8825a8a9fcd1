"""The laws that every trainer's adapter keeps: `class TestLightning(Conformance)` collects those of its features."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pytest

from helpers.trainings import CASES, Adapter, Fit, Trained, TrainerCase, expected, fit_in_processes
from helpers.yardstick import ENDS, EPOCHS, MAX_GRAD_NORM, SAMPLES, STOPS, UPDATES

RESUMED = TrainerCase("sgd", "adascale", clip=MAX_GRAD_NORM, schedule="cosine")
RANDOM, ADAPTIVE = TrainerCase(dropout=0.3), TrainerCase(adaptive=True)
TOKENS, EVALUATED = TrainerCase("sgd", tokens=True), TrainerCase("sgd", patience=1)
Law: TypeAlias = tuple[Fit, Callable[..., None]]  # a training, and what is checked of it
Test = TypeVar("Test", bound=Callable[..., None])


def needs(feature: str) -> Callable[[Test], Test]:
    """Leave a test out for trainers without a feature."""

    def mark(test: Test) -> Test:
        test.feature = feature  # type: ignore[attr-defined]
        return test

    return mark


class Conformance:
    """The laws of an adapter; a subclass says which features the trainer has.

    Attributes:
        adapter: the trainer.
        features: "evaluation", "controller", "tokens", "looks at losses", "to the last bit", and how processes sum:
            "processes", where the library does it, "ddp" and "fsdp2".
        tolerance: the largest relative difference of a weight, a loss or a rate.
    """

    adapter: Adapter
    features: frozenset[str] = frozenset()
    tolerance = 1e-12

    def __init_subclass__(cls) -> None:
        for name, test in vars(Conformance).items():
            if getattr(test, "feature", None) not in {None, *cls.features}:
                setattr(cls, name, None)  # which pytest does not collect

    # One process. ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_whole_batches(self, case: TrainerCase, tmp_path: Path) -> None:
        self.hold([(Fit(case, tmp_path), self.check)])

    @needs("tokens")
    def test_whole_batches_of_tokens(self, tmp_path: Path) -> None:
        self.hold([(Fit(TOKENS, tmp_path), self.check)])

    @needs("looks at losses")
    def test_a_mean_over_tokens_that_are_not_counted_is_warned_of(self, tmp_path: Path) -> None:
        with pytest.warns(UserWarning, match="must be a (mean|sum) over rows, but that of . rows is") as caught:
            Fit(replace(TOKENS, uncounted=True), tmp_path).fit(self.adapter)
        assert inspect.getfile(type(self.adapter)) in [one.filename for one in caught]  # the line of the script

    def test_resumes_at_five_places(self, tmp_path: Path) -> None:
        self.hold([(Fit(RESUMED, tmp_path / "whole", STOPS), self.check), *self.resumes(RESUMED, tmp_path, self.check)])

    @needs("to the last bit")
    @pytest.mark.parametrize("case", [RANDOM, replace(RANDOM, workers=1)], ids=str)
    def test_resumes_to_the_last_bit(self, case: TrainerCase, tmp_path: Path) -> None:
        self.hold(self.random(case, tmp_path))

    @needs("controller")
    def test_a_controller_resumes(self, tmp_path: Path) -> None:
        whole = Fit(ADAPTIVE, tmp_path / "whole", STOPS), self.check_adaptive
        self.hold([whole, *self.resumes(ADAPTIVE, tmp_path, self.check_adaptive)])

    @needs("evaluation")
    def test_evaluation_and_early_stopping(self, tmp_path: Path) -> None:
        self.hold([(Fit(EVALUATED, tmp_path), self.check_evaluated)])

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
        """Check all laws on two processes, and resumes on another number of them."""
        one, two = folder / "one", folder / "two"
        alone = wrapper if wrapper == "fsdp2" else ""  # whose states are those of shards
        self.hold([(Fit(RESUMED, one / "whole", STOPS), self.check)], 1, alone)
        # Without workers, for whose end a forked process waits five seconds.
        laws: list[Law] = [(Fit(replace(case, workers=0), two / str(case)), self.check) for case in CASES]
        laws += [(Fit(RESUMED, two / "whole", STOPS), self.check), *self.resumes(RESUMED, one, self.check)]
        laws += self.random(RANDOM, two / "random") if "to the last bit" in self.features else []
        for feature, case, check in (
            ("tokens", TOKENS, self.check),
            ("controller", ADAPTIVE, self.check_adaptive),
            ("evaluation", EVALUATED, self.check_evaluated),
        ):
            laws += [(Fit(case, two / feature), check)] if feature in self.features else []
        self.hold(laws, 2, wrapper)
        self.hold(self.resumes(RESUMED, two, self.check), 1, alone)

    # Trainings, and what is checked of each. -------------------------------------------------------------------------

    def hold(self, laws: Sequence[Law], world: int = 1, wrapper: str = "") -> None:
        """Check each training, in processes unless there is one without a wrapper."""
        runs = [run.within(wrapper) for run, _ in laws]
        if world == 1 and not wrapper:
            trained = [run.fit(self.adapter) for run in runs]
        else:
            trained = fit_in_processes(self.adapter, runs, world)
        for each, (run, check) in zip(trained, laws, strict=True):
            check(each, run.case)

    def resumes(self, case: TrainerCase, folder: Path, check: Callable[..., None]) -> list[Law]:
        """Return what resumes what was saved in `folder / "whole"`; dropout must not depend on the seed."""
        places = {stop: folder / "whole" / f"at-{stop}" for stop in STOPS}
        return [
            (Fit(case, folder / f"after-{stop}", resume=place, seed=99), partial(check, since=stop))
            for stop, place in places.items()
        ]

    def random(self, case: TrainerCase, folder: Path) -> list[Law]:
        """Return a training with dropout, and what resumes it, which must end with the same weights to the last bit."""
        whole: list[Trained] = []

        def check(trained: Trained, case: TrainerCase, since: int = 0) -> None:
            whole.extend([] if since else [trained])
            assert (trained.weights - whole[0].weights).abs().max() == 0, since
            assert [*trained.losses] == [*whole[0].losses[since:]], since

        return [(Fit(case, folder / "whole", STOPS), check), *self.resumes(case, folder, check)]

    def expected(self, case: TrainerCase, **options: Any) -> Trained:
        """Return the training by hand; a trainer whose optimizers are not torch's says what they compute."""
        return expected(replace(case, workers=0, wrapper=""), **options)

    def check(self, trained: Trained, case: TrainerCase, since: int = 0, until: int = UPDATES) -> None:
        """Compare a training, or what is left of it after an update, with that by hand."""
        by_hand = self.expected(case, updates=until)
        self.close(trained, by_hand, since)
        assert (trained.updates, trained.samples) == (by_hand.updates, by_hand.samples)

    def check_evaluated(self, trained: Trained, case: TrainerCase) -> None:
        """Compare what was evaluated, and the end after the epoch in which it did not rise."""
        by_hand = [self.expected(case, updates=end).evaluations[0] for end in ENDS[:2]]
        assert by_hand[1] < by_hand[0]
        np.testing.assert_allclose(trained.evaluations, by_hand, rtol=max(self.tolerance, 1e-6))  # of float32
        self.check(trained, case, until=ENDS[1])

    def check_adaptive(self, trained: Trained, case: TrainerCase, since: int = 0) -> None:
        """Compare with a training by hand of the batch sizes that the controller has chosen."""
        assert len(set(trained.sizes)) > 3
        assert trained.samples == EPOCHS * SAMPLES
        self.close(trained, self.expected(case, sizes=tuple(trained.sizes), updates=trained.updates), since)

    def close(self, trained: Trained, by_hand: Trained, since: int) -> None:
        largest = self.tolerance * float(by_hand.weights.abs().max())
        np.testing.assert_allclose(trained.weights, by_hand.weights, rtol=0, atol=largest)
        for found, wanted in (trained.losses, by_hand.losses), (trained.rates, by_hand.rates):
            np.testing.assert_allclose(found, wanted[since:], rtol=self.tolerance, atol=1e-15)
