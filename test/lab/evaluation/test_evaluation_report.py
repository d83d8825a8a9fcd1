"""The page of a report: it says what the judgement says, needs no other file, and is read without colors."""

from __future__ import annotations

import re
import sys
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from helpers.evaluations import trainings
from variable_batch_size.lab.evaluation.figures import draw
from variable_batch_size.lab.evaluation.judgement import judge
from variable_batch_size.lab.evaluation.records import REFERENCE, Evaluation, EvaluationPlan
from variable_batch_size.lab.evaluation.report import render, write_report
from variable_batch_size.lab.evaluation.wording import describe_failures, describe_reference, verdict

RAMP, CONSTANT = "0:64 40:256", "256"
VOID = {"meta", "br", "link", "img", "hr"}
NAN = float("nan")


def noise(mean, seed, seeds=5):
    return (mean + 0.01 * np.random.default_rng(seed).standard_normal(seeds)).tolist()


def frame(**columns):
    """A tuned reference; root is better on the ramp, linear fails, and under the constant trace nothing is decided."""
    found = {(REFERENCE, "constant", factor): noise(0.4 + 0.1 * (factor != 1), 9) for factor in (0.5, 1.0, 2.0)}
    found[RAMP, "constant"], found[RAMP, "root"] = noise(0.5, 0), noise(0.45, 1)
    found[RAMP, "linear"] = [*noise(0.5, 2, 2), NAN, NAN, 2.2]
    found[CONSTANT, "constant"], found[CONSTANT, "root"] = noise(0.5, 3), noise(0.495, 4)
    found[CONSTANT, "linear"] = [NAN] * 5
    return trainings(found, **columns)


def judged(rows, *plans):
    evaluation = Evaluation(rows, plans)
    return evaluation, judge(evaluation)


def said(rows):
    (judgement,) = judged(rows)[1]
    return {trace.name: [str(sentence) for sentence in verdict(judgement, trace)] for trace in judgement.traces}


