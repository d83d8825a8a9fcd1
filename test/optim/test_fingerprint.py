"""Law 6 for devices that compile each Python number: an update issues the same operations as the one before."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.fingerprint import compile_on_the_cpu, differences, fingerprints, in_processes
from helpers.processes import run_job
from helpers.properties import examples
from helpers.xla_graphs import REF, Training

SIZES = (20, 17, 30, 9, 2, 3, REF, 33, 2 * REF, 25, 41, REF // 2, 12, REF, 9, 20, 3, 17, 25, 30)


@pytest.mark.parametrize(
    "training",
    [
        Training(SIZES),
        Training(SIZES, ("linear", "root"), hyperparameters={"momentum": 0.9, "weight_decay": 0.1}),
        Training(SIZES, ("linear", "root"), hyperparameters={"momentum": 0.9, "foreach": True}),
        Training(SIZES, "constant", schedule=(1.0, 0.5, 0.0, 5.0, -5.0)),
        Training(SIZES, "linear", "AdamW"),
        Training(SIZES, "linear", "AdamW", hyperparameters={"foreach": True}),
        Training(SIZES, "sqrt-sde", "AdamW", (0.01, 0.01)),
        Training(SIZES, "linear", "AdamW", hyperparameters={"fused": True}),
        Training(SIZES, "linear", "SGD", (torch.tensor(0.1), torch.tensor(0.2))),
        Training(SIZES, "root-half-life", "RMSprop", hyperparameters={"momentum": 0.9, "alpha": 0.9}),
        Training(SIZES, "surge", "AdamW"),
        Training(SIZES, "invariant-adam", "AdamW", (0.01, 0.01)),
        Training(SIZES, ("invariant-adam", "root"), "Adam", (0.01, 0.02), options={"max_grad_norm": 0.5}),
        Training(SIZES, "adascale"),
        Training(SIZES, "adamscale", "AdamW"),
        Training(SIZES, "adascale", options={"noise": "differenced"}),
        Training(SIZES, options={"noise": "microbatches"}),
        Training(SIZES, options={"max_grad_norm": 0.5}, loop="log"),
        Training(SIZES, options={"reduction": "sum"}),
        Training(SIZES, loop="zero_grad"),
        Training(SIZES, loop="reads"),
        Training(SIZES, loop="counts"),
        Training(SIZES, controlled=True),
        Training(SIZES, "adascale", loop="resumes"),
        *(
            Training(SIZES, kind=kind, hyperparameters=own, options={"skip_grad_norm": 1.0})
            for kind, own in (("SGD", {"momentum": 0.9}), ("AdamW", {}), ("NAdam", {}), ("Adagrad", {"lr_decay": 0.1}))
        ),
        Training(SIZES, "adascale", options={"skip_grad_norm": 1.0, "max_grad_norm": 0.5}, loop="log"),
        Training(SIZES, "root", "AdamW", options={"skip_grad_norm": 1.0}, loop="reads"),
        Training(SIZES, "sqrt-sde", "AdamW", (0.01, 0.01), options={"skip_grad_norm": 1.0}),
        Training(SIZES, "sqrt-sde", "AdamW", (torch.tensor(0.01), torch.tensor(0.02)), options={"skip_grad_norm": 1.0}),
        Training(SIZES, ("invariant-adam", "root"), "Adam", (0.01, 0.02), options={"skip_grad_norm": 1.0}),
        Training((REF, REF, *SIZES), "root-half-life", "AdamW", (0.01, 0.01), options={"skip_grad_norm": 1.0}),
        # Not RAdam, whose rectification begins by a branch on the host.
        *(Training(SIZES, kind=kind) for kind in ("NAdam", "Adagrad", "Adadelta", "Adamax")),
    ],
    ids=repr,
)
def test_updates_of_as_many_microbatches_issue_the_same(training):
    with compile_on_the_cpu():
        found = fingerprints(training)
    assert len(found) > 3
    assert not differences(found)


@examples(20)
@given(
    st.lists(st.integers(1, 45), min_size=12, max_size=24),
    st.sampled_from(
        [
            *(("SGD", rule) for rule in ("constant", "linear", "root", "linear-momentum", "adascale")),
            *(
                ("AdamW", rule)
                for rule in ("root", "sqrt-sde", "root-half-life", "invariant-adam", "adamscale", "surge")
            ),
        ]
    ),
    st.sampled_from(["", "zero_grad", "log", "reads", "resumes"]),
    st.booleans(),
)
def test_it_is_so_under_any_trace(sizes, kind_and_rule, loop, clips):
    kind, rule = kind_and_rule
    options = {"max_grad_norm": 0.5} if clips else {}
    hyperparameters = {"momentum": 0.9} if kind == "SGD" else {}
    with compile_on_the_cpu():
        found = fingerprints(
            Training((*sizes,), rule, kind, loop=loop, options=options, hyperparameters=hyperparameters)
        )
    assert not differences(found)


@pytest.mark.slow("starts processes")
def test_ranks_issue_the_same_however_their_sums_are_made():
    variants = {
        "linear": Training(SIZES),
        "clipping": Training(SIZES, options={"max_grad_norm": 0.5}, kind="AdamW"),
        "adascale": Training(SIZES, "adascale"),
        "log": Training(SIZES, "root", loop="log"),
        "counts": Training(SIZES, loop="counts"),
    }
    cases = {
        f"{name}, {kind}": (training, kind) for name, training in variants.items() for kind in ("bare", "ddp", "fsdp2")
    }
    for found in run_job("gloo", in_processes, cases, ranks=2):
        assert found.keys() == cases.keys()
        assert {name: pairs for name, pairs in found.items() if pairs} == {}
