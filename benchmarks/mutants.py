"""How many planted faults do the tests find?

    python benchmarks/mutants.py FOLDER --reach -- -m "not cuda"
    python benchmarks/mutants.py FOLDER --label "make test" -- -m "not slow and not nightly and not cuda"

Each seed draws faults in the rooms below, as many of each kind: an operator that is another one, a comparison that
includes or excludes its bound, a call that is left out, a factor of 1 + 1e-8. The first command runs the tests once,
with a note at each of these places of the tests that come by. The second one plants one fault at a time and runs the
tests that come by, the quick ones first, until one fails. What follows `--` selects the tests of pytest.

FOLDER gets a copy of the repository and the notes; `--repository` names another one, and `--places` the FOLDER of
another search, with whose faults and notes two versions of the tests are compared. A fault is found by a test that
fails with it and passes without it.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from results import record

ROOT = Path(__file__).parents[1]
ROOMS = ("optim", "data", "checkpoint", "backend", "adaptive", "trace", "rules", "metrics", "cli")  # folders or files
KINDS = ("operator", "bound", "call", "weight")
OPERATORS: dict[Any, Any] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
BOUNDS: dict[Any, Any] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq}
HANGS = 120  # seconds of a test
UNKNOWN = 10.0  # seconds of a test whose time is not known
SHARED = 900.0  # seconds for what tests share, which is in the time of the first one of them only
BATCH = 50  # tests of one run of pytest
PROBE = """
import os
seen = set()
def note(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (number, test) not in seen:
        seen.add((number, test))
        with open(os.environ["MUTANT_NOTES"], "a") as file:
            file.write(f"{number}\\t{test}\\n")
"""


class Place(NamedTuple):
    """A node of a file, by its number in `ast.walk`, and what is wrong there."""

    file: str
    line: int
    kind: str
    node: int
    text: str


def places(file: Path, name: str) -> Iterator[Place]:
    """Find what can be changed in the functions of a file, without messages and annotations."""
    tree = ast.parse(file.read_text())
    bodies = [part for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for part in node.body]
    inside = {part for statement in bodies for part in ast.walk(statement)}
    messages = {part for node in inside if isinstance(node, ast.Raise | ast.JoinedStr) for part in ast.walk(node)}
    for number, node in enumerate(ast.walk(tree)):
        if node not in inside or node in messages:
            continue
        kinds = []
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            is_weight = isinstance(node.op, ast.Div) or (isinstance(node.op, ast.Mult) and name.startswith("optim/"))
            kinds = ["operator", *(["weight"] if is_weight else [])]
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in BOUNDS:
            kinds = ["bound"]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            kinds = ["call"]
        yield from (Place(name, node.lineno, kind, number, ast.unparse(node)) for kind in kinds)  # type: ignore[attr-defined]


def draw(package: Path, number: int, seeds: list[int]) -> list[Place]:
    """Return so many places for each seed, as many of each kind, and none twice."""
    files = sorted(path for room in ROOMS for path in [*(package / room).rglob("*.py"), package / f"{room}.py"])
    found = [place for path in files if path.exists() for place in places(path, str(path.relative_to(package)))]
    of_kind = {kind: [place for place in found if place.kind == kind] for kind in KINDS}
    rngs = map(random.Random, seeds)
    drawn = [place for rng in rngs for kind in KINDS for place in rng.sample(of_kind[kind], number // len(KINDS))]
    return list(dict.fromkeys(drawn))


def fault(kind: str, node: Any) -> Any:
    """Return what stands in the place of a node."""
    if kind == "call":
        return ast.Pass()
    if kind == "weight":
        return ast.BinOp(node, ast.Mult(), ast.Constant(1 + 1e-8))
    if kind == "operator":
        return ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    return ast.Compare(node.left, [BOUNDS[type(node.ops[0])]()], node.comparators)


def note(number: int, node: Any) -> Any:
    """Return a node that notes that it was reached, and then does what it did."""
    call = ast.parse(f"__import__('variable_batch_size._probe')._probe.note({number})", mode="eval").body
    if isinstance(node, ast.Expr):
        return [ast.Expr(call), node]
    return ast.Subscript(ast.Tuple([call, node], ast.Load()), ast.Constant(1), ast.Load())


def rewrite(source: str, changes: list[tuple[int, Callable[[Any], Any]]]) -> str:
    """Return the source with some of its nodes changed, given by their numbers."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    wanted: dict[ast.AST, list[Callable[[Any], Any]]] = {}
    for number, change in changes:
        wanted.setdefault(nodes[number], []).append(change)

    class Changing(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            result: Any = self.generic_visit(node)
            for change in wanted.get(node, []):
                result = change(result)
            return result

    return ast.unparse(ast.fix_missing_locations(Changing().visit(tree)))


class Bench:
    """A copy of a repository, in which tests run.

    Args:
        repository: what is copied.
        folder: for the copy.
        noted: that of the notes.
        options: of pytest.
    """

    def __init__(self, repository: Path, folder: Path, noted: Path, options: list[str]) -> None:
        self.folder, self.noted, self.options, self.copy = folder, noted, options, folder / "copy"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.copy, ignore_errors=True)
        subprocess.run(["git", "clone", "--quiet", str(repository), str(self.copy)], check=True)
        self.package = self.copy / "variable_batch_size"

    def pytest(self, *arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """Run pytest on the copy, with its programs first on PATH."""
        variables = {
            "PYTHONPATH": str(self.copy),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "MUTANT_NOTES": str(self.folder / "notes.tsv"),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        hangs = ["-o", f"faulthandler_timeout={HANGS}", "-o", "faulthandler_exit_on_timeout=true"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *hangs, *self.options, *arguments]
        return subprocess.run(
            command,
            cwd=self.copy,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def reach(self, drawn: list[Place]) -> None:
        """Run all tests, and note which ones come by each place."""
        (self.package / "_probe.py").write_text(PROBE)  # where every process finds it
        (self.folder / "notes.tsv").unlink(missing_ok=True)
        for file in {place.file for place in drawn}:
            path = self.package / file
            own = [
                (place.node, lambda node, number=number: note(number, node))
                for number, place in enumerate(drawn)
                if place.file == file
            ]
            path.write_text(rewrite(path.read_text(), own))
        done = self.pytest("-n", "auto", "--dist", "loadgroup", f"--junitxml={self.folder / 'times.xml'}")
        print("\n".join(done.stdout.splitlines()[-15:]))

    @cached_property
    def selected(self) -> set[str]:
        """The tests that the options select."""
        return {line for line in self.pytest("--collect-only").stdout.splitlines() if "::" in line}

    @cached_property
    def _times(self) -> dict[tuple[str | None, str | None], float]:
        cases = ElementTree.parse(self.noted / "times.xml").iter("testcase")
        return {(case.get("classname"), case.get("name")): float(case.get("time") or 0) for case in cases}

    def seconds(self, test: str) -> float:
        """Return the seconds that a test took; infinity if that is not known."""
        file, _, name = test.partition("::")
        return self._times.get((file.removesuffix(".py").replace("/", "."), name), math.inf)

    def limit(self, tests: list[str]) -> float:
        """Return the seconds after which one of these tests hangs, if they end in that time without the fault."""
        return SHARED + 4 * sum(UNKNOWN if math.isinf(seconds) else seconds for seconds in map(self.seconds, tests))

    def tests(self, number: int) -> list[str]:
        """Return the selected tests that come by a place, the quick ones first; then the others of their files.

        These may use what was made in a fixture that they share.
        """
        notes = (line.split("\t") for line in (self.noted / "notes.tsv").read_text().splitlines())
        reached = {test for found, test in notes if int(found) == number}
        files = {test.partition("::")[0] for test in reached}
        pages = {file for file in files if file.endswith(".md")}  # whose blocks need those before them
        others = {test for test in self.selected - reached if test.partition("::")[0] in files - pages}
        alone = {test for test in reached & self.selected if test.partition("::")[0] not in pages}
        return sorted(alone, key=self.seconds) + sorted(others, key=self.seconds) + sorted(pages)

    def killer(self, number: int, place: Place) -> str:
        """Return the test that finds a fault, "" if none does."""
        path = self.package / place.file
        source = path.read_text()
        if ast.unparse(list(ast.walk(ast.parse(source)))[place.node]) != place.text:
            raise RuntimeError(f"{place.file}:{place.line} must be {place.text!r}: note the tests again, with --reach")
        faulty = rewrite(source, [(place.node, lambda node: fault(place.kind, node))])
        found = self.tests(number)
        while found:
            batch, found = found[:BATCH], found[BATCH:]
            path.write_text(faulty)
            try:
                done = self.pytest("-n", "0", "-x", *batch, timeout=self.limit(batch))
            except subprocess.TimeoutExpired:
                path.write_text(source)
                self.pytest("-n", "0", *batch, timeout=self.limit(batch))  # raises if it takes as long without it
                return "a test that hangs"
            finally:
                path.write_text(source)
            if "Timeout (" in done.stdout + done.stderr:
                return "a test that hangs"
            failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)  # a test, or a file
            if done.returncode and not failed:
                raise RuntimeError(f"pytest must run, got {done.returncode}:\n{done.stdout}\n{done.stderr}")
            if failed and self.pytest("-n", "0", failed[1]).returncode == 0:
                return failed[1]
            if failed:  # without the fault, too
                found = [test for test in batch + found if not test.startswith(failed[1])]
        return ""


def parse() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path)
    add("--repository", type=Path, default=ROOT, help="whose last commit is tested")
    add("--places", type=Path, help="FOLDER of the search whose faults are planted")
    add("--number", type=int, default=52, help="faults of each seed")
    add("--seeds", type=int, nargs="+", default=[53, 54])
    add("--only", type=int, nargs="+", help="numbers of the faults that are planted, by default all")
    add("--reach", action="store_true", help="note which tests come by, and plant nothing")
    add("--label", default="", help="name of these tests in records.csv; without it nothing is recorded")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    flags = parser.parse_args(sys.argv[1:split])
    flags.options = sys.argv[split + 1 :]
    return flags


def main() -> None:
    flags = parse()
    folder = flags.folder.resolve()
    noted = (flags.places or folder).resolve()
    bench = Bench(flags.repository, folder, noted, flags.options)
    listed = noted / f"places-{flags.number}-{'-'.join(map(str, flags.seeds))}.json"
    if not listed.exists():
        listed.write_text(json.dumps(draw(bench.package, flags.number, flags.seeds), indent=1))
    drawn = [Place(*row) for row in json.loads(listed.read_text())]
    if flags.reach:
        bench.reach(drawn)
        return
    outcomes = []
    for number, place in enumerate(drawn):
        if flags.only and number not in flags.only:
            continue
        outcomes.append(bench.killer(number, place))
        print(
            f"{number} {place.file}:{place.line} {place.kind}: {place.text[:80]!r}: {outcomes[-1] or 'NOT FOUND'}",
            flush=True,
        )
    found = sum(map(bool, outcomes))
    print(f"{found} of {len(outcomes)} found")
    if flags.label:
        on = f"{len(outcomes)} of {len(drawn)} by seeds {flags.seeds}"
        record("planted faults that the tests find", flags.label, found, "faults", on=on)


if __name__ == "__main__":
    main()
