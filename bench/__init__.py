"""Benchmarks of khot: ``python -m bench NAME [--quick]`` writes data, ``python -m bench plot`` draws it."""
