"""The Sphinx configuration: `make docs` builds the site in build/docs, with warnings as errors."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import variable_batch_size as vbs

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / "benchmarks")]  # the extensions, and the records that one of them reads

project = "variable_batch_size"
author = "The variable_batch_size contributors"
copyright = f"2026, {author}"
version = release = vbs.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinxcontrib.mermaid",
    "measurements",
    "rule_pages",
    "side_by_side",
]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
mermaid_height = "auto"
mermaid_fullscreen = False
mermaid_init_config = {"startOnLoad": False, "flowchart": {"useMaxWidth": False}}
myst_fence_as_directive = ["mermaid"]  # GitHub draws these blocks, too

default_role = "literal"  # `x` in a docstring is code
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = "variable_batch_size"
html_theme_options = {"navigation_with_keys": True}
copybutton_exclude = ".linenos, .gp, .go"

# Pages link to these paths, which GitHub shows; on the site they are pages, or files to download.
OUTSIDE = {
    "../benchmarks/NOTEBOOK.md": "notebook.md",
    "../benchmarks/RESULTS.md": "path:../benchmarks/RESULTS.md",
    "RESULTS.md": "path:../benchmarks/RESULTS.md",  # as the notebook links to it, beside which it lies
    "../CONTRIBUTING.md": "contributing.md",
    "../variable_batch_size/rules": "api.md#rules",
}


def link_to_pages(app: Any, *event: Any) -> None:
    """Replace the targets of links to `OUTSIDE` in the text of a page, or of a file that a page includes."""
    source: list[str] = event[-1]
    source[0] = re.sub(r"(?<=\]\()[./\w]+", lambda path: OUTSIDE.get(path[0], path[0]), source[0])


def setup(app: Any) -> None:
    """Register what changes the pages."""
    app.connect("source-read", link_to_pages)
    app.connect("include-read", link_to_pages)
