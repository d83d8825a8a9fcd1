"""One word for one thing: habits that make pages hard to read, and names that the glossary does not have.

Habits are looked for in the pages, in the docstrings of the reference, and in the messages of errors and warnings.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import variable_batch_size as vbs
from helpers.documented import documented
from helpers.messages import all_messages
from helpers.pages import DOCS, ROOT

PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])
HABITS = {
    r"\b[Aa] training\b(?! (?:run|script|loop|step|job|set|loader|argument|method|process))": "training, a run",
    r"\b[Tt]rainings\b": "runs, models",
    r"\b(?:goes|go|went|going) on\b|\bcomes? again\b|\bbeg[ia]ns? anew\b": "continue, is repeated, restarts",
    r"\b(?:in any|another) world\b": "any number of ranks",
    r", too[.,;:)]": "also, before the verb",
    r"\b(?:the|a|each|first) forward\b(?! pass| and backward)|\b(?:forwards|backwards)\b(?! compat)": "forward pass",
    r"\banother `": "a different `...`",
    r"\b(?:unrun|untried)\b": "not tested",
    r"\braises?(?= (?:if|when|unless)\b)": "raises an error",
    r"\bmay be (?:a|an|the)\b": "can be",
    r"\b(?:nobody|whoever)\b": "name who",
    r"\bin the mean\b": "on average",
    r"\b(?:that|those) of\b": "name the thing again",
    r"\bis (?:without effect|not decided)\b(?! \|)": "is ignored; the runs do not show whether",
}  # pattern -> what to write instead
WORDS = {
    "minibatch": {"minibatch_size", "find_minibatch_size", "max_minibatch_size"},
    "batchsize": {"ref_batchsize"},
    "watch": set[str](),
    "weighted": set[str](),
    "cursor": set[str](),
    "course": set[str](),
    "count": {"count", "counts"},  # of tokens or another denominator; samples and updates are numbers
    "worker": set[str](),  # a process of a loader; one that trains is a rank
}  # pieces of names for which the glossary has another word -> names that keep them, because scripts have them

PIECES = re.compile(r"[A-Z]?[a-z]+")


def prose(text: str) -> str:
    """The text of a page in one line, without code and targets of links."""
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    return " ".join(re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`...`", text)).split())


def habits_of(text: str) -> dict[str, tuple[str, str]]:
    """Return each habit that a text has -> what to write instead, and the words around it."""
    text = prose(text)
    return {
        match[0]: (better, text[max(0, match.start() - 40) : match.end() + 20])
        for pattern, better in HABITS.items()
        for match in re.finditer(pattern, text)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_has_none_of_the_habits(page):
    assert habits_of(page.read_text()) == {}


def sentences_of(thing: Any) -> str:
    """Return a docstring without its examples and the names of its arguments."""
    return re.sub(r"^ *(?:(?:>>>|\.\.\.).*|\w+:)", "", inspect.getdoc(thing) or "", flags=re.MULTILINE)


def test_a_docstring_of_the_reference_has_none_of_the_habits():
    found = {name: habits_of(sentences_of(thing)) for name, thing in documented() if thing is not None}
    assert len(found) > 250
    assert {name: habits for name, habits in found.items() if habits} == {}


def test_a_message_has_none_of_the_habits():
    found = {where: habits_of(text) for where, text in all_messages()}
    assert {where: habits for where, habits in found.items() if habits} == {}


@pytest.mark.parametrize(
    "sentence",
    [
        "It goes on. ",
        "Pass another `trace`.",
        "torchft raises if x.",
        "a training ends",
        "its step or that of\nthe loop",
    ],
)
def test_a_habit_is_found(sentence):
    assert any(re.search(pattern, prose(sentence)) for pattern in HABITS)


def public_names(owner: Any) -> set[str]:
    """The names that a user types: of a module, its classes, their attributes and arguments."""
    names = set[str]()
    for name in owner.__all__:
        value = getattr(owner, name)
        names.add(name)
        names |= {each for each in vars(value) if not each.startswith("_")} if inspect.isclass(value) else set()
        if callable(value):
            names |= {*inspect.signature(value).parameters}
    return names


@pytest.mark.parametrize("piece", WORDS)
def test_public_names_use_the_words_of_the_glossary(piece):
    names = {name for room in (vbs, vbs.rules, vbs.adaptive, vbs.testing) for name in public_names(room)}
    modules = {path.stem for path in (ROOT / "variable_batch_size").rglob("*.py")}
    assert {name for name in names | modules if piece in map(str.lower, PIECES.findall(name))} <= WORDS[piece]
