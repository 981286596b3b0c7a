"""A newcomer's path from a clean clone, timed step by step (``python -m tools.newcomer``): demo, documentation, explorer."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PORT = 8651
PATIENCE = 3600  # seconds for a step, installations and a busy machine included


STEPS = {
    "the demo: torch": ["make", ".venv/.torch"],
    "the demo: khot, compiled": ["make", ".venv/.torch-and-khot"],
    "the demo: its other packages": ["make", ".venv/.demo"],
    "the demo: make demo, to the table and the picture": ["make", "demo"],
    "the documentation: its packages": ["make", ".venv/.docs"],
    "the documentation: make docs": ["make", "docs"],
    "the explorer: its packages": ["make", ".venv/.explore"],
}


def main() -> int:
    began = time.monotonic(), _processor()
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "khot"
        step("git clone", ["git", "clone", "--quiet", str(ROOT), str(clone)], Path(folder))
        for name, command in STEPS.items():
            step(name, command, clone)
        explore(clone)
    tell("all of it", *began)
    return 0


def step(name: str, command: list[str], cwd: Path) -> None:
    began = time.monotonic(), _processor()
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    tell(name, *began)


def explore(clone: Path) -> None:
    """Until the page answers."""
    began = time.monotonic(), _processor()
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    server = subprocess.Popen(["make", "explore", f"ARGS=--port {PORT}"], cwd=clone, **quiet)
    try:
        while not _answers():
            if server.poll() is not None or time.monotonic() - began[0] > PATIENCE:
                raise SystemExit("make explore ended, or never answered")
            time.sleep(0.2)
        seconds = time.monotonic() - began[0]
    finally:
        os.killpg(server.pid, 15)
        server.wait()
    tell("the explorer: make explore, until the page answers", time.monotonic() - seconds, began[1])


def _answers() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def tell(name: str, began: float, processor: float) -> None:
    wall, busy = time.monotonic() - began, _processor() - processor
    print(f"{name:52} {wall:6.0f} s, {busy:5.0f} s of the processor, load average {os.getloadavg()[0]:.1f}", flush=True)


def _processor() -> float:
    """Seconds that the processes started so far have used, as far as they have ended: other work on the machine hardly changes them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
