"""The files around the code: workflows, issue forms, hooks, the citation; and that they agree with one another."""

from __future__ import annotations

import re
import shlex
import sys
from configparser import ConfigParser

import pytest
import yaml

import variable_batch_size as vbs
from helpers.commands import run
from helpers.pages import ROOT, commands

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "custom.github-workflows-require-timeout": WORKFLOWS,
    "vendor.github-issue-forms": sorted(set(FORMS.glob("*.yml")) - {FORMS / "config.yml"}),
    "vendor.github-issue-config": [FORMS / "config.yml"],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}


def read(path):
    return yaml.safe_load(path.read_text())


def jobs():
    return [job for path in WORKFLOWS for job in read(path)["jobs"].values()]


def steps():
    return [step for job in jobs() for step in job.get("steps", [])]


def read_matrix():
    workflow = read(ROOT / ".github" / "workflows" / "tests.yml")
    return workflow["jobs"]["tests"]["strategy"]["matrix"]


def python_versions():
    """Return the versions of Python that setup.cfg names, ascending."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return re.findall(r"Python :: (3\.\d+)$", setup["metadata"]["classifiers"], re.MULTILINE)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_follow_their_schema(schema):
    assert SCHEMAS[schema]
    done = run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, SCHEMAS[schema]))
    assert done.returncode == 0, done.stdout


def test_python_versions_agree():
    first, *_, last = versions = python_versions()
    assert versions == [f"3.{minor}" for minor in range(int(first[2:]), int(last[2:]) + 1)]
    matrix = read_matrix()
    last_with_xla = f"3.{int(last[2:]) - 1}"
    assert matrix["python"] == [first, last_with_xla]
    assert matrix["include"] == [{"python": last, "target": "test-newest"}]
    others = {step["with"]["python-version"] for step in steps() if "setup-python" in step.get("uses", "")}
    assert others == {"${{ matrix.python }}", last_with_xla}
    makefile, setup = (ROOT / "Makefile").read_text(), (ROOT / "setup.cfg").read_text()
    assert f"(3, {first[2:]}) <= sys.version_info < (3, {int(last[2:]) + 1})" in makefile
    assert f"sys.version_info < (3, {last[2:]}) or exit" in makefile
    assert makefile.count(f"{first} to {last}") == 2
    assert f"python_requires = >={first}\n" in setup
    assert f'target-version = "py{first.replace(".", "")}"' in (ROOT / "pyproject.toml").read_text()
    page = CONTRIBUTING.read_text()
    assert f"Python {first} to {last_with_xla}" in page
    assert re.findall(r"^\| (3\.\d+) \|", page, re.MULTILINE) == python_versions()


def test_versions_agree():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    heading = re.search(r"^## \[(.*)\] - (unreleased|20\d\d-\d\d-\d\d)$", changelog, re.MULTILINE)
    assert heading is not None
    assert heading[1] == read(ROOT / "CITATION.cff")["version"] == vbs.__version__


def test_the_commands_of_the_contributors_page_test_files_that_are_there():
    lines = [shlex.split(line) for line in commands(CONTRIBUTING) if line.startswith("pytest")]
    assert len(lines) > 2
    assert all((ROOT / line[1]).exists() for line in lines)


@pytest.mark.parametrize("script", ["run", "conditions"])
def test_the_scripts_before_a_merge_test_files_that_are_there(script):
    text = (ROOT / ".ci" / script).read_text()
    patterns = " ".join(re.findall(r"^\w+\+?=\((test/.*)\)$", text, re.M))
    files = run("bash", "-c", f"printf '%s\\n' {patterns}").stdout.split()
    assert len(files) > 8
    assert [file for file in files if not (ROOT / file).exists()] == []
