"""How many planted faults do the tests find?

    python benchmarks/mutants.py FOLDER --reach -- -m "not cuda"
    python benchmarks/mutants.py FOLDER --label "make test" -- -m "not slow and not cuda"

A seed draws faults in `optim/`, `data/` and `checkpoint/`, as many of each kind: an operator that is another one, a
comparison that includes or excludes its bound, a call that is left out, a factor of 1 + 1e-8. The first command runs
the tests once, with a note at each of these places of the tests that come by. The second one plants one fault at a time
and runs the tests that come by, the quick ones first, until one fails. What follows `--` selects the tests of pytest.

FOLDER gets a copy of the repository, the notes, and the outcomes; `--repository` names another one, and `--places` the
FOLDER of another search, with whose faults two versions of the tests are compared.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from results import record

ROOT = Path(__file__).parents[1]
ROOMS = ("optim", "data", "checkpoint")
KINDS = ("operator", "bound", "call", "weight")
OPERATORS: dict[Any, Any] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
BOUNDS: dict[Any, Any] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq}
SECONDS = 600.0  # after which a fault counts as found, because a test hangs
BATCH = 25  # tests of one run of pytest
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


def draw(package: Path, number: int, seed: int) -> list[Place]:
    """Return so many places, as many of each kind."""
    files = sorted(path for room in ROOMS for path in (package / room).rglob("*.py"))
    found = [place for path in files for place in places(path, str(path.relative_to(package)))]
    rng = random.Random(seed)
    return [one for kind in KINDS for one in rng.sample([p for p in found if p.kind == kind], number // len(KINDS))]


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
    call = ast.parse(f"__import__('mutant_probe').note({number})", mode="eval").body
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
        folder: for the copy, the notes and the outcomes.
        options: of pytest.
    """

    def __init__(self, repository: Path, folder: Path, options: list[str]) -> None:
        self.folder, self.options, self.copy = folder, options, folder / "copy"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.copy, ignore_errors=True)
        subprocess.run(["git", "clone", "--quiet", str(repository), str(self.copy)], check=True)
        self.package = self.copy / "variable_batch_size"

    def pytest(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run pytest on the copy, with its programs first on PATH."""
        variables = {
            "PYTHONPATH": os.pathsep.join([str(self.copy), str(self.folder)]),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "MUTANT_NOTES": str(self.folder / "notes.tsv"),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *self.options, *arguments]
        return subprocess.run(
            command,
            cwd=self.copy,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=None if "--junitxml" in " ".join(arguments) else SECONDS,
        )

    def reach(self, drawn: list[Place]) -> None:
        """Run all tests, and note which ones come by each place."""
        (self.folder / "mutant_probe.py").write_text(PROBE)
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

    def tests(self, number: int) -> list[str]:
        """Return the tests that come by a place, the quick ones first."""
        times = {
            (case.get("classname"), case.get("name")): float(case.get("time") or 0)
            for case in ElementTree.parse(self.folder / "times.xml").iter("testcase")
        }

        def seconds(test: str) -> float:
            file, _, name = test.partition("::")
            return times.get((file.removesuffix(".py").replace("/", "."), name), 0.0)

        notes = (line.split("\t") for line in (self.folder / "notes.tsv").read_text().splitlines())
        return sorted({test for found, test in notes if int(found) == number and test}, key=seconds)

    def killer(self, number: int, place: Place) -> str:
        """Return the test that finds a fault, "" if none does."""
        path = self.package / place.file
        source = path.read_text()
        path.write_text(rewrite(source, [(place.node, lambda node: fault(place.kind, node))]))
        try:
            found = self.tests(number)
            for begin in range(0, len(found), BATCH):
                try:
                    done = self.pytest("-n", "0", "-x", *found[begin : begin + BATCH])
                except subprocess.TimeoutExpired:
                    return "one that hangs"
                if done.returncode not in (0, 5):  # 5: none of these is selected
                    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                    return (failed or done.stdout.splitlines()[-1:] or ["?"])[0]
            return ""
        finally:
            path.write_text(source)


def parse() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path)
    add("--repository", type=Path, default=ROOT, help="whose last commit is tested")
    add("--places", type=Path, help="FOLDER of the search whose faults are planted")
    add("--number", type=int, default=40)
    add("--seed", type=int, default=29)
    add("--reach", action="store_true", help="note which tests come by, and plant nothing")
    add("--label", default="", help="name of these tests in records.csv; without it nothing is recorded")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    flags = parser.parse_args(sys.argv[1:split])
    flags.options = sys.argv[split + 1 :]
    return flags


def main() -> None:
    flags = parse()
    bench = Bench(flags.repository, flags.folder.resolve(), flags.options)
    listed = (flags.places or flags.folder) / "places.json"
    if not listed.exists():
        listed.write_text(json.dumps(draw(bench.package, flags.number, flags.seed), indent=1))
    drawn = [Place(*row) for row in json.loads(listed.read_text())]
    if flags.reach:
        bench.reach(drawn)
        return
    outcomes = []
    for number, place in enumerate(drawn):
        outcomes.append(bench.killer(number, place))
        print(
            f"{number} {place.file}:{place.line} {place.kind}: {place.text[:80]!r}: {outcomes[-1] or 'NOT FOUND'}",
            flush=True,
        )
    found = sum(map(bool, outcomes))
    print(f"{found} of {len(drawn)} found")
    if flags.label:
        record(
            "planted faults that the tests find", flags.label, found, "faults", on=f"{len(drawn)} by seed {flags.seed}"
        )


if __name__ == "__main__":
    main()