class Page(HTMLParser):
    """The elements of a page, each of which is closed, and its text without style."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.tags = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if not {"style", "svg"} & set(self.open) else ""


@pytest.fixture(scope="module")
def page():
    rows = frame()
    return render(*judged(rows, EvaluationPlan("vbs evaluate 'a & b' <c>", tuple(rows["key"]))))


def test_the_verdict_of_each_trace():
    found = said(frame())
    assert re.fullmatch(r"\u25b2 root: better than constant by 0\.0\d+ \(0\.0\d+ to 0\.0\d+\)", found[RAMP][0])
    assert found[RAMP][1:] == ["? not decided: linear", "\u2715 linear: fails in 3 of 5"]
    first, *others = found[CONSTANT]
    assert re.match(r"\? not decided, use constant: no rule is seen to be better; root is (ahead|behind) by 0\.", first)
    assert re.search(r"; a new evaluation of \d+ seeds would see 0\.\d+$", first)
    assert others == ["\u2715 linear: fails in 5 of 5", "= the batch size is constant: a rule is a learning rate here"]


def test_what_is_worse_and_what_is_the_same():
    rows = {(RAMP, "constant"): noise(0.5, 0), (RAMP, "root"): noise(0.6, 1), (RAMP, "linear"): noise(0.5, 0)}
    first, worse, same = said(trainings(rows))[RAMP]
    assert first == "= constant: no other rule is better"
    assert re.match(r"\u25bc root: worse than constant by 0\.1\d+ \(0\.\d+ to 0\.\d+\)$", worse)
    assert same == "= linear: the same runs as constant, bit for bit"
    del rows[RAMP, "root"]
    assert said(trainings(rows))[RAMP] == ["= all rules have the same runs, bit for bit: use constant"]
    del rows[RAMP, "linear"]
    assert said(trainings(rows))[RAMP] == ["= constant is the only rule"]


@pytest.mark.parametrize(
    ("constant", "root", "expected"),
    [
        ([NAN] * 3, [NAN] * 3, ["\u2715 nothing trains under this trace: all runs failed"]),
        (
            [NAN] * 3 + [0.5],
            noise(0.5, 0, 4),
            ["? not decided, use root: it failed in 0 of 4, constant in 3 of 4", "\u2715 constant: fails in 3 of 4"],
        ),
        (
            [0.5],
            [0.4],
            ["? not decided, use constant: no rule is seen to be better; of fewer than 5 seeds nothing is claimed"],
        ),
    ],
    ids=["all fail", "the baseline fails", "one seed"],
)
def test_what_is_said_of_failures_and_of_one_seed(constant, root, expected):
    assert said(trainings({(RAMP, "constant"): constant, (RAMP, "root"): root})) == {RAMP: expected}


def test_a_difference_that_another_rate_may_bring_says_so():
    rows = {(RAMP, "constant"): noise(0.5, 0), (RAMP, "root"): noise(0.45, 1)}
    at = zip((0.5, 1.0, 2.0), (0.5, 0.4, 0.33), strict=True)
    rows |= {(REFERENCE, "constant", factor): noise(mean, int(10 * mean)) for factor, mean in at}
    (judgement,) = judged(trainings(rows))[1]
    assert describe_reference(judgement).startswith(
        "The reference is not tuned: at batch size 64 and learning rate 0.1, 2 times"
    )
    assert "(a difference below 0." in render(*judged(trainings(rows)))
    first = verdict(judgement, judgement.traces[0])[0].text
    assert re.search(r", which another learning rate may bring, too \(up to 0\.\d+\)$", first)


def test_rules_that_fail_more_often_are_said_to():
    rows = {(RAMP, "constant"): noise(0.5, 0, 10), (RAMP, "linear"): [NAN] * 8 + noise(0.5, 1, 2)}
    (judgement,) = judged(trainings(rows))[1]
    text = "\u25bc linear fails more often than constant: 8 of 10 against 0 of 10 runs under all traces"
    assert [*map(str, describe_failures(judgement))] == [text]


def test_the_page_says_it(page):
    parsed = Page(page)
    assert parsed.open == []
    for name, sentences in said(frame()).items():
        assert name in parsed.text
        for sentence in sentences:
            assert sentence.replace(" ", "", 1) in parsed.text.replace("\n", "")
    assert (
        "The reference is tuned: at batch size 64 and learning rate 0.1, other rates (0.5, 2 times) are" in parsed.text
    )
    assert "vbs evaluate 'a & b' <c>" in parsed.text
    for text in ("3.11.7", "2.9.0", "0123abc", "seeds 0, 1, 2, 3 and 4", "by the root of k = B / ref_batchsize"):
        assert text in parsed.text


def test_a_claim_stands_beside_the_number_that_it_is_about(page):
    """Also without colors, and whatever columns there are."""
    (claimed,) = re.findall(r'<td class="claimed">([^<]+)</td>', page)
    assert re.fullmatch(r"-0\.0\d+ \(-0\.0\d+ to -0\.0\d+\): better", claimed)


def test_the_page_needs_no_other_file(page):
    for tag, attributes in Page(page).tags:
        assert tag not in ("script", "link", "img", "iframe", "object")
        for name in ("href", "xlink:href", "src"):
            assert (attributes.get(name) or "#").startswith("#")
    assert not re.search(r"url\((?!#)|@import", page)


def test_twelve_rules_have_twelve_colors():
    (judgement,) = judged(trainings({(RAMP, f"power:0.{rule}"): [0.5] * 2 for rule in range(10, 22)}))[1]
    lines = [line for line in draw(judgement).get_axes()[2].get_lines() if line.get_label() in judgement.rules]
    assert len({line.get_color() for line in lines}) == len(lines) == 12


def test_the_figure_has_a_look_for_each_rule():
    (judgement,) = judged(frame())[1]
    figure = draw(judgement)
    panels = figure.get_axes()
    assert len(panels) == 6
    lines = [line for line in panels[4].get_lines() if line.get_label() in judgement.rules]
    assert len({line.get_color() for line in lines}) == len({str(line._dash_pattern) for line in lines}) == 3
    marks = [line.get_label() for line in panels[4].get_lines() if line.get_marker() in ("^", "v")]
    assert marks == ["_claimed to be better", "claimed to be better"]  # of root, and its line of the legend
    assert panels[4].get_ylim() != panels[5].get_ylim()  # an axis of its own for each trace
    crosses = [line for line in panels[4].get_lines() if line.get_label() == "_failed"]
    low, high = panels[4].get_ylim()
    assert len(crosses) == 3
    assert all(low <= line.get_ydata()[-1] <= high for line in crosses)


def test_other_learning_rates_are_a_response_curve():
    kinds = [(RAMP, rule, factor) for rule in ("constant", "root") for factor in (1.0, 2.0)]
    rows = {kind: noise(0.1 if number == 3 else 0.5, number) for number, kind in enumerate(kinds)}
    evaluation, judgements = judged(trainings(rows))
    assert {row.answer for row in judgements[0].traces[0].rows} == {"baseline", "open"}
    text = Page(render(evaluation, judgements)).text
    assert "Loss by factor on the learning rate, without claims: at another rate constant may do as well as" in text
    assert re.search(r"root0\.\d+ \(0\.\d+ to 0\.\d+\)0\.[01]\d+ \(", text)
    assert len(draw(judgements[0]).get_axes()) == 4


def test_notes_name_what_is_missing():
    rows = frame(start="runs/a, after 64 updates")
    rows["environment"] = [{"source of the task": f"{seed % 2}"} for seed in rows["seed"]]
    rows.loc[rows["seed"] == 4, "status"] = "killed"
    first, second = (
        EvaluationPlan("a", tuple(rows.loc[rows["seed"] < 2, "key"])),
        EvaluationPlan("b", (*rows["key"], "0" * 16)),
    )
    text = unescape(Page(render(*judged(rows, first, second))).text)
    assert "1 runs of the plan have not ended: nothing is claimed yet." in text
    assert "An earlier plan judged the seeds 0 and 1: they are left out here" in text
    assert "Killed, and in no number: constant at 0.5x under the reference, seed 4; " in text
    assert "All runs start at runs/a, after 64 updates: what is claimed holds for this checkpoint." in text
    assert "The runs have 2 versions of the file of the task; give it another version." in text
    assert "\u25b2root" not in text


@pytest.mark.parametrize(
    ("losses", "first"),
    [
        ({(REFERENCE, "constant"): [0.4, 0.41]}, None),
        ({(RAMP, "constant", 2.0): [0.4, 0.41]}, None),
        ({(RAMP, "constant"): [None, None], (RAMP, "root"): [None, None]}, "? no run of constant ended under"),
        ({(RAMP, "constant"): [None, None], (RAMP, "root"): [0.4, 0.41]}, "? no run of constant ended under"),
        ({(RAMP, "constant"): [0.4, NAN], (RAMP, "root"): [NAN, NAN]}, "= constant: no other rule is better"),
    ],
)
def test_an_evaluation_that_has_little_has_a_report(losses, first):
    rows = trainings(losses)
    rows["curve"] = [
        {} if status == "killed" else curve for status, curve in zip(rows["status"], rows["curve"], strict=True)
    ]
    assert Page(render(*judged(rows))).open == []
    assert list(said(rows)) == ([] if first is None else [RAMP])
    assert first is None or said(rows)[RAMP][0].startswith(first)


@pytest.mark.slow("draws the figure twice in each format")
def test_the_files_beside_the_page(tmp_path):
    evaluation, judgements = judged(frame())
    (tmp_path / "report-earlier.png").touch()
    assert write_report(evaluation, judgements, tmp_path) == tmp_path / "report.html"
    pictures = {f"report-simulated.{kind}" for kind in ("png", "pdf", "svg")}
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.csv", *pictures}
    rows = pd.read_csv(tmp_path / "report.csv")
    assert len(rows) == len(evaluation.trainings)
    assert rows.loc[rows["status"] == "finished", "loss"].notna().all()
    assert {"task", "trace", "rule", "seed", "lr_factor", "failed", "accuracy", "wall_seconds"} <= {*rows.columns}
    pytest.importorskip("pyarrow")
    write_report(evaluation, judgements, tmp_path, parquet=True)
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.parquet", *pictures}
    again = pd.read_parquet(tmp_path / "report.parquet").replace("", np.nan)
    pd.testing.assert_frame_equal(again, rows, check_dtype=False)


def test_parquet_needs_a_library(tmp_path, monkeypatch):
    found = judged(frame())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'variable_batch_size\[parquet\]'"):
        write_report(*found, tmp_path, parquet=True)
    assert not list(tmp_path.iterdir())
