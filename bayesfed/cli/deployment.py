"""A fit between machines from the command line: an institution's node, and the server's run."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr
from rich.console import Console
from torch import Tensor

from bayesfed.cli import report
from bayesfed.cli.choices import (
    formula_settings,
    load_clients,
    load_frames,
    named_algorithm,
    named_model,
)
from bayesfed.cli.experiment import (
    DeploymentSection,
    Experiment,
    NodeFile,
    read_experiment,
    socket_address,
)
from bayesfed.cli.predictions import LocalPosteriors
from bayesfed.data.federation import Federation
from bayesfed.data.plural import plural
from bayesfed.deploy.global_posterior import GlobalPosterior
from bayesfed.deploy.institutions import Expected, Patience
from bayesfed.deploy.node import Node
from bayesfed.deploy.node_moments import Consent
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.secure import public_key
from bayesfed.deploy.server import run_server
from bayesfed.deploy.sockets import carrier, serve
from bayesfed.deploy.transport import Carrier
from bayesfed.effects.rows import formula_of
from bayesfed.elbo import noise
from bayesfed.engine.execution import Execution
from bayesfed.engine.files import lock
from bayesfed.engine.privacy import Privacy
from bayesfed.engine.progress import show_rounds
from bayesfed.output.inference_data import attributes
from bayesfed.output.prior import derived_from_prior, sample_prior
from bayesfed.output.study import source_of
from bayesfed.settings import Schedule, SettingsError, made


def make_plan(config: Experiment, base: Path) -> DeploymentPlan:
    """Return the fit of an experiment file in the folder ``base``.

    Raises:
        SettingsError: an unknown name or setting, or one that a run between machines cannot have.
    """
    schedule, own = config.schedule, config.deployment
    if config.data.hold_out:
        raise SettingsError(
            "data.hold_out: between machines each institution names its own clients, under [data] of its node file"
        )
    if schedule.held_out is not None:
        raise SettingsError("schedule.held_out: between machines give schedule.rounds")
    algorithm = named_algorithm(config, base)
    return DeploymentPlan(
        model=named_model(config.model, base)
        if config.model.formula is None
        else formula_settings(config),
        algorithm=algorithm,
        privacy=None if config.privacy is None else made(Privacy, config.privacy, "privacy"),
        effects=tuple(config.effects),
        leave_one_out=config.leave_one_out,
        **schedule.model_dump(include=set(Schedule.model_fields)),
        **({} if own is None else own.model_dump(include={"secure", "honest", "chains", "reveal"})),
    )


def run_node(
    node: NodeFile, config: Experiment, rows: pd.DataFrame | None, here: Path, base: Path
) -> None:
    """Answer for an institution's clients until stopped.

    Args:
        node: the node file.
        config: the experiment.
        rows: the institution's.
        here: the folder of the node file.
        base: the folder of the experiment file.
    """
    if node.socket is None:
        raise SettingsError("socket is missing: HOST:PORT of this machine, or a path with a slash")
    local = local_posteriors(node, config, rows, here, base)
    resident, folder, held = make_node(node, local), local.folder, local.held
    console = Console(highlight=False)

    def ready(address: str) -> None:
        console.print(
            f"institution {node.name}: {_described(local.federation)}{', held out: ' * bool(held)}{', '.join(held)}\n"
            f"listening at {address}; {folder / 'log.jsonl'} lists what leaves",
            soft_wrap=True,
            markup=False,
        )

    if threading.current_thread() is threading.main_thread():  # else sockets' files remain
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    own = None if node.own_socket is None else (socket_address(node.own_socket, here), local.handle)
    with lock(folder / ".node.lock", f"the folder of institution {node.name!r}"):
        serve(socket_address(node.socket, here), resident.handle, local=own, ready=ready)


def make_node(node: NodeFile, local: LocalPosteriors) -> Node:
    """Return the node of an institution.

    Raises:
        SettingsError: secure sums need a key that the node file does not have.
    """
    execution = made(Execution, node.execution, "execution")
    pinned = {name: bytes.fromhex(key) for name, key in node.identities.items()}
    consent = Consent(node.reveal, node.fewest_rows)
    own = local.federation, local.plan, local.folder, execution, pinned, local.held, consent
    found = Node(node.name, *own)
    if local.plan.secure and pinned.get(node.name) != (key := public_key(found.identity)):
        raise SettingsError(
            f'identities: secure sums need the keys of all institutions; {node.name} = "{key.hex()}" is this one\'s'
        )
    return found


def local_posteriors(
    node: NodeFile, config: Experiment, rows: pd.DataFrame | None, here: Path, base: Path
) -> LocalPosteriors:
    """Return the posteriors that a node has stored; the arguments are those of :func:`run_node`."""
    agreed = config.model_copy(update={"data": config.data.model_copy(update={"hold_out": []})})
    plan = make_plan(agreed, base)  # a mistake in it comes before those in the rows
    alone, data = node.name if node.one_client else None, config.data
    federation: Federation | dict[str, pd.DataFrame]
    if plan.formula is None:
        federation = load_clients(data, rows, here, alone)
    else:
        federation = load_frames(plan.formula, data, rows, here, alone)
    return LocalPosteriors(
        federation=federation,
        held=data.hold_out,
        plan=plan,
        folder=here / (node.folder or node.name),
        client=str(data.client),
        fields=data.fields,
        alone=alone,
    )


def run_on_sockets(
    config: Experiment, experiment: Path, wanted: Path, *, overwrite: bool, resume: bool
) -> None:
    """Fit over nodes of this machine.

    Raises:
        SettingsError: an institution has no socket.
    """
    assert config.deployment is not None
    addresses = []
    for name in config.deployment.institutions:
        if name not in config.deployment.sockets:
            raise SettingsError(f"deployment.sockets has no address of institution {name!r}")
        socket = config.deployment.sockets[name]
        addresses.append(socket_address(socket, experiment.parent))
    run_on(carrier(addresses), config, experiment, wanted, overwrite=overwrite, resume=resume)


def run_file(wire: Carrier, path: Path, folder: Path | None = None) -> GlobalPosterior:
    """Fit an experiment file, and go on if an earlier process has stopped.

    The results, and the run to go on with, are in ``folder``, by default ``runs/<name of the file>`` beside the file.
    """
    folder = path.parent / "runs" / path.stem if folder is None else folder
    return run_on(wire, read_experiment(path), path, folder, resume=True)


def run_on(
    wire: Carrier,
    config: Experiment,
    experiment: Path,
    wanted: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    console: Console | None = None,
    progress: bool | None = None,
) -> GlobalPosterior:
    """Fit over institutions, and write the server's results into the folder that is wanted, or beside it."""
    assert config.deployment is not None
    plan, console = make_plan(config, experiment.parent), console or Console(highlight=False)
    folder = report.RunFolder(wanted, overwrite=overwrite, go_on=resume)
    folder.config = report.to_toml(config.model_dump(exclude_unset=True))
    title = f"{plan.algorithm} over {plural(len(config.deployment.institutions), 'institution')}"
    console.print(
        f"{config.model}, {title}, results in {folder.path}", soft_wrap=True, markup=False
    )
    try:
        with show_rounds(title, plan.rounds, progress) as show:
            found = run_server(
                wire,
                plan,
                make_patience(config.deployment),
                folder.run,
                report=lambda line: console.print(line, soft_wrap=True, markup=False),
                callbacks=[folder.record, lambda done: show(done.number, done.elbo, "")],
            )
    except BaseException:
        folder.abandon()
        raise
    if not folder.rounds:  # all of them were done before
        folder.begin(len(found.posterior.history["elbo"]))
    draws = draws_dataset(found, config.output.num_samples)
    before = prior_dataset(found, config.output.num_samples)
    folder.write_draws("globals.nc", {"posterior": draws, "prior": before})
    folder.write("program.py", source_of(found.posterior.program.model))
    found.save(folder.path / "posterior.safetensors")
    folder.write_summary(draws, console, found.caveat)
    folder.write_effects([effect for effect in found.effects if effect is not None], console)
    if found.comparison is not None:
        folder.write_comparison(found.comparison, console)
    if found.moments is not None:
        found.moments.save(folder.path / "moments.safetensors")
    folder.print_files(console)
    console.print("The clients' posteriors are at their institutions.")
    return found


