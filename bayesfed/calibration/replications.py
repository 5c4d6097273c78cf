"""Replications: simulate, fit, measure; one after the other or in several processes, with a journal on disk."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import pickle
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor

from bayesfed.algorithms import Algorithm
from bayesfed.calibration.simulate import Simulator, check_posterior, make_simulator
from bayesfed.checks.program_fingerprint import (
    describe_program_change,
    program_fingerprint,
    witnesses,
)
from bayesfed.data.federation import Federation, Model
from bayesfed.data.fingerprint import data_fingerprint, describe_data_change
from bayesfed.data.plural import plural
from bayesfed.elbo import noise
from bayesfed.engine.execution import Execution
from bayesfed.engine.plan import Plan, first_difference
from bayesfed.engine.privacy import Privacy
from bayesfed.engine.progress import show_count
from bayesfed.fitting import fit, start
from bayesfed.output.posterior import Posterior

FORMAT = 1
Record = dict[str, Any]
"""The outcome of a replication, as plain data."""


class FitOptions(TypedDict, total=False):
    """Options of :func:`bayesfed.fit` that each replication is fitted with.

    Attributes:
        rounds: number of rounds; by default each fit stops by itself.
        clients_per_round: cohort size.
        batch_size: rows of a local step.
        privacy: clip and noise of the uploads.
        execution: chunks, compilation, precision and device.
    """

    rounds: int | None
    clients_per_round: int | float
    batch_size: int | None
    privacy: Privacy | None
    execution: Execution


class Measure(Protocol):
    """A function of the posterior and the true values, as plain data."""

    def __call__(self, posterior: Posterior, truth: Mapping[str, Tensor], seed: int) -> Record:
        """Return plain data of one replication."""


@dataclass(frozen=True, eq=False)
class Study:
    """A model and its fit, which are repeated on simulated data.

    Attributes:
        model: the model that is fitted.
        federation: the clients, whose covariates are used.
        algorithm: how it is fitted.
        simulate: the model from whose prior true values and outcomes are drawn.
        options: of the fits.
        at: given true values.
        seed: of all replications.
        measure: what is recorded of each.
    """

    model: Model
    federation: Federation
    algorithm: Algorithm
    simulate: Model
    options: FitOptions
    at: Mapping[str, Any]
    seed: int
    measure: Measure

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is computed from the fields, which pickle may not be able to write."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def plan(self) -> Plan:
        """The options of the fits, which are checked here."""
        return Plan(self.model, self.algorithm, seed=self.seed, **self.options)

    @cached_property
    def simulator(self) -> Simulator:
        """The simulator."""
        return make_simulator(self.simulate, self.federation, self.algorithm, self.seed, self.at)

    @cached_property
    def fitted(self) -> Simulator:
        """The simulator of the model that is fitted, whose program the fits have."""
        if self.simulate is self.model:
            return self.simulator
        return make_simulator(self.model, self.federation, self.algorithm, self.seed)

    def check(self) -> None:
        """Fail on options, models and methods that cannot be calibrated.

        Raises:
            TypeError: the model or the algorithm is something else.
            ValueError: an option is out of range; or the model or the method cannot be calibrated.
        """
        for name in self.options:
            if name not in FitOptions.__annotations__:
                known = ", ".join(FitOptions.__annotations__)
                raise TypeError(
                    f"{name!r} is no option of a fit to simulated outcomes; there are {known}. A file to go on from is "
                    "path="
                )
        _ = self.plan, self.simulator
        check_posterior(self.fitted)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            start(self.model, self.federation, self.algorithm, seed=self.seed, **self.options)

    def replicate(self, number: int) -> Record:
        """Simulate and fit once. An error is recorded, not raised."""
        root = noise.fold(noise.key(self.seed), noise.word("replication"))
        seed = int(noise.fold(root, number)) % 2**31
        record: Record = {"number": number, "failed": ""}
        begin = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what they say is recorded
                truth, simulated = self.simulator.draw(seed)
                posterior = fit(
                    self.model,
                    simulated,
                    self.algorithm,
                    seed=seed,
                    progress=False,
                    **self.options,
                )
                record |= _state(posterior) | self.measure(posterior, truth, seed)
        except Exception as error:  # such as a fit that diverges
            record["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return record | {"seconds": time.perf_counter() - begin}

    def description(self, kind: Mapping[str, Any]) -> dict[str, Any]:
        """Return the study as plain data, by which a journal recognises it."""
        found: dict[str, Any] = {
            "format": FORMAT,
            **kind,
            **self.plan.description,
            "at": {name: torch.as_tensor(value).tolist() for name, value in self.at.items()},
        }
        names = {"program": self.fitted, "simulate": self.simulator}
        clients = witnesses(len(self.federation))
        for name, one in names.items():
            numbers = program_fingerprint(one.fitted.program, self.federation, clients)
            found[name] = {site: value.tolist() for site, value in numbers.items()}
        prints = data_fingerprint(self.federation)
        found["data"] = {name: value.tolist() for name, value in prints.items()}
        found["clients"] = list(self.federation.names)
        plain: dict[str, Any] = json.loads(json.dumps(found))  # as it is read
        return plain


def _state(posterior: Posterior) -> Record:
    """Return how a fit has ended."""
    correction = posterior.correction
    chains = correction is not None and correction.chains > 1
    return {
        "converged": posterior.converged,
        "khat": None if posterior.khat is None else float(posterior.khat),
        "draws": "chains" if chains else "importance sampling" if correction else "q",
        "rounds": len(posterior.history["elbo"]),
        "caveat": posterior.caveat,
    }


@dataclass
class Journal:
    """The finished replications of a study, a line of JSON each, after a line that describes the study.

    Attributes:
        path: the file.
        study: the study.
        description: the study as plain data.
    """

    path: Path
    study: Study
    description: Mapping[str, Any]
    _ends: int = field(default=0, init=False)

    def read(self) -> dict[int, Record]:
        """Return the finished replications by number, and write the first line of a new file.

        A last line that a killed process has not written completely is dropped.

        Raises:
            ValueError: the file is no journal, or that of another study.
        """
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        self._ends = len(whole.encode())
        lines = whole.splitlines()
        if not lines:
            if text and not text.startswith("{"):
                raise ValueError(f"{self.path} is not a journal of replications")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write(json.dumps(self.description))
            return {}
        try:
            records = [json.loads(line) for line in lines]
            before, found = records[0], {r["number"]: r for r in records[1:]}
            assert before["format"]
        except (ValueError, KeyError, TypeError, AssertionError):
            raise ValueError(f"{self.path} is not a journal of replications") from None
        if change := self._change(before):
            raise ValueError(
                f"{self.path} has replications of another study, {change}: choose another file"
            )
        return found

    def add(self, record: Record) -> None:
        """Append a replication, and wait until it is on the disk."""
        self._write(json.dumps(record))

    def _write(self, line: str) -> None:
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.truncate(self._ends)
            file.seek(self._ends)
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            self._ends = file.tell()

    def _change(self, before: Mapping[str, Any]) -> str | None:
        """Describe the first difference to the study of the file."""
        now = self.description
        one, other = ({n: v for n, v in d.items() if n not in _PRINTS} for d in (before, now))
        if before["clients"] != now["clients"]:
            return "of other clients"
        if different := first_difference(one, other):
            return "{} was {!r} and is {!r}".format(*different)
        prints = [{n: torch.tensor(v) for n, v in d["data"].items()} for d in (before, now)]
        if change := describe_data_change(prints[0], prints[1], now["clients"]):
            return change
        for name, simulator in (("program", self.study.fitted), ("simulate", self.study.simulator)):
            was, has = (
                {n: torch.tensor(v, dtype=torch.float64) for n, v in d[name].items()}
                for d in (before, now)
            )
            if change := describe_program_change(simulator.fitted.program, was, has):
                return change
        return None


_PRINTS = ("program", "simulate", "data", "clients")


def run_replications(
    study: Study,
    n: int,
    *,
    kind: Mapping[str, Any],
    title: str,
    path: str | Path | None,
    jobs: int,
    progress: bool | None,
) -> list[Record]:
    """Return n replications in their order, those of the journal and new ones.

    Args:
        study: what is repeated.
        n: their number.
        kind: plain data that describe what is recorded.
        title: shown with the progress.
        path: the journal's file.
        jobs: number of processes.
        progress: as for :func:`bayesfed.fit`.

    Raises:
        ValueError: ``n`` or ``jobs`` is out of range; the model or the method cannot be calibrated; the journal is that
            of another study; all replications failed.
    """
    if n < 2 or jobs < 1:
        raise ValueError(f"n is {n} and jobs is {jobs}; n must be at least 2, jobs at least 1")
    study.check()
    if jobs > 1 and study.federation.device.type != "cpu":
        raise ValueError("jobs: several processes cannot share a GPU here, leave out jobs")
    journal = None if path is None else Journal(Path(path), study, study.description(kind))
    found = {} if journal is None else journal.read()
    missing = [number for number in range(n) if number not in found]
    done = n - len(missing)
    with _outcomes(study, missing, jobs) as records, show_count(title, n, progress) as show:
        show(done, "")
        for record in records:
            found[record["number"]] = record
            if journal is not None:
                journal.add(record)
            done += 1
            show(done, _note([r for k, r in found.items() if k < n]))
    ordered = [found[number] for number in range(n)]
    if all(record["failed"] for record in ordered):
        raise ValueError(
            f"all {plural(n, 'replication')} failed, the first with {ordered[0]['failed']}"
        )
    return ordered


def _note(records: Sequence[Record]) -> str:
    failed = sum(bool(r["failed"]) for r in records)
    moving = sum(r.get("converged") is False for r in records)
    parts = [f"{failed} failed"] * (failed > 0) + [f"{moving} not converged"] * (moving > 0)
    return ", ".join(parts)


@contextmanager
def _outcomes(study: Study, numbers: Sequence[int], jobs: int) -> Iterator[Iterator[Record]]:
    """Yield the records of replications as they are done.

    Raises:
        ValueError: the model cannot be sent to other processes.
    """
    if jobs == 1 or len(numbers) < 2:
        yield map(study.replicate, numbers)
        return
    context = multiprocessing.get_context()
    if context.get_start_method() != "fork":
        _check_picklable(study)
    with (
        warnings.catch_warnings(),
        ProcessPoolExecutor(
            min(jobs, len(numbers)), context, initializer=_start_worker, initargs=(study,)
        ) as pool,
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads, which rest
        futures = [pool.submit(_in_worker, number) for number in numbers]
        try:
            yield (future.result() for future in as_completed(futures))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _check_picklable(study: Study) -> None:
    try:
        pickle.dumps((study.model, study.simulate, study.algorithm, study.measure))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"jobs: the model cannot be sent to another process ({error}): define it at the top of a module, or leave "
            "out jobs"
        ) from None


_worker: list[Study] = []


def _start_worker(study: Study) -> None:
    torch.set_num_threads(1)
    _worker.append(study)


def _in_worker(number: int) -> Record:
    return _worker[0].replicate(number)


def finite(value: float | None) -> float:
    """Return a number that may be None, NaN then."""
    return math.nan if value is None else float(value)
