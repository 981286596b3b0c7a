"""Vision in figures that need no training: throughput of reduced encoders, overhead of the engine, a reduced sentence encoder."""

from __future__ import annotations

import importlib
import sys

NAMES = ("throughput", "overhead", "minilm", "page")


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in NAMES:
        sys.stderr.write(f"usage: python -m bench vision {{{','.join(NAMES)}}} [--quick] [--help]\n")
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    return importlib.import_module(f"bench.vision.{argv[0]}").main(argv[1:]) or 0
