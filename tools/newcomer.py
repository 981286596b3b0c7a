"""A newcomer's path from a clean clone, timed (``python -m tools.newcomer``): demo, documentation, explorer."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent
PORT = 8651
PATIENCE = 3600  # seconds for a step, installations and a busy machine included


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "khot"
        step("git clone", ["git", "clone", "--quiet", str(ROOT), str(clone)], Path(folder))
        step("make demo, with the installation of torch and khot", ["make", "demo"], clone)
        step("make demo again", ["make", "demo"], clone)
        step("make docs", ["make", "docs"], clone)
        explore(clone)
    return 0


def step(name: str, command: list[str], cwd: Path) -> None:
    began = time.monotonic()
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    tell(name, began)


def explore(clone: Path) -> None:
    """Until the page answers."""
    began = time.monotonic()
    server = subprocess.Popen(["make", "explore", f"ARGS=--port {PORT}"], cwd=clone, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        while not _answers():
            if server.poll() is not None or time.monotonic() - began > PATIENCE:
                raise SystemExit("make explore ended, or never answered")
            time.sleep(0.2)
        tell("make explore, until the page answers", began)
    finally:
        os.killpg(server.pid, 15)


def _answers() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def tell(name: str, began: float) -> None:
    print(f"{name:52} {time.monotonic() - began:6.0f} s   load average {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
