"""When the trainings of an experiment end, so that rules are compared at equal samples, progress, time or cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, final, get_args

from variable_batch_size._validation import check_positive, type_error, value_error
from variable_batch_size.lab.evaluation.curve import Curve

By: TypeAlias = Literal["samples", "progress", "seconds", "cost"]

MOST = 8  # a training with another end than samples ends at the latest after this multiple of the experiment's samples
FORMS = '"samples", "progress", "progress:UPDATES", "seconds:SECONDS" or "cost:PRICE"'


@final
@dataclass(frozen=True)
class End:
    """The end of a training: its first update after which the value that is equal for all is at least `amount`.

    Attributes:
        by: what is equal: samples; progress, in updates at the reference batch size, as `optimizer.progress` counts it;
            simulated seconds; or their cost.
        amount: how much of it; None: the samples of the experiment, or their progress at the reference batch size.
    """

    by: By = "samples"
    amount: float | None = None

    @classmethod
    def parse(cls, text: str) -> End:
        """Return the end of a training for a text such as "samples" or "seconds:3600".

        Raises:
            TypeError: if it is no text.
            ValueError: if it does not stand for an end.

        >>> End.parse("seconds:3600")
        End(by='seconds', amount=3600.0)
        """
        if not isinstance(text, str):
            raise type_error(f"an end must be {FORMS}", text, "pass one of these")
        by, colon, number = text.partition(":")
        may_have_number = {"samples": (False,), "progress": (False, True)}.get(by, (True,))
        if by not in get_args(By) or bool(colon) not in may_have_number:
            raise value_error(f"an end must be {FORMS}", f"{text!r:.60}", "pass one of these")
        try:
            amount = check_positive(float(number), f"the number of the end {by}", "pass one") if colon else None
        except ValueError:
            raise value_error(f"the number of the end {by} must be > 0", repr(number), "pass one") from None
        return cls(by, amount)  # type: ignore[arg-type]

    def with_amount(self, samples: int, ref_batchsize: int | None) -> End:
        """Return the end with an amount, so that all trainings of an experiment end at the same.

        For the end "progress" it is by default samples / ref_batchsize: what they make at the reference batch size.

        Args:
            samples: samples of a training of the experiment.
            ref_batchsize: batch size at which progress is counted; None: not known.
        """
        if self.amount is not None or self.by == "samples":
            return self
        if ref_batchsize is None:
            raise value_error('the end "progress" needs a ref_batchsize', "none", "pass one, or progress:UPDATES")
        return End(self.by, samples / ref_batchsize)

    def max_samples(self, samples: int) -> int:
        """Return after how many samples a training ends at the latest, in an experiment of `samples`."""
        return samples if self.by == "samples" else MOST * samples

    def share(self, curve: Curve, progress: float) -> float:
        """Return how much of its end a training has reached: 0 at its begin, 1 or a little more at its end.

        It is 0 for an end in samples, and nan if the cost is not known.

        Args:
            curve: what the training has measured so far, with seconds and cost.
            progress: progress so far, in updates at the reference batch size.
        """
        if self.amount is None:
            return 0.0
        value = {"progress": progress, "seconds": curve.seconds, "cost": curve.cost}[self.by]
        return math.nan if value is None else value / self.amount

    def is_reached(self, curve: Curve, progress: float) -> bool:
        """Return whether a training has reached its end; False for an end in samples, with which its sampler ends.

        Args:
            curve: what the training has measured so far.
            progress: progress so far, in updates at the reference batch size.
        """
        return self.by != "samples" and reached(self.share(curve, progress))

    def name_trace(self, trace: str) -> str:
        """Return the name of a trace under which the trainings with this end are compared."""
        if self.by == "samples":
            return trace
        if self.amount is None:
            return f"{trace}, equal {self.by}"
        amount = f"{self.amount:,.6g}"
        return f"{trace}, {amount} seconds" if self.by == "seconds" else f"{trace}, {self.by} {amount}"

    def __str__(self) -> str:
        """Return the text that stands for it."""
        return self.by if self.amount is None else f"{self.by}:{self.amount!r}"


SAMPLES = End()


def reached(share: float) -> bool:
    """Return whether a share of the end is 1 or more, but for the rounding of sums."""
    return share >= 1 - 1e-9
