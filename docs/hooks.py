"""What the site makes of the repository: pages from files at the top, lists of what is exported, a page per method and design."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

TOP = Path(__file__).parent.parent
sys.path.insert(0, str(TOP))  # mkdocs runs this file by its path

from docs import pages, pictures  # noqa: E402

PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
ELSEWHERE = "https://unpkg.com/iframe-worker/shim"  # what the theme's offline plugin would load
HERE = "assets/disk_worker.js"
TABLE = re.compile(r"<!-- table: (methods|designs) -->.*?<!-- end -->", re.DOTALL)
LINKS = {
    "docs/figures/": "figures/",
    "(docs/": "(",
    ".ipynb)": ".md)",
    "(CONTRIBUTING.md)": "(contributing.md)",
    "[CITATION.cff](CITATION.cff)": "`CITATION.cff`",
}


def on_config(config: Any) -> Any:
    """The generated pages follow the overview of their kind in the menu."""
    for kind, overview in {"methods": "methods.md", "designs": "sampling.md"}.items():
        listed = [path for path, _ in pages.every() if path.startswith(f"{kind}/")]
        for entry in (entry for section in config.nav for entries in section.values() for entry in entries):
            for title, path in entry.items():
                if path == overview:
                    entry[title] = [{"Overview": overview}, *({Path(each).stem: each} for each in listed)]
    return config


def on_files(files: Any, config: Any) -> Any:
    for path, text in (*pages.every(), *pages.notebooks()):
        files.append(File.generated(config, path, content=text))
    for name, draw in pictures.every():
        files.append(File.generated(config, f"figures/made/{name}.svg", content=pictures.svg(draw)))
    return files


def on_post_page(output: str, page: Any, **_: Any) -> str:
    return output.replace(ELSEWHERE, "../" * page.url.count("/") + HERE)


def on_post_template(output_content: str, **_: Any) -> str:
    return output_content.replace(ELSEWHERE, f"/{HERE}")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = PAGES.get(page.file.src_uri)
    if source is not None:
        markdown = (TOP / source).read_text()
        for old, new in LINKS.items():
            markdown = markdown.replace(old, new)
    for mark, written in MARKS.items():
        if mark in markdown:
            markdown = markdown.replace(mark, written())
    return TABLE.sub(_linked, markdown)


def _linked(table: re.Match[str]) -> str:
    """A table of the registry whose names lead to their pages."""
    return re.sub(r"^\| `(\w+)`", rf"| [`\1`]({table[1]}/\1.md)", table[0], flags=re.MULTILINE)


def _every_verb() -> str:
    """Every exported function that is not a method's own, in the order of the alphabet."""
    import khot

    own = {_where(pages.function_of(name)) for name in khot.RELAXATIONS}
    found = [getattr(khot, name) for name in khot.__all__ if inspect.isfunction(getattr(khot, name))]
    return "\n\n".join(f"::: {path}" for path in (_where(function) for function in found) if path not in own)


def _every_estimator() -> str:
    import khot

    return "\n\n".join(f"::: {_where(getattr(khot.estimators, name))}" for name in sorted(khot.estimators.ESTIMATORS))


def _every_module() -> str:
    """Every class and function that khot.nn exports."""
    import khot

    public = {name: value for name, value in vars(khot.nn).items() if not name.startswith("_") and not inspect.ismodule(value)}
    return "\n\n".join(f"::: {_where(value)}" for _, value in sorted(public.items()))


def _every_sharded_verb() -> str:
    import khot

    found = {name: value for name, value in vars(khot.distributed).items() if inspect.isfunction(value) and not name.startswith("_")}
    return "\n\n".join(f"::: {_where(value)}" for _, value in sorted(found.items()))


def _where(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


MARKS = {
    "<!-- every method -->": lambda: pages.links("methods"),
    "<!-- every design -->": lambda: pages.links("designs"),
    "<!-- choices -->": pages.choices,
    "<!-- every verb -->": _every_verb,
    "<!-- every estimator -->": _every_estimator,
    "<!-- every module -->": _every_module,
    "<!-- every sharded verb -->": _every_sharded_verb,
}
