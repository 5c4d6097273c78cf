"""The progress bar: round, ELBO and time left; nothing is shown unless the output is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def show_rounds(
    title: str, rounds: int | None, progress: bool | None
) -> Iterator[Callable[[int, float, str], None]]:
    """Yield ``show(rounds done, ELBO, a note)``; the note is printed above the bar when it changes.

    ``progress=None`` shows the bar on a terminal only, ``rounds=None`` one whose end is not known.
    """
    console = Console(stderr=True)
    if progress is False or (progress is None and not console.is_terminal):
        yield lambda done, elbo, note: None
        return
    bar = Progress(
        TextColumn(title + ", round"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("ELBO {task.fields[elbo]}"),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=4,
    )
    with bar:
        task = bar.add_task("rounds", total=rounds, elbo="")
        last_note = ""

        def show(done: int, elbo: float, note: str) -> None:
            nonlocal last_note
            if note != last_note:
                console.print(note, style="dim", highlight=False)
                last_note = note
            bar.update(task, completed=done, elbo=f"{elbo:,.2f}")

        yield show
