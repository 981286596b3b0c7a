"""The applications on real data, from features and routing to dynamics and beams; finished cells are kept."""

from __future__ import annotations

import importlib
import sys

NAMES = ("features", "wide", "routing", "sparse", "autoencoder", "steps", "neighbours", "dictionary", "sindy", "pronunciation", "beams")


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in (*NAMES, "page"):
        sys.stderr.write(f"usage: python -m bench applications {{{','.join(NAMES)},page}} [--quick] [--help]\n")
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    return importlib.import_module(f"bench.applications.{argv[0]}").main(argv[1:]) or 0