def make_patience(section: DeploymentSection) -> Patience:
    """Return how long the server waits, and for whom."""
    same = {"seconds", "minimum", "attempts", "joining", "enough", "max_staleness"}
    expected = {name: Expected(e.clients, e.rows) for name, e in section.expected.items()}
    plain = section.model_dump(include=same)
    return Patience(tuple(section.institutions), expected=expected, **plain)


def draws_dataset(found: GlobalPosterior, num_samples: int) -> xr.Dataset:
    """Return draws of the global variables, and of the values that the model derives from them, in ArviZ's form.

    Draws by chains are given chain by chain, at least four of each.
    """
    mended, attrs = (
        found.posterior.correction,
        attributes(found.posterior, found.khat, found.caveat),
    )
    chains = 1 if mended is None else mended.chains
    if chains > 1:
        num_samples = chains * max(4, num_samples // chains)
        attrs["chain_exchanges"] = found.chain_exchanges
    values = found.sample(num_samples) | found.derived(num_samples)
    return _dataset(found, values, attrs, chains)


def prior_dataset(found: GlobalPosterior, num_samples: int) -> xr.Dataset:
    """Return the same variables drawn from their prior, in ArviZ's form."""
    of = found.posterior
    one = of.select(of.federation.names[:1])
    with noise.seeded(0):
        prior = sample_prior(one, num_samples)
    more = derived_from_prior(one, prior, num_samples)
    return _dataset(found, {site.name: prior[site.name] for site in of.program.globals} | more, {})


def _dataset(
    found: GlobalPosterior, values: Mapping[str, Tensor], attrs: Mapping[str, Any], chains: int = 1
) -> xr.Dataset:
    """Return draws as a data set; auxiliary variables, whose names begin with ``_``, are left out."""
    formula = formula_of(found.posterior.program.model)
    draws = {
        n: v.unflatten(0, (-1, chains)).transpose(0, 1).numpy(force=True)
        for n, v in values.items()
        if not n.startswith("_")
    }
    dims = {n: [f"{n}_dim_{j}" for j in range(v.ndim - 2)] for n, v in draws.items()}
    used = {dim for names in dims.values() for dim in names}
    coords = {} if formula is None else {n: v for n, v in formula.coords.items() if n in used}
    data = {n: (["chain", "draw", *dims[n]], v) for n, v in draws.items()}
    return xr.Dataset(data, coords, attrs)


def _described(federation: Federation | Mapping[str, pd.DataFrame]) -> str:
    """Return an institution's clients in words."""
    if isinstance(federation, Federation):
        return repr(federation)
    rows = sum(map(len, federation.values()))
    clients = plural(len(federation), "client")
    return f"{clients}, {plural(rows, 'row')}, coded when all institutions have agreed how"
