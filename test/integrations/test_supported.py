"""The settings that trainers support, on their pages."""

from __future__ import annotations

from importlib import import_module

import pytest

from helpers.frameworks import missing
from helpers.pages import DOCS

TABLES = {"keras": "keras.model", "lightning": "lightning.supported", "transformers": "transformers.supported"}


@pytest.mark.parametrize("trainer", [name for name in TABLES if not missing(name)])
def test_the_page_has_the_table_of_settings(trainer):
    settings = import_module(f"variable_batch_size.integrations.{TABLES[trainer]}").SETTINGS
    rows = (f"| {each.name} | {each.supported} | {each.remedy} |" for each in settings)
    table = "\n".join(("| setting | supported | otherwise |", "|---|---|---|", *rows))
    page = DOCS / "trainers" / f"{trainer}.md"
    assert table in page.read_text(), f"copy this into {page}:\n{table}"
