"""Check a built site (``python -m tools.links site``): every local link, anchor and file exists, nothing is loaded from elsewhere."""

from __future__ import annotations

import argparse
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse

LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}
_KEPT = ("stylesheet", "icon", "preload", "modulepreload", "prefetch", "preconnect", "dns-prefetch")


class Page(HTMLParser):
    """The ids of a page, where it leads, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.leads: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.leads.append(given["href"])
        if tag in LOADS and LOADS[tag] in given and (tag != "link" or any(word in given.get("rel", "") for word in _KEPT)):
            self.loads.append(given[LOADS[tag]])


@cache
def parsed(path: Path) -> Page:
    return Page(path.read_text())


def problems(site: Path) -> list[str]:
    """What is wrong, one line each."""
    found = []
    for path in sorted(site.rglob("*.html")):
        page = parsed(path)
        found += [f"{path.relative_to(site)}: {said}" for link in page.leads for said in _lead(link, path, site)]
        found += [f"{path.relative_to(site)}: {said}" for link in page.loads for said in _load(link, path, site)]
    return found


def _lead(link: str, path: Path, site: Path) -> list[str]:
    parts = urlparse(link)
    if parts.scheme or link.startswith("//"):
        return []  # a reader may follow it; nothing is loaded
    target = _target(parts.path, path, site)
    if not target.is_file():
        return [f"{link} leads nowhere"]
    anchor = unquote(parts.fragment)
    lost = anchor and target.suffix == ".html" and not anchor.startswith("__") and anchor not in parsed(target).ids
    return [f"{link} names no place on {target.name}"] if lost else []


def _load(link: str, path: Path, site: Path) -> list[str]:
    parts = urlparse(link)
    if parts.scheme == "data":
        return []
    if parts.scheme or link.startswith("//"):
        return [f"loads {link} from elsewhere"]
    return [] if _target(parts.path, path, site).is_file() else [f"loads {link}, which is not there"]


def _target(link: str, path: Path, site: Path) -> Path:
    if not link:
        return path
    target = site / unquote(link).lstrip("/") if link.startswith("/") else path.parent / unquote(link)
    return target / "index.html" if target.is_dir() else target


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.links", description=__doc__)
    parser.add_argument("site", type=Path)
    site = parser.parse_args(arguments).site
    found = problems(site)
    pages = len(list(site.rglob("*.html")))
    sys.stderr.write(
        "".join(f"{line}\n" for line in found) or f"{pages} pages, every link leads somewhere and nothing is loaded from elsewhere\n"
    )
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
