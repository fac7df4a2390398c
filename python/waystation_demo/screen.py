"""What the demo prints: titles, progress bars, proven claims and the table of timings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from waystation_demo.programs import TrainingRun


class Screen:
    """Prints to a console; paths and messages may hold any characters."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def title(self, title: str, subtitle: str) -> None:
        """Opens an act of the demo."""
        line = f"\n[bold]{escape(title)}[/]  [dim]{escape(subtitle)}[/]"
        self._console.print(line, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Prints a plain line."""
        self._console.print(escape(text), highlight=False, soft_wrap=True)

    def proven(self, claim: str) -> None:
        """Prints a claim that was checked."""
        self._console.print(f"  [green]proven[/]  {escape(claim)}", highlight=False, soft_wrap=True)

    @contextmanager
    def progress(self, name: str, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Shows a bar; the function it gives is called with each step and its loss."""
        columns = (
            TextColumn("  {task.description:<18}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console) as bar:
            task = bar.add_task(name, total=steps, loss="-")
            yield lambda step, loss: bar.update(task, completed=step, loss=f"{loss:.3f}")

    def kill(self, run: TrainingRun) -> None:
        """Says when the kill came."""
        assert run.kill is not None
        step, delay_ms = run.kill["step"], run.kill["delay_s"] * 1e3
        finished = any(save["step"] == step for save in run.saves)
        outcome = "had just finished" if finished else "was in flight"
        self.say(f"  killed {delay_ms:.0f} ms after the save of step {step} began, which {outcome}")

    def directory(self, entries: list[dict[str, Any]]) -> None:
        """Shows the last entries of a directory of checkpoints."""
        table = Table(box=None, padding=(0, 2))
        for heading in ("entry", "MB", "is"):
            table.add_column(heading, justify="right" if heading == "MB" else "left")
        for entry in entries[-4:]:
            kind = (
                "[green]a whole checkpoint[/]" if entry["checkpoint"] else "[yellow]an unfinished attempt[/]"
            )
            table.add_row(escape(entry["name"]), f"{entry['nbytes'] / 1e6:.1f}", kind)
        self._console.print(table)

    def timings(self, runs: list[TrainingRun]) -> None:
        """Shows what saving and loading cost."""
        table = Table(box=None, padding=(0, 2))
        for heading in ("run", "whole run", "load", "save, median", "training blocked, each save (ms)"):
            table.add_column(heading)
        for run in runs:
            load = f"{run.resumed['load_s'] * 1e3:.0f} ms" if run.resumed else "-"
            table.add_row(run.name, f"{run.total_s:.1f} s", load, *_save_timings(run))
        self._console.print(table)


def _save_timings(run: TrainingRun) -> tuple[str, str]:
    if not run.saves:
        return "-", "-"
    median_s = statistics.median(save["total_s"] for save in run.saves)
    return f"{median_s * 1e3:.0f} ms", " ".join(f"{save['blocking_s'] * 1e3:.1f}" for save in run.saves)


def directory_entries(directory: Path, is_checkpoint: Callable[[Path], bool]) -> list[dict[str, Any]]:
    """Name, size and kind of everything in a directory of checkpoints."""
    return [
        {"name": path.name, "nbytes": _nbytes(path), "checkpoint": is_checkpoint(path)}
        for path in sorted(directory.iterdir())
    ]


def _nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
