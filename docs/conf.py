"""The Sphinx configuration: `make docs` builds the site in build/docs, with warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `rule_pages` and `side_by_side`

import variable_batch_size as vbs

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
    "rule_pages",
    "side_by_side",
]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]  # GitHub draws these blocks, too

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes as a list: autodoc has documented those of named tuples
napoleon_use_rtype = False

html_theme = "furo"
html_static_path = ["_static"]
html_title = "variable_batch_size"
html_theme_options = {"navigation_with_keys": True}
copybutton_exclude = ".linenos, .gp, .go"
