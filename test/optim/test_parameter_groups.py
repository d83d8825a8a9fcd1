"""A rule for each parameter group, and lists of parameters that the user changes in place."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import variable_batch_size as vbs
from helpers.properties import examples
from helpers.reference import EQUATIONS, REF, SGD, SIZES, assert_equal, batches, gradient, network, rule_at, training
from helpers.twins import InnerTwin, PlainTraining
from variable_batch_size.testing import run_ranks

RULES = {
    vbs.rules.LinearRule(): vbs.LinearRuleOptimizer,
    vbs.rules.RootRule(): vbs.RootRuleOptimizer,
    vbs.rules.LinearMomentumRule(): vbs.LinearRuleMomentumOptimizer,
}


def layers(parameters, **hyperparameters):
    """A group for each of the two layers."""
    weights = list(parameters)
    return torch.optim.SGD([{"params": weights[:2]}, {"params": weights[2:]}], **hyperparameters)


def by_layer(rules, sizes, dataset_size, max_grad_norm):
    """SGD with rules[0] for the two weights of the first layer and rules[1] for the second, one big batch an update."""
    run = training(vbs.ConstantOptimizer, sizes, dataset_size=dataset_size)
    x, target, weights = run.x.numpy(), run.target.numpy(), dict(enumerate(run.weights()))
    inner = InnerTwin(torch.optim.SGD, weights, [([0, 1], SGD), ([2, 3], SGD)])
    plain = PlainTraining(weights, inner.step, max_grad_norm)
    for batch in batches(sizes, dataset_size):
        gradients = dict(enumerate(gradient(list(weights.values()), x[batch], target[batch])))
        of_layers = [rule_at(EQUATIONS[RULES[rule]].factors, len(batch), 1, dataset_size) for rule in rules]
        plain.update(gradients, [], of_layers)
    return list(weights.values())


@examples(40)
@given(
    rules=st.tuples(st.sampled_from(sorted(RULES, key=str)), st.sampled_from(sorted(RULES, key=str))),
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    world=st.integers(1, 4),
    max_grad_norm=st.sampled_from([None, 0.5, 1e6]),
)
def test_each_group_follows_its_rule(rules, sizes, world, max_grad_norm):
    def train(backend):
        options = {"rule": rules, "ref_batchsize": REF, "max_grad_norm": max_grad_norm}
        run = training(vbs.CustomOptimizer, sizes, dataset_size=200, inner=layers, backend=backend, **options)
        return run.run(len(sizes))

    expected = by_layer(rules, sizes, dataset_size=200, max_grad_norm=max_grad_norm)
    for rank in run_ranks(train, world):
        assert_equal(rank.weights(), expected)


def make(*rules, **options):
    return training(vbs.CustomOptimizer, SIZES, dataset_size=sum(SIZES), inner=layers, rule=rules, **options)


def test_lr_factor_learning_rate_and_progress_are_those_of_the_first_group():
    run = make(vbs.rules.RootRule(), vbs.rules.LinearRule(), ref_batchsize=REF).run(1)
    k = SIZES[0] / REF
    assert run.optimizer.lr_factor() == pytest.approx(k**0.5)
    assert run.optimizer.current_lr() == pytest.approx(SGD["lr"] * k**0.5)
    mixed = make(vbs.rules.ConstantRule(), vbs.rules.LinearRule(), ref_batchsize=REF).run(3)
    assert mixed.optimizer.progress == 3


def test_rules_holds_one_rule_for_each_group():
    rule = vbs.rules.RootRule()
    (only,) = training(vbs.CustomOptimizer, rule=rule, ref_batchsize=REF).optimizer.rules
    assert only is rule
    both = training(vbs.CustomOptimizer, inner=layers, rule=rule, ref_batchsize=REF).optimizer.rules
    assert [one is rule for one in both] == [True, True]
    rules = [vbs.rules.LinearRule(), vbs.rules.RootRule()]
    optimizer = training(vbs.CustomOptimizer, inner=layers, rule=rules, ref_batchsize=REF).optimizer
    rules.reverse()
    assert optimizer.rules == (vbs.rules.LinearRule(), vbs.rules.RootRule())


def test_rejects_a_new_group_if_every_group_has_its_own_rule():
    run = make(vbs.rules.LinearRule(), vbs.rules.RootRule(), ref_batchsize=REF).run(1)
    group = {"params": [torch.zeros(1, requires_grad=True)]}
    with pytest.raises(ValueError, match=r"got 2 for 3; .* add it to the inner optimizer and wrap it again"):
        run.optimizer.add_param_group(group)
    assert len(run.optimizer.param_groups) == 2


def test_a_group_is_added_after_a_backward_that_is_dropped():
    def train(backend, dropped):
        model = network()
        first, _, last = model
        first.requires_grad_(False)
        inner = {"inner": lambda _, **options: torch.optim.SGD(last.parameters(), **options)}
        options = {"model": model, "backend": backend, "dataset_size": sum(SIZES), **inner}
        run = training(vbs.LinearRuleMomentumOptimizer, **options)
        for updated in run.steps():
            if updated and run.optimizer.updates == 4:
                if dropped:
                    run.loss([0, 1, 2]).backward()
                    run.optimizer.zero_grad()
                first.requires_grad_(True)
                run.optimizer.add_param_group({"params": list(first.parameters()), "lr": 0.03})
        return run.weights()

    expected = train(vbs.backend.LocalBackend(), False)
    for found in run_ranks(lambda backend: [train(backend, dropped) for dropped in (False, True)], 2):
        for weights in found:
            assert_equal(weights, expected)


# Lists that are changed in place: adopted between steps, refused within one. ------------------------------------------


CHANGES = ["append", "extend", "replace an item", "replace the list", "append a group", "pop a group", "remove"]


class Problem:
    """A sum of linear maps, of which each parameter may be trained or not, and its gradients by autograd.

    Before each inner step, `.grad` of every trained parameter is compared with the gradient of the mean loss over the
    samples of the step, at the present weights.
    """

    def __init__(self, sizes, backend, number=6, **options):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(200, 4, generator=generator, dtype=torch.float64)
        self.weights = [self.new(seed) for seed in range(number)]
        world = backend.world
        self.sampler = vbs.CustomSampler(
            200, list(sizes), world.size, world.rank, minibatch_size=3, on_end="hold", fixed_shape=False
        )
        inner = torch.optim.SGD([self.weights[0], self.weights[1]], lr=0.01, momentum=0.5)
        self.optimizer = vbs.LinearRuleOptimizer(inner, self.sampler, 4, backend=backend, **options)
        self.optimizer.register_step_pre_hook(self._check)
        self.checked = 0

    @staticmethod
    def new(seed):
        return nn.Parameter(torch.randn(4, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))

    def loss(self, indices):
        rows = sum(torch.tanh(self.x[indices] @ weight) * (1 + number) for number, weight in enumerate(self.weights))
        assert isinstance(rows, Tensor)
        return rows.square().sum(dim=1).mean()

    def trained(self):
        return list(dict.fromkeys(p for group in self.optimizer.param_groups for p in group["params"]))

    def _check(self, *_):
        batches, due = self.sampler.batches, self.sampler.due
        step, order = batches.step(due), batches.order(due.epoch)
        samples = [int(order(i)) for i in range(step.start, step.start + step.batch_size)]
        with torch.enable_grad():
            expected = torch.autograd.grad(self.loss(samples), self.trained())
        for parameter, right in zip(self.trained(), expected, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, right, rtol=1e-12, atol=1e-12)
        self.checked += 1

    def change(self, kind, number):
        """Change the lists of the optimizer, the same on every rank; parameter 0 stays."""
        groups = self.optimizer.param_groups
        known = {id(p) for p in self.trained()}
        idle = [p for p in self.weights if id(p) not in known]
        if kind == "append" and idle:
            groups[0]["params"].append(idle[number % len(idle)])
        elif kind == "extend":
            groups[0]["params"].extend(idle)
        elif kind == "replace an item" and len(groups[0]["params"]) > 1:
            old = groups[0]["params"][1]
            new = self.new(100 + number)
            groups[0]["params"][1] = new
            self.weights = [new if weight is old else weight for weight in self.weights]
        elif kind == "replace the list":
            groups[0]["params"] = [*groups[0]["params"], *idle[:1]]
        elif kind == "append a group" and idle:
            groups.append({**(groups[0] if number % 2 else {}), "params": idle[:1]})  # what is missing is the default
        elif kind == "pop a group" and len(groups) > 1:
            groups.pop()
        elif kind == "remove" and len(groups[0]["params"]) > 1:
            groups[0]["params"].pop()


@given(
    sizes=st.lists(st.integers(1, 14), min_size=1, max_size=5),
    changes=st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 9)), min_size=1, max_size=6),
    world=st.integers(1, 3),
    options=st.sampled_from([{}, {"max_grad_norm": 1e9}, {"find_unused_parameters": True}]),
    by=st.sampled_from(["loss", "optimizer"]),
)
@examples(60)
def test_lists_that_are_changed_between_steps_are_adopted(sizes, changes, world, options, by):
    def train(backend):
        problem, left = Problem(sizes, backend, **options), list(changes)
        for indices in problem.sampler:
            loss = problem.loss(indices)
            loss.backward() if by == "loss" else problem.optimizer.backward(loss)
            for parameter in problem.weights:  # as plain torch needs it for those that it does not train
                if id(parameter) not in map(id, problem.trained()):
                    parameter.grad = None
            if problem.optimizer.step():
                if not left:
                    break
                problem.change(*left.pop(0))
        return problem

    first, *others = run_ranks(train, world)
    assert first.checked == len(changes) + 1
    for other in others:
        for own, weight in zip(first.weights, other.weights, strict=True):
            torch.testing.assert_close(own, weight, rtol=0, atol=0)


@pytest.mark.parametrize("kind", CHANGES)
def test_lists_that_are_changed_within_a_step_are_refused(kind):
    problem = Problem([12], vbs.backend.LocalBackend())
    problem.change("append a group", 0)
    batches = iter(problem.sampler)
    problem.loss(next(batches)).backward()
    problem.optimizer.step()
    problem.change(kind, 0)
    problem.loss(next(batches)).backward()
    with pytest.raises(RuntimeError, match=r"lists of param_groups were changed in step 0; change them when"):
        problem.optimizer.step()
    problem.optimizer.discard_step()
    for indices in problem.sampler:
        problem.optimizer.zero_grad()
        problem.loss(indices).backward()
        if problem.optimizer.step():
            break
    assert problem.checked == 1


@given(
    sizes=st.lists(st.integers(1, 14), min_size=1, max_size=4),
    world=st.integers(1, 2),
    groups=st.integers(1, 2),
    rule=st.sampled_from(["linear", "linear-momentum", "adascale"]),
)
@examples(30)
def test_a_parameter_that_is_listed_twice_counts_once(sizes, world, groups, rule):
    """As in `list(encoder.parameters()) + list(decoder.parameters())` with a tied weight."""

    def train(backend):
        problem = Problem(sizes, backend)
        first, second = problem.weights[:2]
        others = [{"params": [problem.weights[2]]}] * (groups - 1)
        inner = torch.optim.SGD([{"params": [first, second, first]}, *others], lr=0.001)

        def check(*_):
            for parameter in problem.trained():  # undo what the rule multiplies
                assert parameter.grad is not None
                if rule == "linear-momentum":
                    parameter.grad = parameter.grad / (sizes[optimizer.updates] / 4)
            problem._check()

        optimizer = vbs.CustomOptimizer(inner, problem.sampler, 4, rule=rule, backend=backend)
        problem.optimizer = optimizer
        optimizer.register_step_pre_hook(check)
        for indices in problem.sampler:
            problem.loss(indices).backward()
            if optimizer.step() and optimizer.updates == len(sizes):
                break
        return problem.checked

    with warnings.catch_warnings():  # of all threads
        warnings.filterwarnings("ignore", "optimizer contains a parameter group with duplicate parameters")
        assert run_ranks(train, world) == [len(sizes)] * world


# What belongs to parameters goes with them. ---------------------------------------------------------------------------


def loop(kind, inner, minibatch_size, change, updates=6, *, raw=True, **options):
    """Train a small network, by `loss.backward()` if `raw`, with groups that `change` changes before update 3."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    x = torch.randn(12 * updates, 4, dtype=torch.float64)
    sampler = vbs.CustomSampler(len(x), 12, num_replicas=1, rank=0, minibatch_size=minibatch_size, shuffle=False)
    optimizer = kind(inner(model), sampler, 8, **options)
    for indices in sampler:
        if optimizer.updates == 3 and not optimizer.inside_step:
            change(optimizer, model)
        loss = model(x[indices]).square().mean()
        loss.backward() if raw else optimizer.backward(loss)
        optimizer.step()
    return model, optimizer


