"""Mistakes with transformers' Trainer and a variable batch size: what each message says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, WeightedRandomSampler
from transformers import Trainer

import variable_batch_size as vbs
from helpers.transformers_jobs import Classifier, Rows, SavesAt, arguments, growing, grows, trainer_of
from helpers.yardstick import SAMPLES
from variable_batch_size.integrations.supported import table
from variable_batch_size.integrations.transformers import VariableBatchMixin, VariableBatchTrainer
from variable_batch_size.integrations.transformers.supported import SETTINGS, check_settings

PAGE = Path(__file__).parents[2] / "docs" / "trainers" / "transformers.md"


class Stream(IterableDataset[int]):
    """A dataset without an index."""

    def __iter__(self) -> Any:
        return iter(range(9))


def stream() -> Any:
    """Another one."""
    return datasets.Dataset.from_dict({"x": [[0.0] * 6], "labels": [0]}).to_iterable_dataset()


ADAPTIVE = vbs.AdaptiveTrace(vbs.adaptive.ConstantBatch(8))
LAYERWISE = {"optim": "galore_adamw_layerwise", "optim_target_modules": ["net"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gradient_accumulation_steps": 4},
            r"gradient_accumulation_steps must be 1, .* got 4; leave it out, and pass",
        ),
        ({"fp16": True}, r"fp16 must be False.*; pass bf16=True"),
        ({"auto_find_batch_size": True}, r"auto_find_batch_size must be False.*choose the microbatch"),
        ({"enable_jit_checkpoint": True}, r"enable_jit_checkpoint must be False.*; save by save_steps"),
        ({"train_sampling_strategy": "group_by_length"}, r'must be "random" or "sequential".*got group_by_length'),
        (LAYERWISE, r"optim must be an optimizer that makes its update in step\(\).*, got galore_adamw_layerwise"),
        (
            {"num_train_epochs": 0},
            r"num_train_epochs must be > 0 without max_steps, got 0; pass one, or max_steps \(see docs/trainers/transf",
        ),
        ({"train_dataset": Stream()}, r"max_steps has to be specified"),
        (
            {"train_dataset": stream(), "max_steps": 5, "trace": [24] * 4},
            r"must last .*max_steps=5, got one of 4",
        ),
        (
            {"train_dataset": stream(), "max_steps": 5, "trace": ADAPTIVE},
            r"trace must be a batch trace",
        ),
        ({"trace": 500}, r"at most the dataset's size of 203 samples, but the trace has a batch size of 500"),
        ({"trace": [24] * 5}, r"the trace must last until the training ends.*or pass on_end"),
        ({"trace": [24] * 5, "max_steps": 20}, r"the trace must last until the training ends.*or pass on_end"),
        ({"trace": "nowhere.csv"}, r"trace must be a CSV file, got 'nowhere.csv'.*correct the path"),
        ({"trace": grows}, r"trace must be a batch trace, or an AdaptiveTrace.*put AdaptiveTrace"),
        ({"rule": "sqrt"}, r"rule must be one of constant, .* got 'sqrt'; pass one of these"),
        ({"sampler_options": {"minibatch_size": 4}}, r"sampler_options must be what no setting.*got minibatch_size"),
    ],
)
def test_what_is_refused_at_once(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError, FileNotFoundError), match=message):
        trainer_of(tmp_path, **options)


@pytest.mark.parametrize(
    ("name", "place"), [("on_end", "sampler_options"), ("drop_last", "sampler_options"), ("noise", "optimizer_options")]
)
def test_an_argument_in_another_place(tmp_path: Path, name: str, place: str) -> None:
    message = rf"must be in {place}, got {name}=; pass {place}={{'{name}': ...}}"
    with pytest.raises(TypeError, match=message):
        VariableBatchTrainer(Classifier(), arguments(tmp_path), train_dataset=Rows(), trace=24, **{name: "hold"})


def test_a_rule_without_a_reference_is_refused_at_once(tmp_path: Path) -> None:
    own = {"train_dataset": Rows(), "rule": "root"}
    with pytest.raises(ValueError, match="needs ref_batchsize, but it is None; pass the batch size"):
        VariableBatchTrainer(Classifier(), arguments(tmp_path), trace=32, **own)
    with pytest.raises(ValueError, match=r"ref_batchsize must be a number with an AdaptiveTrace.*or max_steps"):
        VariableBatchTrainer(Classifier(), arguments(tmp_path), train_dataset=Rows(), trace=growing())
    VariableBatchTrainer(Classifier(), arguments(tmp_path, max_steps=2), train_dataset=Rows(), trace=growing())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"args": {"n_gpu": 2}}, "n_gpu must be at most 1 in a process, got 2; launch it with torchrun"),
        (
            {"distributed": "DEEPSPEED"},
            r"distributed_type must be NO, FSDP2, or .*, got DEEPSPEED; launch it without",
        ),
        (
            {"distributed": "FSDP", "version": 1},
            r"got FSDP1; launch it .*\"fsdp_version\": 2.*see docs/trainers/transf",
        ),
        ({"distributed": "MEGATRON_LM"}, "got MEGATRON_LM; launch it without DeepSpeed, Megatron-LM"),
        ({"get_tp_size": lambda: 2}, "parallelism_config must be without tensor, .*, got 2; leave it out"),
    ],
)
def test_launches_that_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    """Seen by a stand-in for a trainer on GPUs, or with DeepSpeed."""
    trainer = trainer_of(tmp_path)
    args = SimpleNamespace(**{**vars(trainer.args), "n_gpu": 0, "world_size": 1, **changed.get("args", {})})
    kind = SimpleNamespace(value=changed.get("distributed", "NO"))
    sizes = {name: changed.get(name, lambda: 1) for name in ("get_tp_size", "get_cp_size", "get_sp_size")}
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=changed.get("version", 2)))
    accelerator = SimpleNamespace(distributed_type=kind, state=state)
    stand_in = SimpleNamespace(args=args, accelerator=accelerator, _settings=trainer._settings, **sizes)
    with pytest.raises(ValueError, match=message):
        check_settings(stand_in)


def test_the_page_has_the_table_of_settings() -> None:
    assert table(SETTINGS) in PAGE.read_text(), f"copy this into {PAGE}:\n{table(SETTINGS)}"


def test_sharded_states_of_the_best_model_are_refused(tmp_path: Path) -> None:
    """By a stand-in for a launch with FSDP2: ranks of transformers 5.24 may load different checkpoints, or hang."""
    trainer = trainer_of(tmp_path)
    trainer.args.load_best_model_at_end = True
    trainer.accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    try:
        with pytest.raises(
            ValueError, match=r"load_best_model_at_end must be False with .*FULL_STATE_DICT in fsdp_con"
        ):
            check_settings(trainer)
        trainer.accelerator.state.fsdp_plugin.state_dict_type = "FULL_STATE_DICT"
        check_settings(trainer)
    finally:
        del trainer.accelerator.state.fsdp_plugin


def test_the_order_of_base_classes() -> None:
    with pytest.raises(
        TypeError, match=r"must come before the Trainer.*write class Mine\(VariableBatchMixin, \.\.\.\)"
    ):

        class Mine(Trainer, VariableBatchMixin):
            pass


def test_methods_of_a_class_above_the_mixin(tmp_path: Path) -> None:
    class OwnLoader(VariableBatchTrainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_size=8)

    class OwnStep(VariableBatchTrainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            inputs["x"] += 1
            return super().training_step(model, inputs, num_items_in_batch)

    class OwnForward(VariableBatchTrainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            return model(**inputs)["loss"]

    with pytest.raises(TypeError, match=r"the loader must be that of VariableBatchMixin.*override it in a class below"):
        trainer_of(tmp_path, kind=OwnLoader).train()
    for kind in OwnStep, OwnForward:
        with pytest.raises(TypeError, match=r"is an update, the list of its microbatches.*override compute_loss\(\)"):
            trainer_of(tmp_path, kind=kind).train()


def test_an_optimizer_of_a_class_above_the_mixin(tmp_path: Path) -> None:
    class OwnOptimizer(VariableBatchTrainer):
        def create_optimizer(self, *_: Any) -> Any:
            len(self.get_train_dataloader())  # as a schedule may need it
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
            return self.optimizer

    trainer = trainer_of(tmp_path, kind=OwnOptimizer, max_steps=2)
    trainer.train()
    assert isinstance(trainer.variable_optimizer.inner, torch.optim.SGD)


def some() -> Any:
    """A sampler that repeats some samples and leaves out others."""
    return WeightedRandomSampler([1.0] * 10, SAMPLES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": some()}, r"must read each sample once an epoch.*leave out sampler="),
        ({"batch_sampler": [[0, 1], [2, 3]], "batch_size": 1}, r"must read each sample once an epoch.*\(list\)"),
    ],
    ids=["sampler", "batch_sampler"],
)
def test_a_loader_that_reads_other_samples(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    class Theirs(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, **{"batch_size": 8, **options})

    class Mine(VariableBatchMixin, Theirs):
        pass

    with pytest.raises((TypeError, ValueError), match=message):
        trainer_of(tmp_path, kind=Mine).train()


def test_a_sampler_of_a_subclass(tmp_path: Path) -> None:
    class Chooses(VariableBatchTrainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return some()

    with pytest.raises(TypeError, match=r"must read each sample once an epoch.*WeightedRandomSampler"):
        trainer_of(tmp_path, kind=Chooses).train()


def test_a_trainer_that_repeats_samples(tmp_path: Path) -> None:
    class RepeatSampler(Sampler[int]):
        def __iter__(self) -> Any:
            return iter([0, 0, 1, 1])

    class Repeats(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return RepeatSampler()

    class Mine(VariableBatchMixin, Repeats):
        pass

    with pytest.raises(TypeError, match=r"RepeatSampler.*; leave out .*if it is that of.*GRPOTrainer, cannot be used"):
        trainer_of(tmp_path, kind=Mine).train()


def test_an_argument_that_was_changed_later(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.args.gradient_accumulation_steps = 4
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps must be 1, .* got 4; leave it out, and pass"):
        trainer.train()


def test_arguments_that_are_seen_when_the_training_begins(tmp_path: Path) -> None:
    model = Classifier()
    wrapped = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), 0.1), vbs.CustomSampler(203, 32, 1, 0))
    with pytest.raises(TypeError, match="ConstantOptimizer cannot be the inner optimizer: wrap the optimizer inside"):
        trainer_of(tmp_path, model, options={"optimizers": (wrapped, None)}).train()
    with pytest.raises(ValueError, match=r"optimizer_options must be what no setting.*got max_grad_norm; leave it out"):
        trainer_of(tmp_path, options={"optimizer_options": {"max_grad_norm": 1.0}}).train()
    with pytest.raises(RuntimeError, match=r"none was created yet; call train\(\)"):
        _ = trainer_of(tmp_path).variable_optimizer


def test_checkpoints_of_something_else(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 5, "max_steps": 5}
    Trainer(Classifier(), arguments(tmp_path / "plain", **saves), train_dataset=Rows()).train()
    trainer_of(tmp_path / "only-model", save_only_model=True, **saves).train()
    trainer_of(tmp_path / "own", options={"callbacks": [SavesAt()]}).train()
    for folder, options, message in (
        ("plain", {}, r"the position in the training.*; resume from a checkpoint of this training, or begin a new one"),
        ("only-model", {}, r"must resume with its optimizer, but the checkpoint of step 5 has none; resume from one"),
        ("own", {"seed": 3}, r"but seed was 0 and is 3; resume from a checkpoint of this training, or begin"),
        ("own", {"train_dataset": Rows(200)}, r"but dataset_size was 203 and is 200; resume from a checkpoint of"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            trainer_of(tmp_path / "new", **options).train(str(tmp_path / folder / "checkpoint-5"))
