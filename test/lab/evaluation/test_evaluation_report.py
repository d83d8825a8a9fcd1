"""The report: one file, whose numbers are those of the analysis, and whatever a name holds is text."""

from __future__ import annotations

import csv
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from helpers.evaluations import EFFECTS, records, shortened
from helpers.pages import ROOT
from variable_batch_size.lab.evaluation import Analysis, read_records, write_report
from variable_batch_size.lab.evaluation.figures import FORMATS, draw_regret
from variable_batch_size.lab.evaluation.report import _table, render
from variable_batch_size.lab.evaluation.wording import interval

TARGETS = {"simulated": ("loss", 0.51)}
COMMAND = "vbs evaluate 'a & b' <c>"
VOID = {"meta", "br", "link", "img", "hr"}


class Page(HTMLParser):
    """The elements of a page: each is closed, and where it has text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.cells[-1] += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    found = records(traces=["64", "spot"], divergence={"linear": 0.5})
    assert write_report(found, folder, targets=TARGETS, command=COMMAND, planned=99) == folder / "report.html"
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "report.html").read_text()


def test_the_page_needs_no_other_file(page: str) -> None:
    parsed = Page(page)
    assert parsed.open == []
    for tag, attributes in parsed.tags:
        assert tag not in ("script", "link", "img", "iframe", "object")
        for name in ("href", "xlink:href", "src"):
            assert (attributes.get(name) or "#").startswith("#")
    assert not re.search(r"url\((?!#)|@import", page)


def test_the_numbers_are_those_of_the_analysis(page: str) -> None:
    analysis = Analysis(records(traces=["64", "spot"], divergence={"linear": 0.5}), targets=TARGETS)
    cells = Page(page).cells
    for trace in ("64", "spot"):
        for rule in EFFECTS:
            row = analysis.facts("simulated", trace).loc[rule].to_dict()
            text = interval(row["value"], row["value_low"], row["value_high"])
            assert any(cell.startswith(text) for cell in cells)
            assert f"{row['reached']:.0f} of 3" in cells
    assert any(re.match(r"\d of 3 \(\d+% to \d+%\)$", cell) for cell in cells)
    assert any(cell.startswith("\u2265 ") for cell in cells)
    assert "The target is loss 0.51" in page


def test_it_says_how_it_was_made(page: str) -> None:
    for text in ("of 99, ", "3.11.7", "2.9.0", "0123abc", "a CPU", "vbs evaluate &#39;a &amp; b&#39; &lt;c&gt;"):
        assert text in page


def test_the_pictures_take_their_colors_from_the_page(page: str) -> None:
    pictures = re.findall(r"<svg xmlns:xlink.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 1 + 2 * 7  # the heat map; of each trace sizes, rates, and the curves along what is known
    for picture in pictures:
        ElementTree.fromstring(picture)
        assert "#000000" not in re.sub(r"<g[^>]*>\s*<text[^>]*>[^<]*</text>", "", picture)
        assert "currentColor" in picture
        assert "var(--faint)" in picture or "regret" in picture
        used = set(re.findall(r"(?:href=\"#|url\(#)([^\")]+)", picture))
        assert set(re.findall(r' id="([^"]+)"', picture)) == used
    assert "prefers-color-scheme: dark" in page


def test_tables_and_a_picture_for_papers_lie_beside_it(folder: Path) -> None:
    pictures = {f"report-simulated.{kind}" for kind in FORMATS}
    assert {path.name for path in folder.iterdir()} == {"report.html", "report.csv", "report-table.csv", *pictures}
    with (folder / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["trace"] for row in rows} == {"64", "spot"}
    assert {row["status"] for row in rows} == {"finished", "diverged"}
    assert float(rows[0]["loss"]) == 2.3
    assert (folder / "report-simulated.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "report-simulated.pdf").read_bytes().startswith(b"%PDF")
    ElementTree.fromstring((folder / "report-simulated.svg").read_bytes())


@pytest.mark.nightly("draws a report")
def test_parquet_has_the_numbers_of_the_csv(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    found = records(traces=["64"], divergence={"linear": 0.5})
    names = ("report", "report-table")
    write_report(found, tmp_path, targets=TARGETS)
    tables = [pd.read_csv(tmp_path / f"{name}.csv", dtype={"trace": str}) for name in names]
    write_report(found, tmp_path, targets=TARGETS, table="parquet")
    for name, table in zip(names, tables, strict=True):
        again = pd.read_parquet(tmp_path / f"{name}.parquet")
        # a CSV does not tell None from nan, nor whole numbers of a float column from integers
        pd.testing.assert_frame_equal(again.fillna(np.nan), table, check_dtype=False, check_exact=True)
    assert not list(tmp_path.glob("*.csv"))  # older than the page
    write_report(found, tmp_path)
    assert not list(tmp_path.glob("*.parquet"))


def test_parquet_needs_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'variable_batch_size\[parquet\]'"):
        write_report(records(traces=["64"]), tmp_path, table="parquet")
    assert not list(tmp_path.iterdir())


def test_the_baseline_is_a_rule_of_the_records() -> None:
    with pytest.raises(ValueError, match=r"baseline must be constant or linear or .*, got 'lin'; choose a rule of"):
        Analysis(records(traces=["64"]), baseline="lin")
    others = [record for record in records(traces=["64"]) if record.cell["rule"] != "constant"]
    assert Analysis(others).summary["difference"].isna().all()


@pytest.mark.nightly("draws two reports")
def test_the_same_records_make_the_same_page(page: str) -> None:
    found = records(traces=["64", "spot"], divergence={"linear": 0.5})
    assert render(Analysis(found[::-1], targets=TARGETS), COMMAND, 99) == page


def test_names_are_text(tmp_path: Path) -> None:
    """No name of a task, trace or rule becomes an element, a formula or a path."""
    found = records({"constant": 0.0, "<b>$x_1$</b>": 0.1}, ["64"], task="../<i>a&b</i>")
    page = write_report(found, tmp_path).read_text()
    assert not {"b", "i"} & {tag for tag, _ in Page(page).tags}
    assert "&lt;b&gt;$x_1$&lt;/b&gt;" in page
    assert (tmp_path / "report-i-a-b-i.png").exists()


@pytest.mark.slow("draws a report")
@pytest.mark.parametrize("number", [1, 7])
def test_a_report_of_what_is_there_so_far(number: int, tmp_path: Path) -> None:
    found = records(traces=["64"])[-number:]
    page = write_report(found, tmp_path, targets=TARGETS, planned=300).read_text()
    assert f"{number} of 300" in page


@pytest.mark.slow("draws a report")
def test_all_trainings_diverged(tmp_path: Path) -> None:
    page = write_report(records(traces=["64"], divergence=dict.fromkeys(EFFECTS, 1.0)), tmp_path).read_text()
    assert "no rule can be recommended" in page


@pytest.mark.slow("draws a report")
def test_a_metric_that_rules_are_not_compared_by_may_have_any_name(tmp_path: Path) -> None:
    found = [replace(one, curve=one.curve | {"energy": one.curve["loss"]}) for one in records(traces=["64"])]
    assert "energy along samples" in write_report(found, tmp_path).read_text()


@pytest.mark.nightly("draws a report")
def test_a_metric_without_any_value_has_no_picture(tmp_path: Path) -> None:
    """As where one of two tasks evaluates it; also if a trace was trained at another learning rate only."""
    found = [*records(traces=["64"]), *records(traces=["spot"], lrs=(2.0,), grid=(2.0,))]
    found += [
        replace(one, curve={k: v for k, v in one.curve.items() if k != "accuracy"}) for one in records(task="other")
    ]
    page = write_report(found, tmp_path, metric="accuracy").read_text()
    assert "For other under 64, no rule can be recommended: no training has a finite accuracy." in page
    assert "For simulated under spot, use " in page


@pytest.mark.nightly("draws a report")
def test_a_task_without_a_target_has_no_column_of_it(tmp_path: Path) -> None:
    found = [*records(traces=["64"], task="one"), *records(traces=["64"], task="other")]
    page = write_report(found, tmp_path, targets={"one": ("loss", 0.51)}).read_text()
    assert page.count("<th>reached the target") == 1
    assert "nan of" not in page


def test_each_number_at_the_end_has_an_interval() -> None:
    facts = Analysis(records(seeds=4)).facts("simulated", "spot")
    for name in ("accuracy", "updates", "progress", "samples", "seconds"):
        assert (facts[f"end_{name}_low"] <= facts[f"end_{name}"]).all()
        assert (facts[f"end_{name}"] <= facts[f"end_{name}_high"]).all()


def test_a_regret_stands_beside_the_failures_at_its_own_learning_rate() -> None:
    """In the records of benchmarks/ rules fail at the reference's learning rate that do not at their own one."""
    from matplotlib.figure import Figure

    analysis = Analysis(read_records(ROOT / "benchmarks" / "evaluation_large.csv.gz"))
    axes = Figure().subplots()
    draw_regret(axes, analysis, "fashion-cnn", across=True)
    assert axes.title.get_text() == "regret in loss at the reference's learning rate"
    shown = iter([text.get_text() for text in axes.texts])
    apart = 0
    for trace in analysis.traces("fashion-cnn"):
        facts = analysis.facts("fashion-cnn", trace)
        for rule in analysis.rules:
            text, rows = next(shown), analysis.cells("fashion-cnn", trace)
            rows = rows[(rows["rule"] == rule) & (rows["lr_factor"] == 1) & (rows["seed"] < 1000)]  # those that judge
            failed = re.search(r"(\d) of (\d) failed", text)
            assert (failed.groups() if failed else ("0", None)) == (
                str(rows["failed"].sum()),
                str(len(rows)) if failed else None,
            )
            apart += rule in facts.index and rows["failed"].mean() != facts.loc[rule, "failed"]
    assert apart > 0


