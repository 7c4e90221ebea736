"""Give the project its public address: links of README.md that hold on a package index too, and links of its own.

    python .github/absolute_links.py https://github.com/OWNER/NAME REF

An index shows the README without the files that it links. So in the tree that packages are built from, and only there,
links to files become links to those files at REF, a commit, tag or branch, and ``[project.urls]`` names the repository.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LINKS = re.compile(r"""(?P<before>\]\(|src="|href=")(?P<path>(?![a-z]+:|#)[^)"]+)""")


def absolute(text: str, address: str, ref: str) -> str:
    """The text, in which links to files of the repository name them by its address."""

    def link(match: re.Match[str]) -> str:
        path = match["path"]
        kind = "raw" if path.endswith((".png", ".svg", ".gif")) else "blob"
        return f"{match['before']}{address}/{kind}/{ref}/{path}"

    return _LINKS.sub(link, text)


def with_urls(text: str, address: str, ref: str) -> str:
    """The pyproject.toml, whose ``[project.urls]`` begin with those of the repository."""
    if text.count("[project.urls]\n") != 1:
        sys.exit("absolute_links: pyproject.toml needs one table [project.urls]")
    urls = {
        "Source": address,
        "Documentation": f"{address}/blob/{ref}/docs/index.md",
        "Changelog": f"{address}/blob/{ref}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    return text.replace("[project.urls]\n", "[project.urls]\n" + lines)


def main(address: str, ref: str) -> None:
    """Rewrite both files in place."""
    for name, changed in (("README.md", absolute), ("pyproject.toml", with_urls)):
        path = ROOT / name
        path.write_text(changed(path.read_text(encoding="utf-8"), address.rstrip("/"), ref), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
