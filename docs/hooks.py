"""What the site takes from elsewhere in the repository: three pages from files at the top, and the list of methods from the registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TOP = Path(__file__).parent.parent
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
LINKS = {
    "docs/figures/": "figures/",
    "(docs/": "(",
    "(CONTRIBUTING.md)": "(contributing.md)",
    "[CITATION.cff](CITATION.cff)": "`CITATION.cff`",
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = PAGES.get(page.file.src_uri)
    if source is not None:
        markdown = (TOP / source).read_text()
        for old, new in LINKS.items():
            markdown = markdown.replace(old, new)
    return markdown.replace("<!-- every method -->", _every_method())


def _every_method() -> str:
    """A section per relaxation, with its docstring."""
    import khot

    return "\n\n".join(f"::: {_path(khot, name)}" for name in sorted(khot.RELAXATIONS))


def _path(package: Any, name: str) -> str:
    """Where the public function of a relaxation is written."""
    function = getattr(package, f"{name}_topk", None) or getattr(package, f"{name}_matrix")
    return f"{function.__module__}.{function.__name__}"
