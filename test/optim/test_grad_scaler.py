"""Mixed precision: torch's GradScaler and autocast around the wrapper."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from helpers.processes import run_job
from helpers.reference import REF, SIZES, assert_equal, training, twin
from variable_batch_size.testing import run_ranks


def scaled_steps(run, scaler, spoil=-1):
    """The rest of an epoch under a GradScaler; the loss of microbatch number `spoil` is infinite."""
    for number, indices in enumerate(run.sampler):
        loss = run.loss(indices) * (torch.inf if number == spoil else 1)
        run.optimizer.backward(loss, scaler=scaler)
        yield scaler.step(run.optimizer)
        scaler.update()


@pytest.mark.parametrize("kind", [vbs.RootRuleOptimizer, vbs.LinearRuleMomentumOptimizer, vbs.SqrtSDERuleOptimizer])
@pytest.mark.parametrize("spoil", [-1, 0, 2, 3])  # no loss of rank 1, one of update 0 or 1, and that of a replay
def test_the_update_is_exact_if_the_loss_scale_changes_within_a_step_or_skipped_on_all_ranks(kind, spoil):
    def train(backend):
        run = training(kind, SIZES[:4], dataset_size=61, backend=backend, max_grad_norm=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        made = sum(scaled_steps(run, scaler, spoil if backend.world.rank == 1 else -1))
        assert scaler.get_scale() > 2.0**8 or spoil >= 0
        return run, made

    skipped = {0: [0], 2: [1]}.get(spoil, [])
    for run, made in run_ranks(train, 3):
        assert_equal(run.weights(), twin(kind, SIZES[:4], dataset_size=61, max_grad_norm=0.5, skipped=skipped))
        assert made == 4 - len(skipped)
        assert run.optimizer.progress == pytest.approx((61 - sum(SIZES[step] for step in skipped)) / REF)
        assert (run.optimizer.updates, run.optimizer.samples) == (4, 61)


def test_a_step_without_its_scaler_is_refused():
    run, scaler = training(), torch.amp.GradScaler("cpu")
    run.optimizer.backward(run.loss(next(iter(run.sampler))), scaler=scaler)
    with pytest.raises(RuntimeError, match=r"step\(\) was called without it; call scaler\.step\(optimizer\)"):
        run.optimizer.step()


def test_a_scale_that_is_too_large_costs_few_updates_for_any_number_of_microbatches():
    """All microbatches of a step have one scale, but those that follow one that overflows need not do so, too."""

    def train(minibatch_size):
        options = {"dataset_size": 1600, "dtype": torch.float32, "minibatch_size": minibatch_size}
        run = training(vbs.RootRuleOptimizer, [160], **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=10**6)
        made = 0
        for indices in run.sampler:
            run.optimizer.backward(run.loss(indices), scaler=scaler)
            made += bool(scaler.step(run.optimizer))
            scaler.update()
        return scaler.get_scale(), made

    for minibatch_size in (40, 4):
        scale, made = train(minibatch_size)
        assert scale >= train(160)[0] / 4
        assert made >= train(160)[1] - 1


def overflow_on_rank_1(backend):
    """The first microbatch of rank 1 has large gradients; return the scale of this rank, and the updates made."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    sampler = vbs.CustomSampler(60, 4, backend.world.size, backend.world.rank, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = vbs.ConstantOptimizer(inner, sampler, model=model, backend=backend)
    scaler, made = torch.amp.GradScaler("cpu", init_scale=2.0**125), 0
    for update in vbs.updates(sampler, optimizer):
        for number, rows in enumerate(update):
            factor = 1e3 if (backend.world.rank, number) == (1, 0) else 1.0
            optimizer.backward(model(torch.ones(len(rows), 1)).mean() * factor, scaler=scaler)
            made += bool(scaler.step(optimizer))
            scaler.update()
    return scaler.get_scale(), made


@pytest.mark.slow("starts processes")
def test_the_scale_falls_where_a_microbatch_of_one_rank_overflows_in_ddp():
    """Its scaler alone makes its scale smaller: that of the others is too large then."""
    (_, made), (scale, also_made) = run_job("gloo", overflow_on_rank_1, ranks=2)
    assert made == also_made > 5
    assert scale < 2.0**125
