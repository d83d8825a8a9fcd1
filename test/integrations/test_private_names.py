"""The private names that are left, against the installed versions of the trainers."""

from __future__ import annotations

import re
from importlib import import_module
from inspect import getsource
from pathlib import Path

import pytest

from helpers.frameworks import missing

INTEGRATIONS = Path(__file__).parents[2] / "variable_batch_size" / "integrations"

LEFT = {
    "accelerate": {},
    "transformers": {},
    "keras": {"model.py": {"_learning_rate", "_symbolic_build"}, "optimizer.py": {"_learning_rate"}},
    "ignite": {"ignite.py": {"_init_iter", "_prepare_batch"}},
    "lightning": {"strategy.py": {"_accelerator_connector", "_zero_grad_fn"}},
}  # trainer -> file -> names


def private_names(integration, objects):
    """Return the private names of some objects of a trainer that the files of an integration use, by file."""
    theirs = {name for one in objects for name in dir(one) if re.fullmatch(r"_[a-z]\w*", name)}
    used = re.compile(rf"(?:[.\"']|def |import (?:.*, )?)({'|'.join(sorted(theirs))})\b")
    paths = sorted([*INTEGRATIONS.glob(f"{integration}.py"), *INTEGRATIONS.glob(f"{integration}/*.py")])
    return {path.name: names for path in paths if (names := {*used.findall(path.read_text())})}


def of_accelerate():
    parts = import_module("accelerate"), import_module("accelerate.optimizer"), import_module("accelerate.scheduler")
    return parts[0].Accelerator, parts[1].AcceleratedOptimizer, parts[2].AcceleratedScheduler


def of_ignite():
    engine = import_module("ignite.engine")
    return engine, engine.Engine(lambda *_: None)


def of_keras():
    keras = import_module("helpers.keras_backend").keras
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model, model.optimizer, keras.callbacks.CallbackList(), type("Output", (), {"_keras_mask": None})


def of_lightning():
    pytorch, strategies = import_module("lightning.pytorch"), import_module("lightning.pytorch.strategies")
    trainer = pytorch.Trainer(accelerator="cpu", logger=False)
    epoch_loop = trainer.fit_loop.epoch_loop
    loops = trainer.fit_loop, epoch_loop, epoch_loop.automatic_optimization, epoch_loop.manual_optimization
    closure = import_module("lightning.pytorch.loops.optimization.automatic").Closure(None, None)
    parts = closure, strategies.DDPStrategy(), strategies.ModelParallelStrategy(), pytorch.LightningModule()
    return trainer, *loops, *parts, import_module("lightning.pytorch.core.optimizer").LightningOptimizer


def of_transformers():
    modules = import_module("transformers.trainer"), import_module("trl.trainer.sft_trainer")
    own = {name for module in modules for name in re.findall(r"self\.(_[a-z]\w*)", getsource(module))}
    return *modules, modules[0].Trainer, *of_accelerate(), type("Trainers", (), dict.fromkeys(own))


OBJECTS = {
    "accelerate": of_accelerate,
    "ignite": of_ignite,
    "keras": of_keras,
    "lightning": of_lightning,
    "transformers": of_transformers,
}


@pytest.mark.parametrize("trainer", [trainer for trainer in OBJECTS if not missing(trainer)])
def test_internals_are_those_of_the_list(trainer):
    """The names are looked for among those that the installed version has."""
    assert private_names(trainer, OBJECTS[trainer]()) == LEFT[trainer]
