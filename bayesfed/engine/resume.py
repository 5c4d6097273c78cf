"""Start a run, or resume it from its file, and save it to that file after its rounds."""

import warnings
from pathlib import Path

from bayesfed.data.plural import plural
from bayesfed.engine.journal import Journal
from bayesfed.engine.parts import unflatten_state
from bayesfed.engine.run import Run
from bayesfed.engine.run_file import Written
from bayesfed.engine.states import States
from bayesfed.tracing.compiler import Compiler


def initialise(run: Run) -> None:
    """Give the clients of a run their first states, or the run the contents of its file.

    Raises:
        ValueError: the file's run has done more rounds than this one is to do.
    """
    file, folder, journal = run.file, run.plan.execution.states, None
    before = None if file is None else file.read()
    if file is not None and before is not None and before.done > run.rounds:
        raise ValueError(
            f"{file.path} is a run of {plural(before.done, 'round')} already: ask for at least as many, or "
            "choose another file"
        )
    if folder is not None:
        if file is not None:
            journal = Journal(Path(folder), file.name, new=before is None)
        run.clients = States(len(run.federation), folder, run.federation.device, journal)
    # between machines the server has the state of one client with made-up rows
    between_machines = run.accepted is not None
    rows = run.federation.select(run.federation.names[:1]) if between_machines else run.federation
    for batch in run.program.starts(rows):
        first = run.plan.algorithm.start_clients(run.program, run.server, batch)
        if before is not None and journal is not None:
            run.clients.reopen(first, before.done)
            break
        run.clients.begin(batch.index, first)
    if before is not None:
        _restore(run, before)
    elif journal is not None or between_machines:
        save(run)


def _restore(run: Run, before: Written) -> None:
    """Give a run the contents of its file."""
    state, run.done = unflatten_state(before.tensors, run.state), before.done
    for name, values in state.pop("history").items():
        run.history[name][: run.done] = values[: run.done]
    if clients := state.pop("clients"):
        run.clients.tensors = clients
    for name, value in state.pop("stopping").items():
        setattr(run.stopping, name, value)
    for name, value in state.items():
        setattr(run, name, value)
    if run.done:
        how = before.compiled
        run.compiler = Compiler(how) if isinstance(how, bool) else Compiler(chosen=set(how))
    if run.done < run.rounds and run.multiplier and run.privacy.seed is None:
        warnings.warn(
            f"the run is resumed after round {run.done} with new noise and cohorts: those of a private run are "
            "stored nowhere, so it ends elsewhere than a run that was never stopped. Its ε is the same",
            stacklevel=6,
        )


def save(run: Run, due: bool = False) -> None:
    """Save a run after a round; always if it is due, at the end, where noise is spent, and between machines."""
    if run.file is None:
        return
    due |= run.done in (0, run.rounds) or run.multiplier > 0 or run.accepted is not None
    how = run.compiler
    compiled = sorted(how.chosen) if how.mode == "auto" else how.mode
    run.file.write(run.state, run.done, compiled=compiled, due=due, clients=run.clients)
