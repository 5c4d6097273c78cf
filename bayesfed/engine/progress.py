"""The progress of a run: on a terminal a bar with round, ELBO and time left, elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

INTERVAL = 10.0
"""Seconds between two lines."""


@contextmanager
def show_rounds(
    title: str, rounds: int | None, progress: bool | None
) -> Iterator[Callable[[int, float, str], None]]:
    """Yield ``show(rounds done, ELBO, a note)``; the note is printed above the bar when it changes.

    ``progress=None`` shows the bar on a terminal only, and lines elsewhere; ``rounds=None`` is a number that is not
    known.
    """
    if progress is False:
        yield lambda done, elbo, note: None
        return
    console = _console()
    if progress is None and not console.is_terminal:
        yield _lines(title, rounds)
        return
    with _bar(console, title + ", round", "ELBO {task.fields[elbo]}") as bar:
        task = bar.add_task("rounds", total=rounds, elbo="")
        last_note = ""

        def show(done: int, elbo: float, note: str) -> None:
            nonlocal last_note
            if note != last_note:
                console.print(note, style="dim", highlight=False)
                last_note = note
            bar.update(task, completed=done, elbo=f"{elbo:,.2f}")

        yield show


@contextmanager
def show_count(
    title: str, total: int, progress: bool | None
) -> Iterator[Callable[[int, str], None]]:
    """Yield ``show(number done, a note)``, for work of which each piece takes as long as a fit.

    Args:
        title: the name of the work.
        total: the number of its pieces.
        progress: None shows a bar on a terminal only, and lines elsewhere; False shows nothing.
    """
    if progress is False:
        yield lambda done, note: None
        return
    console = _console()
    if progress is None and not console.is_terminal:
        start = last = time.monotonic()

        def show_line(done: int, note: str) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= INTERVAL:
                last, parts = now, (f"{title}, {done} of {total}", note, f"{now - start:.0f} s")
                print(", ".join(filter(None, parts)), file=sys.stderr, flush=True)

        yield show_line
        return
    with _bar(console, title, "{task.fields[note]}") as bar:
        task = bar.add_task("pieces", total=total, note="")
        yield lambda done, note: bar.update(task, completed=done, note=note)


def _console() -> Console:
    """Return a console on standard error."""
    from rich.console import Console  # rich takes a while to import

    return Console(stderr=True)


def _bar(console: Console, title: str, text: str) -> Progress:
    """Return a bar with its title, how much of how many is done, a text, and the time that is left."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = TextColumn(title), MofNCompleteColumn(), BarColumn(), TextColumn(text)
    return Progress(*columns, TimeRemainingColumn(), console=console, refresh_per_second=4)


@contextmanager
def show_work(title: str, console: Console | None = None) -> Iterator[None]:
    """Show on a terminal, by default that of stderr, that work of unknown length goes on."""
    console = console or _console()
    with console.status(title) if console.is_terminal else nullcontext():
        yield


def _lines(title: str, rounds: int | None) -> Callable[[int, float, str], None]:
    """Return the function that prints a line if the last one is more than ten seconds ago."""
    start = last = time.monotonic()
    shown = 0

    def show(done: int, elbo: float, note: str) -> None:
        nonlocal last, shown
        now = time.monotonic()
        if now - last >= INTERVAL and done > shown:
            last, shown, end = now, done, f" of {rounds}" if rounds else ""
            print(
                f"{title}, round {done}{end}, ELBO {elbo:,.2f}, {now - start:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    return show
