"""What is said of wrong arguments, of optimizers, loops, schedules, averages and what is logged."""

import copy
import math
import pickle
from itertools import cycle

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.optim import SGD, lr_scheduler

import variable_batch_size as vbs
from helpers.denominators import DATASET
from helpers.elastic_threads import ElasticThreads, Script
from helpers.fingerprint import compile_on_the_cpu
from helpers.loops import CASE
from helpers.mistakes import Mistake, check
from helpers.models import Words
from helpers.reference import network, training
from helpers.runs import LoggedTraining
from helpers.schedules import counter, sequential
from variable_batch_size.world import World

RULES = vbs.rules
PLACE = {"num_replicas": 1, "rank": 0}


def optimizer(**options):
    right = {"inner": SGD(network().parameters()), "sampler": vbs.CustomSampler(50, 20, 1, 0), "ref_batchsize": 64}
    return vbs.CustomOptimizer(**{**right, "rule": RULES.LinearRule(), **options})


def layers(parameters, **options):
    """A group for each of the two layers."""
    weights = list(parameters)
    return SGD([{"params": weights[:2]}, {"params": weights[2:]}], **options)


def rules(*rule):
    return training(vbs.CustomOptimizer, inner=layers, rule=rule, ref_batchsize=None)


def returned(inner=SGD, **factors):
    """Train with a rule that returns these factors, which are not checked before."""

    def rule(update):
        return factors["instead"] if "instead" in factors else RULES.Scaling(**factors)

    options = {"inner": inner, "hyperparameters": {"lr": 0.1}}
    return training(vbs.CustomOptimizer, rule=rule, ref_batchsize=8, **options).run(1)


def schedule(*options, of=counter, to=lambda run: run.optimizer, **more):
    run = training()
    return vbs.ProgressScheduler(of(run.optimizer), to(run), *options, **more)


def plateau(optimizer, *, nested=False):
    own = lr_scheduler.ReduceLROnPlateau(optimizer)
    if not nested:
        return own
    inside = sequential(optimizer)
    inside._schedulers[1] = own  # torch does not check later assignments
    return lr_scheduler.ChainedScheduler([inside], optimizer)


def average(parameters=None, decay=0.9, kind=vbs.LinearRuleOptimizer, use=lambda average, run: None, **options):
    run = training(kind, ref_batchsize=None if kind is vbs.ConstantOptimizer else 64)
    own = run.model.parameters() if parameters is None else parameters
    return use(vbs.WeightAverage(own, decay, options.pop("of", run.optimizer), **options), run)


def arriving(batch=None, **options):
    source = vbs.ArrivingBatches(**{"minibatch_size": 4, **PLACE, **options})
    if batch is not None:
        optimizer = vbs.ConstantOptimizer(SGD(network().parameters()), source)
        return [list(update) for update in vbs.updates([batch], optimizer)]
    return source


def arrived(kind=vbs.ConstantOptimizer, **options):
    return kind(SGD(network().parameters()), arriving(), 4, **options)


def remaining(until=3, by="epochs", **other):
    run = LoggedTraining(CASE)
    own = {"sampler": run.sampler, "optimizer": run.optimizer}
    until = until(run) if callable(until) else until
    return vbs.remaining_epochs(**{**own, **{name: of(run) for name, of in other.items()}}, until=until, by=by)


def scheduler(run, **options):
    return vbs.ProgressScheduler(counter(run.optimizer), run.optimizer, **options)


def counted(count=3, kind=vbs.ConstantOptimizer, **options):
    run = training(kind, [9], **{"reduction": "sum", "dataset_size": DATASET, **options})
    run.loss(next(iter(run.sampler))).backward()
    return run.optimizer.step(count=count)


def scaled_by_torch(**options):
    run, scaler = training(**options), torch.amp.GradScaler("cpu")
    scaler.scale(run.loss(next(iter(run.sampler)))).backward()
    scaler.step(run.optimizer)


def broadcast(model):
    """The model, which the optimizer then knows."""
    vbs.broadcast_parameters(model)
    return model


def partly_scaled():
    run = training()
    loss = run.loss(next(iter(run.sampler)))
    run.optimizer.backward(loss, scaler=torch.amp.GradScaler("cpu"), retain_graph=True)
    run.optimizer.backward(loss)


