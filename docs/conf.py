"""Configuration of the documentation. Building it needs no network."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import escnn_attention

project = "escnn_attention"
author = "The escnn_attention developers"
copyright = f"2025, {author}"
release = version = escnn_attention.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # MathJax in the pages: formulas need no network either
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

myst_enable_extensions = ["amsmath", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"escnn_attention {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
html_theme_options = {"navigation_with_keys": True, "sidebar_hide_name": False}
