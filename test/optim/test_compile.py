"""torch.compile: models, inner optimizers and callers of `step()`, with batch sizes and learning rates that change."""

import logging
import warnings

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters

import variable_batch_size as vbs
from helpers.reference import HYPERPARAMETERS, OPTIMIZERS, SIZES, assert_equal, training

SETTLED = 3  # updates after which nothing compiles
# Rules share one step(): those that scale the learning rate, the betas too, and by the noise of SGD and of Adam.
QUICK = {vbs.SqrtSDERuleOptimizer, vbs.AdaScaleOptimizer}
every_class = pytest.mark.parametrize(
    "kind",
    [pytest.param(one, marks=[] if one in QUICK else pytest.mark.nightly("compiles")) for one in OPTIMIZERS.values()],
    ids=lambda kind: kind.__name__,
)
# Rules that change the weight decay, betas or eps.
CHANGE_OTHERS = {
    vbs.LinearRuleMomentumOptimizer,
    vbs.SqrtSDERuleOptimizer,
    vbs.RootHalfLifeRuleOptimizer,
    vbs.InvariantAdamRuleOptimizer,
}
ADAMS = {torch.optim.Adam, torch.optim.AdamW}


@pytest.fixture(autouse=True)
def new_compiler():
    torch._dynamo.reset()
    counters.clear()
    logging.getLogger("torch.__trace").propagate = False  # pytest would format each of its many records
    # With None, six processes import torch to try what the CPU has.
    with warnings.catch_warnings(), torch._inductor.config.patch("cpp.vec_isa_ok", False):
        warnings.simplefilter("ignore")  # those of the compiler
        yield
    torch._dynamo.reset()


def compiled(function, **options):
    return torch.compile(function, backend="eager", **options)


def trained(run, updates=50, *, step=None):
    """Make updates; return the number of compiled graphs after each of them."""
    graphs = []
    if step is not None:
        run.optimizer.step = step
    for indices in run.microbatches(updates):
        if run.step(indices):
            graphs.append(counters["stats"]["unique_graphs"])
    return graphs


def settles(graphs, number):
    """Whether there are at most `number` graphs, all of which were compiled in the first updates."""
    return 0 < graphs[-1] <= number and graphs[SETTLED] == graphs[-1]


@every_class
def test_a_compiled_model_has_one_graph_for_all_batch_sizes(kind):
    eager, run = (training(kind, SIZES * 3) for _ in range(2))
    trained(eager, 20)
    run.model = compiled(run.model, fullgraph=True, dynamic=True)
    graphs = trained(run, 20)
    assert_equal(run.weights(), eager.weights(), tolerance=1e-13)
    assert graphs[-1] <= 2, str(graphs)  # a microbatch of one row has a graph of its own
    assert not counters["graph_break"]


@every_class
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_a_compiled_inner_step_equals_the_eager_one_and_settles_with_a_tensor_as_learning_rate(kind, tensor):
    def create():
        inner = type(training(kind).optimizer.inner)
        values = HYPERPARAMETERS[inner]
        if tensor:
            values = values | {"lr": torch.tensor(values["lr"], dtype=torch.float64), "foreach": False}
        return training(kind, SIZES * 8, hyperparameters=values)

    eager, run = create(), create()
    trained(eager)
    inner = run.optimizer.inner
    inner.step = compiled(inner.step)
    graphs = trained(run)
    # A compiled Adam corrects its bias in float32.
    assert_equal(run.weights(), eager.weights(), tolerance=1e-5 if type(inner) in ADAMS else 1e-13)
    if (
        tensor and kind not in CHANGE_OTHERS
    ):  # torch may compile for each value of a Python number, and gives up after 8
        assert settles(graphs, 2 + 1), str(graphs)
    rate = inner.param_groups[0]["lr"]
    assert isinstance(rate, Tensor) == tensor
    assert float(rate) == HYPERPARAMETERS[type(inner)]["lr"]


@every_class
def test_a_compiled_caller_runs_the_step_outside_of_its_graph(kind):
    eager, run = (training(kind, SIZES * 8) for _ in range(2))
    trained(eager)
    optimizer, unbound, value = run.optimizer, run.optimizer.step, torch.ones(())

    @compiled
    def step():
        optimizer.log(value=value * 2)
        return unbound()

    graphs = trained(run, step=step)
    assert_equal(run.weights(), eager.weights(), tolerance=0)
    assert optimizer.logged["value"] == 2
    assert settles(graphs, 1), str(graphs)
    assert len(counters["graph_break"]) <= 2  # at log and at step


@pytest.mark.slow("compiles")
@pytest.mark.parametrize("kind", [vbs.LinearRuleOptimizer, vbs.AdaScaleOptimizer])
def test_compiled_autograd_is_no_change_of_the_gradients(kind):
    eager, run = (training(kind, SIZES * 2) for _ in range(2))
    trained(eager, 12)
    run.model = compiled(run.model, dynamic=True)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        graphs = trained(run, 12)
    assert_equal(run.weights(), eager.weights(), tolerance=1e-13)
    assert graphs[2 * SETTLED] == graphs[-1], str(graphs)


@pytest.mark.parametrize("finite", [False, True])
def test_a_warning_of_a_step_names_the_line_of_its_caller(finite):
    run = training(vbs.AdaScaleOptimizer, [8] * 100, minibatch_size=8, dataset_size=800)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for number, indices in enumerate(run.sampler):
            (run.loss(indices) * (1 if finite else torch.inf)).backward()
            run.optimizer.step()
            if number == 60:
                break
    assert {warning.filename for warning in found} == {__file__}
    assert "Skipped an update" in str(found[0].message) or finite
