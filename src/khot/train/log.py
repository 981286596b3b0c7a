"""Where a run writes what happens: a CSV file, a bar on the terminal, TensorBoard if asked."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLUMNS: tuple[str, ...] = ("step", "epoch", "loss", "lr", "tau", "keep", "cpu_seconds", "validation")


class Log:
    """Rows of a CSV file; on resume, what came after the checkpoint is forgotten."""

    def __init__(self, folder: Path, *, start: int, tensorboard: bool) -> None:
        self.path = folder / "log.csv"
        rows = [row for row in self._old() if int(row["step"]) <= start]
        with self.path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        self.board = _board(folder) if tensorboard else None

    def _old(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            return list(csv.DictReader(file))

    def write(self, **values: Any) -> None:
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(values)
        if self.board is not None:
            for name, value in values.items():
                if name not in ("step", "epoch"):
                    self.board.add_scalar(name, value, values["step"])


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise ImportError("tensorboard=True needs the package tensorboard; install it with: pip install tensorboard") from error
    return SummaryWriter(str(folder))


class Bar:
    """A progress bar with the time left, or nothing."""

    def __init__(self, progress: Any, task: Any) -> None:
        self.progress, self.task = progress, task

    def show(self, step: int, text: str) -> None:
        if self.progress is not None:
            self.progress.update(self.task, completed=step, text=text)


@contextlib.contextmanager
def progress_bar(total: int, start: int, *, enabled: bool) -> Iterator[Bar]:
    """``with progress_bar(...) as bar: bar.show(step, text)``."""
    if not enabled:
        yield Bar(None, None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.fields[text]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield Bar(progress, progress.add_task("", total=total, completed=start, text=""))