class SAM(torch.optim.Optimizer):
    """Steps by a second backward at weights that are moved along the gradient.

    Source: Foret et al. 2021, arXiv 2010.01412, with the methods of github.com/davda54/sam.
    """

    def __init__(self, params, base, **options):
        super().__init__(params, {"rho": 0.05, **options})
        self.base_optimizer = base(self.param_groups, **options)

    def first_step(self, zero_grad=False):
        """Move the weights."""

    def second_step(self, zero_grad=False):
        """Move them back, and step."""


class OwnStep(torch.optim.Adam):
    """An Adam with a step of its own."""

    def step(self, closure=None):
        return super().step(closure)


OPTIMIZERS = [
    (lambda: optimizer(ref_batchsize=None), ValueError, r"LinearRule\(\) needs ref_batchsize, .*; pass the bat"),
    (lambda: optimizer(ref_batchsize=0), ValueError, "ref_batchsize must be an integer >= 1, got 0; pass"),
    (lambda: optimizer(reduction="none"), ValueError, 'reduction must be "mean" or "sum".*, got \'none\'; pass'),
    (lambda: optimizer(max_grad_norm=math.nan), ValueError, "max_grad_norm must be .* >= 0, got nan; omit it"),
    (lambda: optimizer(log_steps=0), ValueError, "log_steps must be an integer >= 1, got 0; pass"),
    (lambda: optimizer(log_samples=0), ValueError, "log_samples must be an integer >= 1, got 0; pass"),
    (lambda: optimizer(tracker="runs"), TypeError, r"tracker must be a vbs\.Tracker, got 'runs'; pass one"),
    (lambda: optimizer(backend="gloo"), TypeError, r"backend must be a vbs\.Backend, got 'gloo'; pass one"),
    (lambda: optimizer(rule=RULES.RootRule), TypeError, r"rule must be a name, or a callable .*, got <class"),
    (lambda: optimizer(rule="lineal"), ValueError, "rule must be one of constant, .*, got 'lineal'; pass one"),
    (lambda: optimizer(sampler=[[0, 1]]), TypeError, r"sampler must be the vbs\.CustomSampler .* got list; cre"),
    (lambda: optimizer(sampler=vbs.CustomSampler(50, 20, 3, 2)), ValueError, "deals for rank 2 of 3, .* of 1; pa"),
    (lambda: optimizer(inner=nn.Linear(1, 1)), TypeError, "inner optimizer must be .*, got Linear; pass"),
    (lambda: optimizer(noise="differences"), ValueError, 'noise must be "microbatches" or "differenced", got'),
    (
        lambda: optimizer(rule="constant", noise="microbatches", ref_batchsize=None),
        ValueError,
        "measuring the noise needs ref_batchsize, .*, got none; pass the batch size",
    ),
    (
        lambda: training(vbs.LinearRuleMomentumOptimizer, inner=torch.optim.Adam, hyperparameters={}),
        TypeError,
        r"must be a torch\.optim\.SGD, got Adam; use the linear rule",
    ),
    (lambda: training().optimizer.noise(), RuntimeError, r'LinearRule\(\) does not use it; pass noise="m'),
    *(
        (lambda made=made: made(training().optimizer), TypeError, r"be copied or pickled; create another", True)
        for made in (copy.copy, copy.deepcopy, pickle.dumps)
    ),
    (lambda: vbs.LinearRuleOptimizer(None, None, ref_batch_size=8), TypeError, "did you mean ref_batchsize"),
    (lambda: vbs.ConstantOptimizer(None), TypeError, r"^ConstantOptimizer: missing a required argument: ", True),
    (lambda: vbs.CustomSampler(9, 3, mini_batch_size=8), TypeError, "; did you mean minibatch_size"),
    (lambda: vbs.LinearOptimizer, AttributeError, r"LinearOptimizer; did you mean LinearRuleOptimizer\?", True),
]
INNER = [
    *(
        (
            lambda kind=kind: training(inner=kind, hyperparameters={}),
            TypeError,
            f"^{kind.__name__} cannot be the inner optimizer: .*; use",
            True,
        )
        for kind in (torch.optim.LBFGS, torch.optim.SparseAdam)
    ),
    (
        lambda: training(inner=lambda parameters, **_: SAM(parameters, SGD, lr=0.1), hyperparameters={}),
        TypeError,
        "^SAM cannot be the inner optimizer: it needs a second backward",
        True,
    ),
    (
        lambda: optimizer(inner=PostLocalSGDOptimizer(SGD([torch.zeros(1)], lr=0.1), averager=None)),
        TypeError,
        "a PostLocalSGDOptimizer has not; pass the optimizer that it wraps",
    ),
    *(
        (
            lambda kind=kind: training(vbs.RootRuleOptimizer, inner=kind, hyperparameters={"lr": 0.02}),
            TypeError,
            rf"{kind.__name__} .* {when}; use the constant rule, or another optimizer",
        )
        for kind, when in ((torch.optim.Rprop, "in its first step only"), (torch.optim.ASGD, "next step"))
    ),
    *(
        (
            lambda kind=kind: training(vbs.InvariantAdamRuleOptimizer, inner=kind, hyperparameters={"lr": 0.1}),
            TypeError,
            r"^a rule of Adam's second moment needs a torch\.optim\.Adam .*, got \w+; wrap",
        )
        for kind in (SGD, torch.optim.NAdam, torch.optim.RMSprop, OwnStep)
    ),
    (
        lambda: training(vbs.InvariantAdamRuleOptimizer, model=network(torch.float16), dtype=torch.float16),
        ValueError,
        "on one device, in float32, say, got float16, in which squares overflow; ch",
    ),
    (
        lambda: training(vbs.InvariantAdamRuleOptimizer, [48], ref_batchsize=8, minibatch_size=16),
        ValueError,
        "more than ref_batchsize=8 samples must have two or more microbatches, got minibatch_size=16; pass a small",
    ),
    *(
        (
            lambda rule=rule, kind=kind: training(vbs.CustomOptimizer, rule=rule, inner=kind, hyperparameters={}),
            TypeError,
            f"must be a torch.optim.Adam, AdamW or RMSprop, got {kind.__name__}; use the root rule",
        )
        for rule, kind in (("sqrt-sde", SGD), ("sqrt-sde", torch.optim.NAdam), ("root-half-life", torch.optim.Adagrad))
    ),
]
FACTORS = [
    (lambda: rules("constant", "root"), ValueError, r"^RootRule\(\) needs ref_batchsize"),
    (lambda: rules("constant"), ValueError, "a sequence of rules .* group, got 1 for 2; pass as many, or one r"),
    (lambda: rules("constant", ["constant"]), TypeError, r"^rule must be a name, or a callable .*, got \['cons"),
    *(
        (lambda bad=bad: returned(instead=bad), TypeError, r"^a rule must return a vbs.rules.Scaling, but .* d")
        for bad in (1.5, None, {"lr": 1.0}, RULES.Scaling)
    ),
    *(
        (lambda bad=bad: returned(eps=bad), TypeError, "^every factor of a rule must be a number, but .*ned ep")
        for bad in ("1", None, True, torch.ones(2), 1j)
    ),
    *(
        (
            lambda name=name, bad=bad: returned(**{name: bad}),
            ValueError,
            rf"^every factor of a rule must be finite, got {name}=-?(nan|inf) from .*; ret",
        )
        for name, bad in zip(RULES.Scaling.__slots__, cycle((math.nan, np.float32("nan"), torch.tensor(-torch.inf))))
    ),
    *(
        (
            lambda inner=inner, factors=factors: returned(inner, **factors),
            ValueError,
            f"no parameter group has {missing}; use another rule",
        )
        for inner, factors, missing in (
            (SGD, {"eps": 2}, "eps"),
            (SGD, {"eps": 2, "one_minus_beta": 0.5}, "eps or betas"),
            (SGD, {"beta2_power": 2}, "betas"),
            (torch.optim.Adafactor, {"eps": 2}, "eps"),  # which has a pair of them
        )
    ),
    *(
        (
            lambda inner=inner, factor=factor: returned(inner, one_minus_beta=factor),
            ValueError,
            rf"every beta in \[0, 1\), but the factor .* changes {beta} to .*; limit the largest",
        )
        for inner, beta in ((torch.optim.Adam, 0.9), (torch.optim.RMSprop, 0.99))
        for factor in (1000, -0.1)
    ),
    *(
        (
            lambda name=name, power=power: returned(torch.optim.Adam, **{name: power}),
            ValueError,
            rf"but .*{name}={power:g}.* changes {beta} to .*; let the rule return larger exponents",
        )
        for name, beta in (("beta1_power", 0.9), ("beta2_power", 0.999))
        for power in (0, -1, 1e-18)
    ),
    (
        lambda: training(vbs.LEGWRuleOptimizer, warmup_epochs=math.inf),
        ValueError,
        "^warmup_epochs must be a finite number >= 0, got inf; pass",
    ),
    (lambda: RULES.LEGWRule(True), TypeError, "^warmup_updates must be a finite number >= 0, got True .*; pass"),
    (
        lambda: training(vbs.CustomOptimizer, rule="legw"),
        ValueError,
        "legw needs its warmup_updates, got none; pass legw:N",
    ),
]
SCHEDULES = [
    *(
        (
            lambda nested=nested: schedule(of=lambda optimizer: plateau(optimizer, nested=nested)),
            TypeError,
            r"but ReduceLROnPlateau steps on a metric; call its step\(metric\)",
        )
        for nested in (False, True)
    ),
    (lambda: schedule(of=lambda _: counter(training().optimizer)), ValueError, "belong to this wrapper .* LambdaLR be"),
    (lambda: schedule(of=lambda _: len), TypeError, r"must be one of torch.optim.lr_scheduler, got builtin_fun"),
    (lambda: schedule(to=lambda run: run.optimizer.inner), TypeError, "CustomOptimizer .*, got SGD; pass a torc"),
    (lambda: schedule("steps"), ValueError, '^by must be "progress", .* or "updates", got \'steps\'; pass one'),
    (
        lambda: scheduler(training(vbs.ConstantOptimizer, ref_batchsize=None), by="samples"),
        ValueError,
        'needs an optimizer with a ref_batchsize.*, got one without; .*by="updates"',
    ),
    *(
        (
            lambda total=total: schedule(total=total),
            ValueError,
            "^total must be a finite number >=? 0, got .*; pass the .* hold their last value, or omit it$",
        )
        for total in (0, math.inf)
    ),
    (lambda: average(decay=1), ValueError, r"decay"),
    (lambda: average(decay=math.nan), ValueError, r"decay"),
    (lambda: average(of=training().optimizer.inner), TypeError, r"optimizer must be a vbs\.CustomOptimizer"),
    (lambda: average([torch.ones(2, dtype=int)]), TypeError, "parameters must be floating-point tensors"),
    (lambda: average([]), ValueError, "there must be weights to average"),
    (lambda: average(kind=vbs.ConstantOptimizer, by="samples"), ValueError, 'by="samples" needs a ref_batchsize'),
    (
        lambda: average(use=lambda own, _: own.load_state_dict({"version": 1, "averages": {}})),
        ValueError,
        "averages of a state must have the shapes of the 4 parameters",
    ),
    (lambda: average(use=lambda own, run: own.copy_to(run.model)), ValueError, r"to another module than .* got its ow"),
    (lambda: average(use=lambda own, _: own.copy_to(nn.Linear(2, 2))), ValueError, "must have the shapes of the 4 par"),
]
THREE = torch.ones(3)
ARRIVING = [
    (lambda: arriving(minibatch_size=0), ValueError, "minibatch_size"),
    (lambda: arriving(minibatch_size=None, max_tokens=5), ValueError, "max_tokens= needs the lengths of the ro"),
    (lambda: arriving(max_tokens=5, lengths=len), ValueError, "bounds microbatches of any number of rows"),
    (
        lambda: arriving(minibatch_size=None, max_tokens=5, lengths=len, fixed_shape=True),
        ValueError,
        "bounds microbatches of any number of rows, .*fixed_shape=True",
    ),
    (lambda: arriving(counts="tokens"), TypeError, "counts must be a function"),
    (lambda: arriving(collate_fn=1), TypeError, "collate_fn must be a function"),
    (lambda: arriving(shared="no"), TypeError, "shared must be a bool"),
    (
        lambda: arriving(trace=vbs.AdaptiveTrace(vbs.adaptive.ConstantBatch(4))),
        TypeError,
        "trace must be a batch trace",
    ),
    (lambda: arriving(trace=4), ValueError, "streams= and trace= must come together, got only trace="),
    (lambda: arriving(streams=[[]]), ValueError, "streams= and trace= must come together, got only streams="),
    (lambda: arriving(streams=THREE, trace=4), TypeError, r"streams must be a list of iterables, .* pass \[stream\]"),
    (lambda: arriving(streams=[THREE] * 2, trace=4), ValueError, "different iterables, got one of them twice"),
    (lambda: arriving(streams=[THREE], trace=4, shared=True), ValueError, "shared= is for batches that arrive whole"),
    (lambda: arriving(THREE, key=lambda _: 1.5), TypeError, "key= must return a str or an int"),
    (lambda: vbs.updates([], arrived()).passes, AttributeError, "batches that arrive have no passes", True),
    (lambda: arriving((torch.ones(3), torch.ones(2))), ValueError, r"same number of rows"),
    *(
        (lambda bad=bad: arriving(bad), TypeError, "each field of a batch must have rows")
        for bad in (5, "text", (THREE, torch.tensor(1.0)))
    ),
    (lambda: arriving([{"x": THREE}]), TypeError, "and a list of rows needs a collate_fn"),
    (lambda: arriving(THREE, collate_fn=list), TypeError, "with collate_fn= each item must be a list of rows"),
    *(
        (lambda bad=bad: arriving(THREE, counts=lambda _: bad), error, "counts= must return an integer >= 0 fo")
        for bad, error in (([1, 2], ValueError), ([1, -2, 0], ValueError), ([0.5] * 3, ValueError))
    ),
    (
        lambda: arriving(THREE, max_tokens=4, lengths=lambda _: [4, 5, 1], minibatch_size=None),
        ValueError,
        r"at most max_tokens=4 tokens, .*5 in row 1; shorten",
    ),
    (lambda: arrived(vbs.LEGWRuleOptimizer, warmup_epochs=2), ValueError, "the warm-up of LEGW must be in epochs"),
    (lambda: vbs.updates([], arrived(), ahead=1), ValueError, "ahead must be 0 with batches that arrive"),
    (lambda: vbs.updates(3, arrived()), TypeError, "batches must be iterable"),
    (lambda: vbs.remaining_epochs(arriving(), arrived()), TypeError, r"have no epochs, use vbs.updates\(\)"),
    (lambda: arriving().trace, AttributeError, "have no trace", True),
    (lambda: arriving().set_epoch(1), ValueError, r"batches that arrive have one epoch, 0, got 1; loop over vb"),
    (lambda: vbs.updates([], arrived()).state_dict(), RuntimeError, "a state needs streams of rows, but these "),
]
LOOPS = [
    (
        lambda: vbs.CustomSampler(10, 4, max_updates=0),
        ValueError,
        "^max_updates must be an integer >= 1, got 0; pass a",
    ),
    (
        lambda: vbs.CustomSampler(10, 4, max_samples=0),
        ValueError,
        "^max_samples must be an integer >= 1, got 0; pass a",
    ),
    (lambda: remaining(sampler=lambda run: run.optimizer), TypeError, "sampler must be a vbs.CustomSampler"),
    (lambda: remaining(optimizer=lambda run: run.optimizer.inner), TypeError, "optimizer must be a vbs.CustomOptimize"),
    (lambda: remaining(optimizer=lambda _: []), TypeError, "or a list of them"),
    (lambda: remaining(optimizer=lambda run: [run.optimizer, 3]), TypeError, "optimizer must be a vbs.CustomOptimizer"),
    (
        lambda: remaining(optimizer=lambda _: LoggedTraining(CASE).optimizer),
        ValueError,
        "needs the optimizers of the sampler",
    ),
    (lambda: remaining(by="epoch"), ValueError, "by must be .* got 'epoch'"),
    (lambda: remaining("3"), TypeError, "until must be a finite number"),
    (lambda: remaining(-1), ValueError, "until must be a finite number"),
    (lambda: remaining(None), ValueError, "something must end the training"),
    (lambda: remaining(scheduler), ValueError, "schedule must have an end, got .* without total"),
    (
        lambda: remaining(lambda _: scheduler(LoggedTraining(CASE), total=1)),
        ValueError,
        "must belong to an optimizer of thi",
    ),
    (lambda: remaining(lambda run: scheduler(run, total=1), by="samples"), ValueError, "has its own unit, got by='sam"),
    (lambda: vbs.updates([], training().sampler), TypeError, "optimizer must be a vbs.CustomOptimizer, got"),
    (lambda: vbs.updates(3, training().optimizer), TypeError, "loader must be iterable, got"),
    (lambda: vbs.check_batch_norm(None, None), TypeError, r"must be a torch\.nn\.Module, got"),
    (lambda: vbs.check_batch_norm(network(), [1]), TypeError, r"must be a vbs\.CustomSampler, got"),
    (lambda: scaled_by_torch(model=Words(sparse=True)), TypeError, r"of parameter 0, .* must be dense, but has"),
    (partly_scaled, RuntimeError, "must be scaled, or none, but some have a scaler= and others have not"),
    (scaled_by_torch, RuntimeError, r"of optimizer\.backward\(loss, scaler=scaler\), .* scaled in the loop, "),
]
NUMBERS = [
    *(
        (lambda count=count: counted(count), error, rf"count must be .*{found}")
        for count, error, found in (
            ("9", TypeError, "got '9'"),
            (-1, ValueError, "got -1"),
            (torch.tensor(-2), ValueError, "got -2"),
            (torch.ones(2), TypeError, r"shape \(2,\)"),
        )
    ),
    (lambda: counted(reduction="mean"), ValueError, r"step\(count=\) needs a loss that is summed .* got red"),
    *(
        (lambda kind=kind: counted(kind=kind), ValueError, r"step\(count=\) needs gradients that nothing else weighs")
        for kind in (vbs.AdaScaleOptimizer, vbs.InvariantAdamRuleOptimizer)
    ),
    (lambda: training().optimizer.step(torch.tensor(3)), TypeError, r"closure must be a function, got .*; pass"),
    *(
        (lambda values=values: training().optimizer.log(**values), error, pattern)
        for values, error, pattern in (
            ({"loss": THREE}, ValueError, r"loss must be a mean over the rows .* shape \(3,\); pass its .mean"),
            ({"loss": "1"}, TypeError, "loss must be a number or a tensor with one element, got '1'"),
            ({"update": 1.0}, ValueError, 'a name must not be empty, "update"'),
            ({"": 1.0}, ValueError, "a name must not be empty"),
            ({"vbs/lr": 1.0}, ValueError, 'or begin with "vbs/"'),
        )
    ),
    (lambda: training(skip_grad_norm=0), ValueError, r"^skip_grad_norm must be .* > 0, got 0\.0; pass one, or "),
    (
        lambda: training(skip_grad_norm=lambda batch_size: 10.0 - batch_size).run(1),
        ValueError,
        r"^skip_grad_norm\(20\) must be a finite number >= 0, got -10\.0; return a",
    ),
    (
        lambda: training(skip_grad_norm=1.0, backend=ElasticThreads(Script(1, []), 0)),
        ValueError,
        r"^skip_grad_norm needs a fixed world, .*, got a \w+, which .*; clip with",
    ),
]
EXACT = {"sampling": {"reproducible": True}}
NORMALIZED = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
REPRODUCIBLE = [
    (lambda: vbs.updates([], training(**EXACT).optimizer, ahead=1), ValueError, "with ahead=0, got ahead=1, as a trai"),
    (lambda: training(**EXACT, model=NORMALIZED), ValueError, "see each sample alone, and keep nothing, got ba"),
    (
        lambda: training(**EXACT, model=broadcast(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2).double()))),
        ValueError,
        "see each sample alone, and keep nothing, got _SpectralNorm",
    ),
    (lambda: vbs.Seeded(range(9))[3], TypeError, r"vbs\.Seeded must be read by a loader with batch_sampler=Cus"),
    (lambda: vbs.Seeded(iter(())), TypeError, "dataset must have a length"),
]
EVERY = [*OPTIMIZERS, *INNER, *FACTORS, *SCHEDULES, *ARRIVING, *LOOPS, *NUMBERS, *REPRODUCIBLE]
MISTAKES = [Mistake(*one) for one in EVERY]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.pattern)
def test_a_mistake_is_named(mistake):
    check(mistake)


def test_devices_that_compile_graphs_refuse_what_they_cannot_count():
    kind = {"inner": torch.optim.Adafactor, "hyperparameters": {}}
    with (
        compile_on_the_cpu(),
        pytest.raises(TypeError, match=r"needs an optimizer whose state it can select .*, but Adafactor is another"),
    ):
        training(vbs.ConstantOptimizer, world=World(0, 1), skip_grad_norm=1.0, **kind)
