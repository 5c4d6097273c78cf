"""The work of a cohort in a round: its clients run in chunks, each as one batch, and their uploads are summed."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.algorithms.algorithm import Answer, draws_at_once
from bayesfed.data.chunks import ROUND, chunks
from bayesfed.data.plural import plural
from bayesfed.elbo import noise
from bayesfed.engine import processes
from bayesfed.engine.batches import batches
from bayesfed.engine.parts import flat, nested
from bayesfed.engine.run import Run
from bayesfed.engine.watch import is_finite
from bayesfed.steps.job import Job, Parts
from bayesfed.steps.losses import per_client
from bayesfed.steps.optimizer import State, where_active

_TERMS = "terms and whether they are finite"
"""The name under which the clients' terms travel beside the sum of the uploads."""


@dataclass(frozen=True)
class Cohort:
    """The work of a cohort in a round, a chunk of clients at a time.

    An upload that is not finite does not count, and its client keeps the state that it had. What a stateful client
    remembers of its uploads changes by as much of the upload as clip and noise let the server see.

    Attributes:
        run: whose clients they are; their states change.
        clip: γ of the run's privacy in this round.
        noisy: whether noise will be added to the sum.
    """

    run: Run
    clip: float = 0.0
    noisy: bool = False

    def __call__(
        self, message: dict[str, Tensor], cohort: Tensor, key: Tensor, rate: float
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Sum the uploads that count; and, on the CPU, the clients' terms ``(K,)`` and whether they count ``(K,)``."""
        group = self.run.plan.execution.group
        mine = processes.own(cohort, group)
        # a process without clients works for one whose upload is multiplied by zero: it has the right shapes
        idle = not mine.any()
        at = torch.zeros(1, dtype=torch.int64) if idle else mine.nonzero().flatten()
        lengths = self.run.federation.sufficient.lengths[cohort[at]]
        by_size = lengths.argsort(stable=True)  # chunks of equal work
        at = at[by_size]
        total: dict[str, Tensor] = {}
        terms, sound = [], []
        for positions in self.split(lengths[by_size]):
            chunk = cohort[at[positions]]
            upload, own_terms, good = self._work(message, chunk, key, rate, keep=not idle)
            terms.append(own_terms)
            sound.append(good)
            for name, value in upload.items():
                total[name] = total.get(name, 0) + value.sum(0)
        found = torch.zeros(2, len(cohort), dtype=terms[0].dtype, device=terms[0].device)
        if idle:
            total = {name: torch.zeros_like(value) for name, value in total.items()}
        else:
            found[:, at] = torch.stack([torch.cat(terms), 1.0 * ~torch.cat(sound)])
        total = processes.sum_over_processes(total | {_TERMS: found}, group)
        client_terms, unsound = total.pop(_TERMS).cpu()
        return total, client_terms, unsound == 0

    def _work(
        self, message: dict[str, Tensor], chunk: Tensor, key: Tensor, rate: float, keep: bool
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """The uploads ``(K, ...)``, terms ``(K,)`` and soundness ``(K,)`` of clients, whose new states are kept."""
        run, privacy = self.run, self.run.privacy
        states, job = self.job(message, chunk, key, rate)
        answer = run.plan.algorithm.work(job)
        upload = flat(answer.upload)
        good = is_finite(answer.terms, upload, answer.clients | answer.memory)
        if not _surely(good):
            upload = {n: torch.where(per_client(good, v), v, 0.0) for n, v in upload.items()}
        upload, share = privacy.clip_uploads(upload, self.clip)
        if keep:
            share = torch.zeros_like(share) if self.noisy else good.to(answer.terms) * share
            run.clients.put(chunk, self.next_states(states, answer, good, share))
        return upload, answer.terms, good

    def job(
        self, message: dict[str, Tensor], chunk: Tensor, key: Tensor, rate: float
    ) -> tuple[State, Job]:
        """Return the states of K clients, and what they are asked to do."""
        run = self.run
        keys = noise.fold(key, run.federation.stream_ids[chunk])
        # q(w_i | θ) that is a function of the rows needs all of them, whatever the plan says
        batch_size = run.plan.batch_size if run.program.learns_locals else None
        rows = batches(run.federation.sufficient, chunk, batch_size, keys)
        states = self.with_first_visits(run.clients.take(chunk), chunk, nested(message))
        return states, Job(run.program, nested(message), states, rows, keys, rate, self.noisy)

    def with_first_visits(self, states: State, chunk: Tensor, message: Parts) -> State:
        """Return the states of clients, of those that visit for the first time made from the θ that was sent."""
        run = self.run
        new, theta = run.client_terms[chunk].isnan(), message.get("theta")
        if not states or theta is None or not new.any():
            return states
        algorithm, first = run.plan.algorithm, torch.zeros(len(chunk), 1, dtype=torch.int64)
        batch = run.federation.batch(chunk, None if run.program.needs_rows else first)
        own = algorithm.steps.start_clients(run.program, theta, batch, algorithm.locals)
        new = new.to(batch.device)
        return states | {
            part: where_active(states[part], values, new) for part, values in own.items()
        }

    def next_states(self, before: State, answer: Answer, good: Tensor, share: Tensor) -> State:
        """The states that K clients keep: the old ones where not ``good`` ``(K,)``.

        What they remember of an upload changes by the share ``(K,)`` of it that the server sees.
        """
        states: State = {}
        for part, values in (answer.clients | answer.memory).items():
            old = before[part]
            if part in answer.memory and self.run.privacy.clips:
                values = {n: torch.lerp(old[n], v, per_client(share, v)) for n, v in values.items()}
            if not _surely(good):
                values = {n: torch.where(per_client(good, v), v, old[n]) for n, v in values.items()}
            states[part] = values
        return states

    def split(self, lengths: Tensor) -> Iterable[Tensor]:
        """Positions of clients that run as one batch; they are sorted by their numbers of rows, ``lengths``."""
        size = self.run.plan.execution.chunk_size
        if size == "auto":
            return chunks(lengths, self._numbers_per_client, 0, ROUND, padding=1.25)
        return torch.arange(len(lengths)).split(size or len(lengths))

    @property
    def _numbers_per_client(self) -> int:
        """About how many numbers a client's step holds."""
        run, draws = self.run, draws_at_once(self.run.plan.algorithm, self.run.program)
        per_row = 2 * run.federation.numbers_per_row + draws
        return 8 * draws * run.program.size + run.rows_of_step * per_row


def _surely(all_of: Tensor) -> bool:
    """Return whether all are true; False on other devices than a CPU, where asking would wait for the device."""
    return all_of.device.type == "cpu" and bool(all_of.all())


def cohort_size(clients_per_round: int | float, clients: int) -> int:
    """The number K of clients that ``clients_per_round`` means among N.

    Example:
        >>> from bayesfed.engine.cohort import cohort_size
        >>> cohort_size(0.2, 85), cohort_size(3, 85), cohort_size(1.0, 85)
        (17, 3, 85)
    """
    if isinstance(clients_per_round, float):
        if not 0 < clients_per_round <= 1:
            raise ValueError(
                f"clients_per_round is {clients_per_round}; as a float it is a fraction in (0, 1], as an int a "
                "number of clients"
            )
        return max(1, round(clients_per_round * clients))
    if not 1 <= clients_per_round <= clients:
        raise ValueError(
            f"clients_per_round is {clients_per_round}; it must be between 1 and the "
            f"{plural(clients, 'client')} there are"
        )
    return clients_per_round
