"""Run one benchmark by name: every file or folder beside this one that defines ``main(argv)`` is a command."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent


def commands() -> dict[str, str]:
    """Name and first line of the docstring of every benchmark."""
    found = {}
    for path in [*HERE.glob("[!_]*.py"), *HERE.glob("*/__init__.py")]:
        text = path.read_text()
        if "\ndef main(" in text:
            found[path.parent.name if path.stem == "__init__" else path.stem] = text.split("\n", 1)[0].strip('"')
    return dict(sorted(found.items()))


def main(argv: list[str]) -> int:
    known = commands()
    if not argv or argv[0] not in known:
        listing = "\n".join(f"  {name:12} {about}" for name, about in known.items())
        asked = argv and argv[0] not in ("-h", "--help")
        head = f"unknown benchmark {argv[0]!r}\n\n" if asked else ""
        sys.stderr.write(f"{head}usage: python -m bench NAME [--quick] [--help]\n\n{listing}\n")
        return 2 if asked or not argv else 0
    return importlib.import_module(f"bench.{argv[0]}").main(argv[1:]) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
