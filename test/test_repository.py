"""The files around the code: workflows, issue forms, hooks, the citation; and that they agree with one another."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import Any

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


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def jobs() -> list[dict[str, Any]]:
    return [job for path in WORKFLOWS for job in read(path)["jobs"].values()]


def steps() -> list[dict[str, Any]]:
    return [step for job in jobs() for step in job.get("steps", [])]


def read_matrix() -> dict[str, list[str]]:
    workflow: dict[str, Any] = read(ROOT / ".github" / "workflows" / "tests.yml")
    matrix: dict[str, list[str]] = workflow["jobs"]["tests"]["strategy"]["matrix"]
    return matrix


def targets(text: str) -> list[str]:
    """Return the targets of the make commands in `text`, without those that are files."""
    return sorted(set(re.findall(r"\bmake ([a-z-]+)", text)))


def python_versions() -> list[str]:
    """Return the versions of Python that setup.cfg names, ascending."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return re.findall(r"Python :: (3\.\d+)$", setup["metadata"]["classifiers"], re.MULTILINE)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_follow_their_schema(schema: str) -> None:
    assert SCHEMAS[schema]
    done = run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, SCHEMAS[schema]))
    assert done.returncode == 0, done.stdout


def test_workflows_run_targets_of_the_makefile_and_nothing_else() -> None:
    matrix = read_matrix()
    lines = [step["run"] for step in steps() if "run" in step]
    assert sorted(lines) == ["make ${{ matrix.target }}", 'make dist TAG="$GITHUB_REF_NAME"', "make docs"]
    assert matrix["target"] == targets((ROOT / ".ci" / "run").read_text())
    for target in [*matrix["target"], "dist", "docs"]:
        done = run("make", "--dry-run", target)
        assert done.returncode == 0, done.stderr


def test_actions_are_pinned_by_their_commit() -> None:
    used = [item["uses"] for item in [*steps(), *jobs()] if "uses" in item]
    assert len(used) > 10
    assert not [action for action in used if not re.search(r"^\./|@[0-9a-f]{40}$", action)]


def test_a_slow_test_says_why() -> None:
    texts = {path: path.read_text() for path in (ROOT / "test").rglob("test_*.py")}
    marks = {path: re.findall(r"\bmark\.slow\b(?:\(\"([^\"]*)\"\))?", text) for path, text in texts.items()}
    assert sum(map(len, marks.values())) > 50
    assert [path.name for path, reasons in marks.items() if not all(reason.strip() for reason in reasons)] == []


def test_workflows_upload_what_the_targets_build() -> None:
    paths = [step["with"]["path"] for step in steps() if "upload" in step.get("uses", "")]
    assert sorted(paths) == ["build/docs", "dist/"]
    assert "docs build/docs" in run("make", "--dry-run", "docs").stdout
    assert "dist/*.whl" in run("make", "--dry-run", "dist").stdout


def test_a_job_that_may_write_runs_no_code_of_the_repository() -> None:
    assert all(read(path)["permissions"] == {"contents": "read"} for path in WORKFLOWS)
    writers = [job for job in jobs() if "write" in job.get("permissions", {}).values()]
    assert len(writers) == 2
    assert not [step for job in writers for step in job["steps"] if "run" in step or "checkout" in step["uses"]]


def test_python_versions_agree() -> None:
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


def test_versions_agree() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    heading = re.search(r"^## \[(.*)\] - (unreleased|20\d\d-\d\d-\d\d)$", changelog, re.MULTILINE)
    assert heading is not None
    assert heading[1] == read(ROOT / "CITATION.cff")["version"] == vbs.__version__


@pytest.mark.parametrize(
    ("tag", "date", "message"),
    [("v1.2.3", "2026-01-31", ""), ("v1.2.4", "2026-01-31", "the tag v1.2.4"), ("v1.2.3", "unreleased", "unreleased")],
)
def test_a_release_needs_the_tag_and_the_date_of_its_version(tag: str, date: str, message: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [1.2.3] - {date}\n\n## [1.2.2] - 2025-12-31\n")
    (tmp_path / "variable_batch_size.py").write_text('__version__ = "1.2.3"\n')
    done = run("make", "check-tag", f"TAG={tag}", cwd=tmp_path)
    assert (done.returncode == 0) == (not message)
    assert message in done.stderr


@pytest.mark.parametrize("line", [line for line in commands(CONTRIBUTING) if line.startswith("pytest")])
def test_the_commands_of_the_contributors_page_test_something(line: str) -> None:
    done = run(*shlex.split(line), "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_a_commit_runs_ruff(tmp_path: Path) -> None:
    variables = {f"GIT_{role}_{what}": "a@b.c" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    variables |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}  # hooks and signatures of this user
    variables["PRE_COMMIT_HOME"] = str(tmp_path / "cache")
    repository = tmp_path / "repository"
    repository.mkdir()
    for name in (".pre-commit-config.yaml", "pyproject.toml"):
        shutil.copy(ROOT / name, repository)
    file = repository / "changed.py"
    file.write_text('"""A module."""\nimport os, sys\nprint( sys.path )\n')
    run("git", "init", cwd=repository)
    install = next(line for line in commands(CONTRIBUTING) if line.startswith("pre-commit"))
    assert run(*shlex.split(install), cwd=repository, **variables).returncode == 0
    run("git", "add", ".", cwd=repository)
    refused = run("git", "commit", "-m", "changes", cwd=repository, **variables)
    assert refused.returncode != 0
    assert refused.stderr.count("Failed") == 2, refused.stderr
    assert file.read_text() == '"""A module."""\n\nimport sys\n\nprint(sys.path)\n'
    run("git", "add", ".", cwd=repository)
    done = run("git", "commit", "-m", "changes", cwd=repository, **variables)
    assert done.returncode == 0, done.stderr
