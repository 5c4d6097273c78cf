"""The work of a cohort in a round: its clients run in chunks, each as one batch, and their uploads are summed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.algorithms.algorithm import Answer, draws_at_once
from bayesfed.data.chunks import ROUND, chunks
from bayesfed.data.federation import Federation
from bayesfed.elbo import noise
from bayesfed.elbo.program import Program
from bayesfed.engine import processes
from bayesfed.engine.batches import batches
from bayesfed.engine.parts import flat, nested
from bayesfed.engine.plan import Plan
from bayesfed.engine.privacy import NO_PRIVACY, Privacy
from bayesfed.engine.states import States
from bayesfed.engine.watch import is_finite
from bayesfed.steps.job import Job
from bayesfed.steps.losses import per_client
from bayesfed.steps.optimizer import State

_TERMS = "terms and whether they are finite"
"""The name under which the clients' terms travel beside the sum of the uploads."""


@dataclass(frozen=True)
class Cohort:
    """The work of a cohort in a round, a chunk of clients at a time.

    An upload that is not finite does not count, and its client keeps the state that it had. What a stateful client
    remembers of its uploads changes by as much of the upload as clip and noise let the server see.

    Attributes:
        plan: the options of the fit.
        program: the model/guide pair.
        federation: the clients' data.
        states: the clients' states.
        privacy: clips the uploads.
        clip: γ of ``privacy`` in this round.
        noisy: whether noise will be added to the sum.
    """

    plan: Plan
    program: Program
    federation: Federation
    states: States
    privacy: Privacy = NO_PRIVACY
    clip: float = 0.0
    noisy: bool = False

    def __call__(
        self, message: dict[str, Tensor], cohort: Tensor, key: Tensor, rate: float
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Sum the uploads that count; and, on the CPU, the clients' terms ``(K,)`` and whether they count ``(K,)``."""
        group = self.plan.execution.group
        mine = processes.own(cohort, group)
        # a process without clients works for one whose upload is multiplied by zero: it has the right shapes
        idle = not mine.any()
        at = torch.zeros(1, dtype=torch.int64) if idle else mine.nonzero().flatten()
        lengths = self.federation.lengths[cohort[at]]
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
        algorithm, keys = self.plan.algorithm, noise.fold(key, self.federation.stream_ids[chunk])
        rows = batches(self.federation, chunk, self.plan.batch_size, keys)
        states = self.states.take(chunk)
        job = Job(self.program, nested(message), states, rows, keys, rate, self.noisy)
        answer = algorithm.work(job)
        upload = flat(answer.upload)
        good = is_finite(answer.terms, upload, answer.clients | answer.memory)
        if not _surely(good):
            upload = {n: torch.where(per_client(good, v), v, 0.0) for n, v in upload.items()}
        upload, share = self.privacy.clip_uploads(upload, self.clip)
        if keep:
            share = torch.zeros_like(share) if self.noisy else good.to(answer.terms) * share
            self.states.put(chunk, self.next_states(states, answer, good, share))
        return upload, answer.terms, good

    def next_states(self, before: State, answer: Answer, good: Tensor, share: Tensor) -> State:
        """The states that K clients keep: the old ones where not ``good`` ``(K,)``.

        What they remember of an upload changes by the share ``(K,)`` of it that the server sees.
        """
        states: State = {}
        for part, values in (answer.clients | answer.memory).items():
            old = before[part]
            if part in answer.memory and self.privacy.clips:
                values = {n: torch.lerp(old[n], v, per_client(share, v)) for n, v in values.items()}
            if not _surely(good):
                values = {n: torch.where(per_client(good, v), v, old[n]) for n, v in values.items()}
            states[part] = values
        return states

    def split(self, lengths: Tensor) -> Iterable[Tensor]:
        """Positions of clients that run as one batch; they are sorted by their numbers of rows, ``lengths``."""
        size = self.plan.execution.chunk_size
        if size == "auto":
            return chunks(lengths, self._numbers_per_client, 0, ROUND, padding=1.25)
        return torch.arange(len(lengths)).split(size or len(lengths))

    @property
    def _numbers_per_client(self) -> int:
        """About how many numbers a client's step holds."""
        algorithm, lengths = self.plan.algorithm, self.federation.lengths
        rows = min(self.plan.batch_size or self.federation.rows, int(lengths.max()))
        draws = draws_at_once(algorithm, self.program)
        per_row = 2 * self.federation.numbers_per_row + draws
        return 8 * draws * self.program.size + rows * per_row


def _surely(all_of: Tensor) -> bool:
    """Whether all are true; False on other devices than a CPU, where asking would wait for the device."""
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
            f"clients_per_round is {clients_per_round}; it must be between 1 and the {clients} clients there are"
        )
    return clients_per_round