def test_a_number_of_fewer_seeds_than_its_trace_has_says_so() -> None:
    """Whether the others failed or are not there yet."""
    found = [
        one for one in records(traces=["64"], seeds=5, grid=()) if one.cell["rule"] != "root" or one.cell["seed"] < 2
    ]
    found = [
        replace(shortened(one, 9), status="diverged") if (one.cell["rule"], one.cell["seed"]) == ("linear", 3) else one
        for one in found
    ]
    table = _table(Analysis(found), "simulated", "64")
    for rule, _, cells in table["rows"]:
        texts = dict(zip(table["columns"], cells, strict=True))
        few = {"root": ", 2 of 5 seeds", "linear": ", 4 of 5 seeds"}.get(rule, ")")
        for name in ("loss", "by Student's t", "loss at the reference's rate", "accuracy"):
            assert texts[name].endswith(few)
        assert texts["updates"].endswith(few if few != ")" else "")


def test_a_simulated_time_that_differs_between_seeds_has_an_interval() -> None:
    """As that of parts of a log; and says of how many seeds it is."""
    found = records({"constant": 0.0, "root": 0.1}, ["64"], seeds=4, grid=())
    failed = next(one for one in found if one.cell["rule"] == "root")
    equal = [replace(one, status="diverged" if one is failed else "finished") for one in found]
    seconds = {one.key: (1 + one.cell["seed"] / 100) * np.array(one.curve["seconds"]) for one in found}
    unequal = [replace(one, curve=one.curve | {"seconds": list(seconds[one.key])}) for one in equal]
    for these, expected in (equal, r"\S+ s"), (unequal, r"\S+ s \(\S+ to \S+\)"):
        table = _table(Analysis(these), "simulated", "64")
        texts = [cells[table["columns"].index("simulated time")] for _, _, cells in table["rows"]]
        assert re.fullmatch(expected, texts[0])
        assert re.fullmatch(expected + ", 3 of 4 seeds", texts[1])
