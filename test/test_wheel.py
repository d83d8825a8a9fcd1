"""What is built: the wheel has the package and nothing else, and the source distribution what git tracks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import lazy_loader
import pytest

import variable_batch_size as vbs
from helpers.pages import ROOT

pytestmark = pytest.mark.slow("builds the wheel and an environment")

PACKAGE = "variable_batch_size"
IGNORED = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()] + [".git"]
INDEX = f"""
import sys
import {PACKAGE} as vbs
assert vbs.__file__.startswith(sys.prefix), vbs.__file__
assert vbs.__version__ == "{vbs.__version__}"
assert {set(vbs.__all__)} <= set(dir(vbs))
assert "numpy" not in sys.modules
"""
TRAINING = """
import torch
model = torch.nn.Linear(2, 1)
sampler = vbs.CustomSampler(range(8), trace="0:4", num_replicas=1, rank=0, minibatch_size=2)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=4)
for update in vbs.updates(torch.utils.data.DataLoader(torch.randn(8, 2), batch_sampler=sampler), optimizer):
    for data in update:
        model(data).mean().backward()
        optimizer.step()
assert optimizer.updates == 2 and optimizer.samples == 8
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel and a source distribution, built as by `make dist`, in a folder with the remains of an earlier build."""
    folder = tmp_path_factory.mktemp("repository") / "source"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*IGNORED))
    stale = folder / "build" / "lib" / PACKAGE / "stale.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    run(sys.executable, "-m", "build", "--no-isolation", cwd=folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    """A new environment with nothing but the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    run(sys.executable, "-I", "-m", "pip", "--python", folder, "install", "--no-deps", "--no-index", wheel(built))
    place = sysconfig.get_path("purelib", "posix_prefix", {"base": str(folder)})
    shutil.copytree(Path(lazy_loader.__file__).parent, Path(place, "lazy_loader"))  # all that the index needs
    return folder


def run(*command, cwd=None):
    """Run a command that succeeds; one with the flag -I gets no modules from PYTHONPATH."""
    hidden = {"PYTHONPATH"} if "-I" in command else set()
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def wheel(built):
    """Return the wheel that was built."""
    (path,) = built.glob("*.whl")
    return path


def package_files():
    files = (ROOT / PACKAGE).rglob("*")
    return {str(path.relative_to(ROOT)) for path in files if path.is_file() and path.suffix != ".pyc"}


def test_the_wheel_has_the_package_and_nothing_else(built):
    with zipfile.ZipFile(wheel(built)) as archive:
        names = set(archive.namelist())
        top_level = next(name for name in names if name.endswith("top_level.txt"))
        assert archive.read(top_level).decode().split() == [PACKAGE]
    about = {name for name in names if name.startswith(f"{PACKAGE}-{vbs.__version__}.dist-info/")}
    assert names - about == package_files()
    assert f"{PACKAGE}/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in about)


def test_the_source_distribution_has_what_git_tracks(built):
    root = f"{PACKAGE}-{vbs.__version__}"
    with tarfile.open(built / f"{root}.tar.gz") as archive:
        files = {member.name.removeprefix(f"{root}/") for member in archive if member.isfile()}
    assert not [name for name in files if "stale" in name]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this folder is not a git repository")
    assert set(listed.stdout.splitlines()) <= files


def test_an_empty_environment_imports_the_index(environment):
    run(environment / "bin" / "python", "-I", "-c", INDEX)


def test_the_command_names_its_extra(environment):
    command = [environment / "bin" / "python", "-I", environment / "bin" / "vbs", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    expected = "vbs: error: this needs typer, which is not installed; run: pip install 'variable_batch_size[cli]'\n"
    assert done.stderr == expected


def test_the_installed_wheel_trains(environment):
    place = sysconfig.get_path("purelib", "posix_prefix", {"base": str(environment)})
    Path(place, "torch.pth").write_text(sysconfig.get_path("purelib"))  # what the package requires, after the package
    run(environment / "bin" / "python", "-I", "-c", INDEX + TRAINING)
