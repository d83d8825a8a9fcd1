"""The documentation: it builds, it is complete, and what it tells to type runs here or says why not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import variable_batch_size as vbs
from helpers.documented import documented
from helpers.pages import DOCS, PAGES, ROOT, TOUR, blocks, commands
from variable_batch_size.optim.loops.yielded_update import Update

CONTROLLERS = DOCS / "_static" / "controllers.svg"
PACKAGE = ROOT / "variable_batch_size"
MAKE = {"train", "evaluate", "lint", "test", "docs", "fuzz", "bench", "test-newest", "test-integrations", "dist"}
LANGUAGE_MODEL = "examples/language_model/"  # test_language_model.py runs its lines
ELSEWHERE = {
    "pip install": "installs; test_wheel.py installs the wheel",
    "source .venv/bin/activate": "the tests run in such an environment",
    "pre-commit install": "installs a hook of git",
    "pytest ": "make test runs these files; test_repository.py looks for them",
    ".ci/": "the tests themselves",
    "export OMP_NUM_THREADS=": "PyTorch's; nothing of ours reads it",
    "export MALLOC_": "variables of glibc, which benchmarks/step.py --keep-memory sets",
    "torchft_lighthouse": "a server; test_torchft.py starts one",
    "REPLICA_GROUP_ID=0": "needs that server; test_torchft.py and test_torchft_sharded.py run the scripts",
    "tensorboard --logdir": "a server; test_tracker.py reads the events",
    "torchrun --nproc-per-node=8 examples/clusters/train.py": "eight GPUs; test_clusters.py runs the script",
    "torchrun --nnodes=2 --node-rank=0": "two hosts; test_clusters.py runs the script in two jobs",
    "while python examples/clusters/torchrun_143.py": "eight GPUs; test_torchrun_143.py runs it with two processes",
    "python examples/packed_documents.py": "test_arriving_page.py runs it with fewer documents",
    "torchrun --nproc-per-node=2 examples/packed_documents.py": "test_arriving_page.py runs it with fewer documents",
    "python examples/rollouts.py": "test_arriving_page.py runs it with fewer updates",
    "torchrun --nproc-per-node=2 examples/rollouts.py": "test_arriving_page.py runs it with fewer updates",
    "torchrun --nproc-per-node=2 examples/ddp.py": "test_page_scripts.py runs it",
    "python examples/train.py": "test_complete_script.py runs it, and the next line",
    "torchrun --nproc-per-node=2 examples/train.py": "test_complete_script.py",
    "torchrun --nproc-per-node=2 examples/fsdp.py": "test_page_scripts.py runs it",
    "PJRT_DEVICE=TPU python examples/xla.py": "a TPU; test_page_scripts.py runs the next line",
    "PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python examples/xla.py": "test_page_scripts.py runs it",
    "PJRT_DEVICE=TPU python examples/spmd.py": "a TPU; test_page_scripts.py runs the next line",
    "PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python examples/spmd.py": "test_page_scripts.py runs it",
    "(set -a; eval": "a TPU; test_page_scripts.py runs the script",
    "sbatch": "a cluster; test_clusters.py runs the script",
    "TORCHFT_LIGHTHOUSE=http://service-node:29510 CHECKPOINTS": "a cluster; test_torchft.py runs the script",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 sbatch": "a cluster; test_clusters.py runs the arguments of the script",
    "python examples/clusters/rendezvous.py": "waits for a signal; test_clusters.py runs it with another port",
    "kubectl apply": "a cluster; test_clusters.py validates the file and runs its command",
    "vbs ": "test_capacity_page.py, test_evaluation_page.py and test_real_traces.py run it",
    "python benchmarks/evaluation_adam.py": "ten minutes; test_records.py reads its records",
    "python benchmarks/evaluation_gpt.py": "half an hour; test_judgement.py reads its records",
    "python benchmarks/evaluation_large.py": "two hours; test_records.py reads its records",
    "python benchmarks/evaluation_windows.py": "half an hour; test_judgement.py reads its records",
    "sky jobs launch": "a cloud; test_clusters.py and test_torchft.py run the files' commands",
}  # beginning of a command that no test runs as it is -> why

OBJECTS = {
    "optimizer": vbs.CustomOptimizer,
    "sampler": vbs.CustomSampler,
    "update": Update,
    "checkpoint": vbs.Checkpoint,
    "trace": vbs.BatchTrace,
    "scheduler": vbs.ProgressScheduler,
    "tracker": vbs.Tracker,
}  # name of a variable in the pages -> the class of its value


def public_names():
    """The names of the index, and those of its modules."""

    def names(module):
        things = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
        modules = {name: thing for name, thing in things.items() if isinstance(thing, ModuleType)}
        return (things.keys() - modules.keys()).union(*map(names, modules.values()))

    return names(vbs)


@pytest.mark.slow("builds the site")
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "sphinx", "-W", "--keep-going", "-q", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    site = (tmp_path / "api.html").read_text()
    missing = [name for name in public_names() if not re.search(rf'id="variable_batch_size\.(\w+\.)*{name}"', site)]
    assert not missing, f"add these to docs/api.md: {missing}"


def test_the_reference_lists_every_public_name():
    text = (DOCS / "api.md").read_text()
    names = public_names() - set(vbs.testing.__all__)  # of which the page takes all
    assert not [name for name in names if not re.search(rf"\b{name}\b", text)], "add these to docs/api.md"


@pytest.mark.parametrize("variable", OBJECTS)
def test_the_reference_lists_what_pages_use_of_an_object(variable):
    kind, listed = OBJECTS[variable], {name for name, _ in documented()}
    text = "".join(page.read_text() for page in PAGES)
    used = {name for name in re.findall(rf"\b{variable}\.(\w+)", text) if hasattr(kind, name)}
    used -= {name for base in kind.__mro__ if base.__module__.startswith("torch") for name in vars(base)}
    missing = [name for name in used if f"{kind.__module__}.{kind.__name__}.{name}" not in listed]
    assert missing == [], f"add these to the members of {kind.__name__} in docs/api.md"


def test_each_command_runs_here_or_says_why_not():
    for page in PAGES:
        for line in commands(page):
            # test_readme.py and test_elastic.py run the lines of the tour
            known = TOUR in line or LANGUAGE_MODEL in line or (line.startswith("make ") and line.split()[1] in MAKE)
            assert known or any(line.startswith(begin) for begin in ELSEWHERE), f"{page.name}: {line}"


def test_the_commands_of_our_scripts_have_flags_that_exist():
    """Also those that no test runs; a flag may be defined in a file beside the script."""
    for page in PAGES:
        for line in commands(page):
            words = line.split()
            scripts = [word for word in words if re.fullmatch(r"(examples|test|docs|benchmarks)/\S+\.\w+", word)]
            assert not [script for script in scripts if not (ROOT / script).exists()], line
            if scripts and scripts[-1].endswith(".py"):
                sources = "".join(file.read_text() for file in (ROOT / scripts[-1]).parent.glob("*.py"))
                flags = [word.split("=")[0] for word in words[words.index(scripts[-1]) :] if word.startswith("--")]
                assert not [flag for flag in flags if f'"{flag}"' not in sources], line


def test_the_files_on_the_way_of_a_microbatch_exist():
    way = (DOCS / "architecture.md").read_text().split("Ten files of")[1].split("\n## ")[0]
    folder, files = "", list[Path]()
    for name in re.findall(r"`([\w/]+\.py)`", way):
        folder = name.rpartition("/")[0] or folder  # a name without a folder lies beside the one before
        files += [PACKAGE / name, PACKAGE / folder / name]
    assert len(files) > 20
    assert not [pair for pair in zip(files[::2], files[1::2], strict=True) if not any(file.exists() for file in pair)]


@pytest.mark.slow("starts a process")
def test_what_a_page_says_that_it_prints(capsys):
    names = {}
    exec(blocks(DOCS / "quickstart.md", "python")[0], names)
    exec(blocks(DOCS / "performance.md", "python")[0], names)
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"It prints `{last}`" in (DOCS / "performance.md").read_text()


@pytest.mark.nightly("trains MNIST three times")
def test_the_picture_is_drawn_from_real_trainings(tmp_path):
    short = ["--epochs", "1", "--samples", "2000", "--runs", str(tmp_path), "--out", str(tmp_path / "tour.svg")]
    command = [sys.executable, str(DOCS / "figures" / "tour.py"), *short]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    texts = [(tmp_path / "tour.svg").read_text(), (DOCS / "_static" / "tour.svg").read_text()]
    for label in ("batch size", "learning rate", "noise scale", "accuracy (%)", "linear", "root", "adascale"):
        assert all(label in text for text in texts)


@pytest.mark.nightly("simulates for minutes of a cluster")
def test_the_picture_of_the_controllers_is_drawn_from_simulations(tmp_path):
    figure = tmp_path / "controllers.svg"
    command = [sys.executable, str(DOCS / "figures" / "controllers.py"), "--out", str(figure)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    new, shown = (re.findall(r">([^<>]+: [\d.]+ hours)<", text.read_text()) for text in (figure, CONTROLLERS))
    assert new == shown
    assert len(shown) == 6


@pytest.mark.parametrize("page", [DOCS / "quickstart.md"], ids=lambda page: page.stem)
def test_the_first_block_prints_what_the_page_shows(page, capsys):
    exec(blocks(page, "python")[0], {})
    assert capsys.readouterr().out == blocks(page, "text")[0]
