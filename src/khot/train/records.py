"""One JSON line per finished run: what was run, on what, at what cost, and what came out."""

from __future__ import annotations

import base64
import json
import platform
import subprocess
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Record = dict[str, Any]


def append(path: Path, record: Record) -> None:
    """Add a line; the file and its folder are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record, sort_keys=True) + "\n")


def read(paths: Iterable[Path]) -> list[Record]:
    """The records in files, and in the ``*.jsonl`` of folders."""
    files = [file for path in paths for file in (sorted(path.rglob("*.jsonl")) if path.is_dir() else [path])]
    return [record for file in files for record in _lines(file)]


def _lines(file: Path) -> list[Record]:
    out = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}, line {number} is no record: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{file}, line {number} is no record: {line[:40]}")
        out.append(record)
    return out


def pack(correct: Tensor) -> str:
    """Bits as text, so that two runs can be compared image by image.

    Example:
        >>> unpack(pack(torch.tensor([True, False, True])))
        tensor([ True, False,  True])
    """
    padded = torch.zeros(-(-len(correct) // 8) * 8, dtype=torch.uint8)
    padded[: len(correct)] = correct.to(torch.uint8)
    octets = (padded.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
    return f"{len(correct)}:{base64.b85encode(zlib.compress(bytes(octets.tolist()), 9)).decode()}"


def unpack(text: str) -> Tensor:
    """The inverse of :func:`pack`."""
    length, _, data = text.partition(":")
    octets = torch.tensor(list(zlib.decompress(base64.b85decode(data))), dtype=torch.uint8)
    return ((octets[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).bool().flatten()[: int(length)]


def circumstances() -> Record:
    """Versions, machine and commit."""
    import khot

    return {
        "khot": khot.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit of the source tree that khot was imported from, None where it is no repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
