"""Configuration of the documentation. Building it needs no network."""

import importlib
import pkgutil
import re
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


def _is_made_in(module, name, value):
    if getattr(value, "__module__", None) != module.__name__ or name.startswith("_"):
        return False
    return callable(value) and not hasattr(value, "_fields")  # fields of named tuples have the same names


def write_internals(app):
    """Write ``api/internals.rst``: every module of these folders with what no other page of the API describes."""
    folder = Path(__file__).parent / "api"
    written = "".join(page.read_text() for page in folder.glob("*.rst") if page.name != "internals.rst")
    described = set(re.findall(r"auto(?:class|function|data|module):: (?:[\w.]*\.)?(\w+)$", written, re.MULTILINE))
    described |= {name for names in re.findall(r":members: (.+)", written) for name in names.split(", ")}
    lines = ["What layers are made of", "======================="]
    for room in ("geometry", "groups", "functional", "encodings", "plain", "equivariance", "nn", "models", "_escnn"):
        package = importlib.import_module(f"escnn_attention.{room}")
        lines += ["", room, "-" * len(room), ""]
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.ispkg or "_kernels" in found.name or f"automodule:: {found.name}\n" in written:
                continue
            module = importlib.import_module(found.name)
            made_here = [name for name, value in vars(module).items() if _is_made_in(module, name, value)]
            names = [name for name in made_here if name not in described]
            if room == "functional":  # whose classes have the same names in several modules
                names = [name for name in names if not isinstance(getattr(module, name), type)]
            members = f"   :members: {', '.join(names)}" if names else "   :no-members:"
            lines += [f".. automodule:: {found.name}", members, ""]
    text = "\n".join(lines)
    if not (page := folder / "internals.rst").exists() or page.read_text() != text:
        page.write_text(text)


def setup(app):
    """Generate a page before Sphinx reads them all."""
    app.connect("builder-inited", write_internals)
