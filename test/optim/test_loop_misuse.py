"""No sequence of calls, however odd, trains on wrong samples."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.runs import LoggedTraining, Sampling, error_of, read_ahead
from helpers.splitting import rows_of
from variable_batch_size.data.plan.shuffle import order

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:set_epoch")


class Fuzz:
    """A user who calls anything at any time, and a rank that may notice."""

    def __init__(self, case, ahead):
        self.run, self.ahead = LoggedTraining(case), ahead
        self.iterations = []
        self.begun = set()  # the iterations that yielded a microbatch
        self.state = copy.deepcopy(self.run.optimizer.state_dict())
        self.right = True  # whether the accumulated microbatches are those of the update

    def begin(self, _):
        self.iterations.append(read_ahead(self.run.sampler, self.ahead))

    def look(self, _):
        next(read_ahead(self.run.sampler, self.ahead), None)

    def train(self, which):
        if not self.iterations:
            return
        number = (len(self.iterations) - 1) * (which > 0)  # the newest or the oldest
        batch = next(self.iterations[number], None)
        if batch is not None:
            self.right = (self.right or not self.run.optimizer.inside_step) and batch == self.due()
            self.run.weight.sum().backward()
            updated = self.run.optimizer.step()
            assert self.right or not updated  # a microbatch that was left out is noticed before the update ends
            self.begun.add(number)

    def due(self):
        """Rows of the microbatch that the optimizer says it takes."""
        case, optimizer = self.run.case, self.run.optimizer
        microbatch = optimizer.microbatch
        samples = order(case.dataset_size, case.seed, optimizer.epoch)(np.arange(case.dataset_size))
        rows = rows_of(microbatch.start, microbatch.samples, case.minibatch_size, case.fixed_shape)
        return samples[rows].tolist()

    def leave_out(self, which):
        """Read without training: of a loader that prefetches nothing, once training on the iteration has begun."""
        if self.ahead == 0 and len(self.iterations) - 1 in self.begun:
            next(self.iterations[-1], None)

    def sampler_epoch(self, epoch):
        self.run.sampler.set_epoch(epoch)

    def optimizer_epoch(self, epoch):
        self.run.optimizer.set_epoch(epoch)

    def both_epochs(self, epoch):
        self.run.set_epoch(epoch)

    def discard(self, _):
        self.run.optimizer.discard_step()

    def save(self, _):
        self.state = copy.deepcopy(self.run.optimizer.state_dict())

    def load(self, which):
        if which != 1:
            self.run.optimizer.load_state_dict(self.state)
        if which != 2:
            self.run.sampler.load_state_dict({**self.run.sampler.state_dict(), **position(self.state)})


def position(state):
    own = state["vbs"]["sampler"]
    return {key: own[key] for key in ("epoch", "step", "first_step", "samples_before", "ended", "past")}


CALLS = [Fuzz.train] * 6 + [Fuzz.begin, Fuzz.begin, Fuzz.look, Fuzz.leave_out, Fuzz.sampler_epoch, Fuzz.optimizer_epoch]
CALLS += [Fuzz.both_epochs, Fuzz.discard, Fuzz.save, Fuzz.load]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(9, 20),
    st.sampled_from([0, 0, 1, 4]),
    st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 2)), min_size=4, max_size=30),
)
@examples(400)
def test_no_sequence_of_calls_trains_on_wrong_samples(sizes, dataset_size, ahead, calls):
    trace = vbs.BatchTrace.from_sizes(sizes, on_end="cycle")
    fuzz = Fuzz(Sampling(trace, dataset_size, 4, False, True, 0, 3), ahead)
    fuzz.begin(0)
    for call, argument in calls:
        error_of(lambda call=call, argument=argument: call(fuzz, argument))
