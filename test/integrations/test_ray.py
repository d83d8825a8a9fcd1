"""Ray Train: workers of a real cluster are killed and added, and the updates stay those of one process."""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain

import pytest
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import variable_batch_size as vbs
from helpers.commands import wait_for
from helpers.pages import DOCS, blocks
from helpers.ray_cluster import ray_environment
from helpers.ray_training import PER_WORKER, train
from helpers.reference import batches
from helpers.trainings import TrainerCase, expected
from helpers.yardstick import SAMPLES, SIZES, UPDATES
from variable_batch_size.integrations.ray import RunCheckpoint

pytestmark = [
    pytest.mark.slow("starts a Ray cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),  # of Ray's own settings
]

NODE = {"num_cpus": 1, "object_store_memory": 10**8}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster of a head, where no worker may be, and two nodes for a worker each."""
    variables = {
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",  # which a report waits for
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15",  # for nodes that have gone without its notice
        "OMP_NUM_THREADS": "1",
    }
    with ray_environment(tmp_path_factory.mktemp("ray"), **variables):
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False})
        try:
            for _ in range(2):
                cluster.add_node(**NODE)
            ray.init(address=cluster.address)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def fit(folder, workers, *, max_failures=0, **config):
    """Train a run in `folder`, whose workers write down in `folder/records` what they do."""
    (folder / "records").mkdir(exist_ok=True)
    run = RunConfig("a", storage_path=str(folder), failure_config=FailureConfig(max_failures=max_failures))
    scaling = ScalingConfig(num_workers=workers, elastic_resize_monitor_interval_s=1)
    config["folder"] = str(folder / "records")
    return TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run).fit()


def assert_as_one_process(folder, result, sizes, updates, worlds):
    """The last attempt of each update had the samples of its batch, and the weights are those by hand."""
    attempts = defaultdict(dict)
    for path in (folder / "records").glob("*.jsonl"):
        for restored, number, world, samples in map(json.loads, path.read_text().splitlines()):
            ranks = attempts[number].setdefault((restored, world), [])
            ranks.append(samples)
    last = [max(attempts[number].items()) for number in sorted(attempts)]
    assert [len(ranks) for (_, world), ranks in last] == [world for (_, world), _ in last] == worlds
    planned = [sorted(batch.tolist()) for _, batch in zip(range(updates), batches(sizes, SAMPLES), strict=False)]
    assert [sorted(chain(*ranks)) for _, ranks in last] == planned
    by_hand = expected(TrainerCase(), tuple(sizes), updates)
    assert result.metrics["update"] == updates
    assert result.metrics["samples"] == by_hand.samples
    assert result.metrics["loss"] == pytest.approx(by_hand.losses[-1], rel=1e-12)
    weights = vbs.read_checkpoint(result.checkpoint.path)["parts"]["model"].values()
    difference = (torch.cat([one.flatten() for one in weights]) - by_hand.weights).abs().max()
    assert difference < 1e-12 * by_hand.weights.abs().max()


def test_two_workers_that_failed_are_resumed(cluster, tmp_path):
    settings = {"adaptive": False, "events": {0: ["raise", 13]}}
    with pytest.raises(ray.train.TrainingFailedError, match="an error of the loop"):
        fit(tmp_path, 2, **settings)
    failed = Result.from_path(tmp_path / "a")
    assert failed.metrics["update"] == 10
    assert vbs.read_checkpoint(failed.checkpoint.path)["facts"]["updates"] == 10
    assert_as_one_process(tmp_path, fit(tmp_path, 2, **settings), SIZES, UPDATES, [2] * UPDATES)


@pytest.mark.parametrize("value", [torch.ones(3), "0.1", None])
def test_a_metric_that_is_no_number_is_named(value):
    model = torch.nn.Linear(2, 1)
    sampler = vbs.CustomSampler(8, 4, 1, 0)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler)
    with pytest.raises(TypeError, match="metric accuracy must be a number, or a tensor with one, got"):
        RunCheckpoint(model=model, optimizer=optimizer, every=2).save(accuracy=value)


@pytest.mark.nightly("others resemble it")
def test_the_script_of_the_page_runs_and_resumes(cluster, tmp_path):
    script, weights = blocks(DOCS / "trainers" / "ray.md", "python")
    names = {"__name__": "__main__"}  # so that Ray takes the function by value
    exec(script.replace("/shared/runs", str(tmp_path)), names)
    for _ in range(2):
        exec(weights, names)
        assert {"update": 72, "samples": 9000}.items() <= names["result"].metrics.items()
        names["result"] = names["trainer"].fit()


def test_a_run_goes_on_with_the_workers_that_there_are(cluster, tmp_path):
    """The batch has 12 samples for each of two workers, of the one whose peer was killed, and of two again."""
    records, events = tmp_path / "records", {0: ["wait", 13], 10: ["wait", 23]}
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(partial(fit, tmp_path, (1, 2), max_failures=1, adaptive=True, events=events))

        def wait_until(update):
            """Wait until a worker waits after this update; return its node and process."""
            file = records / f"waits-{update}"
            wait_for(lambda: run.done() or file.exists(), lambda: f"no worker comes to update {update}")
            return file.read_text().split()

        node, process = wait_until(13)
        os.kill(int(process), signal.SIGKILL)
        cluster.remove_node(next(one for one in cluster.worker_nodes if one.node_id == node), allow_graceful=False)
        wait_until(23)
        cluster.add_node(**NODE)
        result = run.result()
    sizes = [2 * PER_WORKER] * 10 + [PER_WORKER] * 10 + [2 * PER_WORKER] * 12
    assert_as_one_process(tmp_path, result, sizes, 32, [2] * 10 + [1] * 10 + [2] * 12)
