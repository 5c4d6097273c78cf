"""A fit between machines from the command line: a site's worker, and the server's run."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import xarray as xr
from rich.console import Console

from bayesfed.cli import report
from bayesfed.cli.choices import algorithm_named, clients_of, model_of
from bayesfed.cli.experiment import (
    DeploymentSection,
    Experiment,
    SiteFile,
    address_of,
    read_experiment,
)
from bayesfed.cli.predictions import Kept
from bayesfed.deploy.institutions import Expected, Patience
from bayesfed.deploy.node import Site
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.secure import public_key
from bayesfed.deploy.server import Globals, deployed
from bayesfed.deploy.sockets import carrier, serve
from bayesfed.deploy.transport import Carrier
from bayesfed.engine.execution import Execution
from bayesfed.engine.files import lock
from bayesfed.engine.privacy import Privacy
from bayesfed.engine.progress import show_rounds
from bayesfed.output import arviz_compat
from bayesfed.settings import Schedule, SettingsError, made


def plan_of(config: Experiment, base: Path) -> DeploymentPlan:
    """What an experiment file in the folder ``base`` says of the fit.

    Raises:
        SettingsError: a name or setting that is not there; or what a run between machines cannot have.
    """
    schedule = config.schedule
    if config.model.formula is not None:
        raise SettingsError(
            "model.formula: between machines give model.name; print(bf.formula(...)) writes the model to put in a file"
        )
    if schedule.held_out is not None:
        raise SettingsError("schedule.held_out: between machines give schedule.rounds")
    own, algorithm = config.deployment, algorithm_named(config, base)
    return DeploymentPlan(
        model=model_of(config.model, base),
        algorithm=algorithm,
        privacy=None if config.privacy is None else made(Privacy, config.privacy, "privacy"),
        **schedule.model_dump(include=set(Schedule.model_fields)),
        **({} if own is None else own.model_dump(include={"secure", "honest", "median"})),
    )


def answer(
    site: SiteFile, config: Experiment, rows: pd.DataFrame | None, here: Path, base: Path
) -> None:
    """Answer for a site's clients until stopped: its file is in the folder ``here``, the experiment's in ``base``."""
    kept = kept_of(site, config, rows, here, base)
    federation, plan, folder = kept.federation, kept.plan, kept.folder
    execution = made(Execution, site.execution, "execution")
    pinned = {name: bytes.fromhex(key) for name, key in site.identities.items()}
    worker = Site(site.name, federation, plan, folder, execution, pinned)
    key = public_key(worker.identity)
    if plan.secure and pinned.get(site.name) != key:
        raise SettingsError(
            f'identities: secure sums need the keys of all sites; {site.name} = "{key.hex()}" is this one\'s'
        )
    console = Console(highlight=False)

    def ready(address: str) -> None:
        console.print(f"site {site.name}: {federation!r}", soft_wrap=True, markup=False)
        console.print(
            f"listening at {address}; what leaves is in {folder / 'log.jsonl'}", soft_wrap=True
        )

    own = None if site.own_socket is None else (address_of(site.own_socket, here), kept.handle)
    with lock(folder / ".worker.lock", f"the folder of site {site.name!r}"):
        serve(address_of(site.socket, here), worker.handle, here=own, ready=ready)


def kept_of(
    site: SiteFile, config: Experiment, rows: pd.DataFrame | None, here: Path, base: Path
) -> Kept:
    """What a site keeps, whose file is in the folder ``here``, the experiment's in ``base``."""
    alone, data = site.name if site.one_client else None, config.data
    return Kept(
        federation=clients_of(data, rows, here, alone),
        plan=plan_of(config, base),
        folder=here / (site.folder or site.name),
        client=str(data.client),
        fields=data.fields,
        alone=alone,
    )


def run_on_sockets(
    config: Experiment, experiment: Path, wanted: Path, *, overwrite: bool, resume: bool
) -> None:
    """Fit over workers of this machine.

    Raises:
        SettingsError: a site has no socket.
    """
    assert config.deployment is not None
    where = config.deployment.sockets
    for name in config.deployment.sites:
        if name not in where:
            raise SettingsError(f"deployment.sockets has no address of site {name!r}")
    addresses = [address_of(where[name], experiment.parent) for name in config.deployment.sites]
    run_on(carrier(addresses), config, experiment, wanted, overwrite=overwrite, resume=resume)


def run_file(wire: Carrier, path: Path) -> Globals:
    """Fit what an experiment's file says, and go on where an earlier process has stopped.

    Results, and the run to go on with, are in ``runs/<name of the file>`` beside it.
    """
    folder = path.parent / "runs" / path.stem
    return run_on(wire, read_experiment(path), path, folder, resume=True)


def run_on(
    wire: Carrier,
    config: Experiment,
    experiment: Path,
    wanted: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
) -> Globals:
    """Fit over sites, and write what a server may know into the folder that is wanted, or beside it."""
    assert config.deployment is not None
    plan, console = plan_of(config, experiment.parent), Console(highlight=False)
    folder = report.RunFolder(wanted, overwrite=overwrite, go_on=resume)
    folder.config = report.to_toml(config.model_dump(exclude_unset=True))
    title = f"{plan.algorithm} over {len(config.deployment.sites)} sites"
    console.print(
        f"{config.model}, {title}, results in {folder.path}", soft_wrap=True, markup=False
    )
    with show_rounds(title, plan.rounds, None) as show:
        found = deployed(
            wire,
            plan,
            patience_of(config.deployment),
            folder.run,
            say=lambda line: console.print(line, soft_wrap=True, markup=False),
            callbacks=[folder.record, lambda done: show(done.number, done.elbo, "")],
        )
    if not folder.rounds:  # all of them were done before
        folder.begin(len(found.posterior.history["elbo"]))
    draws = dataset(found, config.output.num_samples)
    folder.write_draws("globals.nc", arviz_compat.product({"posterior": draws}))
    table = report.summary(draws)
    folder.write("summary.csv", table.to_csv(index_label="variable", float_format="%.6g"))
    report.print_summary(table, console, found.caveat)
    for name, what in folder.written():
        console.print(f"{folder.path / name}  {what}", soft_wrap=True, markup=False)
    console.print("The clients' posteriors are at their sites.")
    return found


def patience_of(section: DeploymentSection) -> Patience:
    """What a section says of waiting."""
    return Patience(
        sites=tuple(section.sites),
        seconds=section.seconds,
        minimum=section.minimum,
        attempts=section.attempts,
        joining=section.joining,
        enough=section.enough,
        late=section.late,
        expected={n: Expected(s.clients, s.rows) for n, s in section.expected.items()},
    )


def dataset(found: Globals, num_samples: int) -> xr.Dataset:
    """Draws of the global sites, as ArviZ has them."""
    return xr.Dataset(
        {
            name: (
                ("chain", "draw", *(f"{name}_dim_{j}" for j in range(value.ndim - 1))),
                value[None].numpy(force=True),
            )
            for name, value in found.sample(num_samples).items()
        }
    )