def head(model):
    return torch.optim.SGD(model[2].parameters(), lr=0.1)


def test_gradients_from_before_a_change_of_the_lists_are_refused():
    def extend(optimizer, model):
        optimizer.param_groups[0]["params"] += list(model[0].parameters())

    with pytest.raises(
        RuntimeError, match=r"of this microbatch only, but its \.grad was added to; .* optimizer\.zero_grad"
    ):
        loop(vbs.ConstantOptimizer, head, 4, extend)

    def extend_and_drop(optimizer, model):
        extend(optimizer, model)
        optimizer.zero_grad()

    def add(optimizer, model):
        optimizer.add_param_group({"params": list(model[0].parameters())})

    ways = [loop(vbs.ConstantOptimizer, head, 4, way)[0] for way in (extend_and_drop, add)]
    assert_equal(*([parameter.detach().numpy() for parameter in model.parameters()] for model in ways))


def test_the_gradient_of_an_update_is_not_compared_with_that_of_other_parameters():
    def swap(optimizer, model):
        parameters = optimizer.param_groups[0]["params"]
        parameters[0], parameters[2] = parameters[2], parameters[0]

    def all_of(model):
        return torch.optim.SGD(model.parameters(), lr=1e-9)

    counts = [
        loop(vbs.AdaScaleOptimizer, all_of, 16, change, raw=False, noise="differenced")[1].noise().updates
        for change in (lambda *_: None, swap)
    ]
    assert counts == [5, 4]


def test_the_bias_correction_goes_with_the_parameters_of_a_group():
    def adam(model):
        groups = [{"params": model[0].parameters(), "betas": (0.5, 0.9)}, {"params": model[2].parameters()}]
        return torch.optim.Adam(groups, lr=0.01, betas=(0.95, 0.999))

    def reverse(optimizer, model):
        optimizer.param_groups.reverse()

    models = [loop(vbs.SqrtSDERuleOptimizer, adam, 4, change)[0] for change in (lambda *_: None, reverse)]
    assert_equal(*([parameter.detach().numpy() for parameter in model.parameters()] for model in models))
