"""The work of a cohort in a round: its clients in chunks that run as one batch each, and the sum of what they send."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.algorithms.algorithm import Algorithm, Answer, draws_at_once
from bayesfed.data.chunks import ROUND, chunks
from bayesfed.data.federation import Federation
from bayesfed.elbo import noise
from bayesfed.elbo.program import Program
from bayesfed.engine import processes
from bayesfed.engine.batches import batches
from bayesfed.engine.checks import finite
from bayesfed.engine.execution import Execution
from bayesfed.engine.parts import flat
from bayesfed.engine.privacy import Privacy
from bayesfed.engine.states import States
from bayesfed.steps.job import Job
from bayesfed.steps.losses import per_client
from bayesfed.steps.optimizer import State

_FOUND = "terms and whether they are finite"  # the clients', beside their uploads


@dataclass(frozen=True)
class Cohort:
    """The work of a cohort in a round, some clients at a time.

    What a client sends that is not finite counts for nothing, and it keeps what it had; what it remembers of its
    uploads changes by as much as was taken of them.

    Attributes:
        clip: γ of ``privacy`` in this round.
        noisy: the sum will be noisy.
    """

    algorithm: Algorithm
    program: Program
    federation: Federation
    kept: States
    batch_size: int | None
    execution: Execution
    privacy: Privacy | None
    clip: float = 0.0
    noisy: bool = False

    def __call__(
        self, message: dict[str, Tensor], cohort: Tensor, key: Tensor, rate: float
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """The sum of the uploads that count; on the CPU the terms ``(K,)`` and whether a client's counts ``(K,)``."""
        group = self.execution.group
        mine = processes.own(cohort, group)
        # a process without clients runs one for nothing: what it would send has the right shapes
        idle = not mine.any()
        at = torch.zeros(1, dtype=torch.int64) if idle else mine.nonzero().flatten()
        lengths = self.federation.lengths[cohort[at]]
        by_size = lengths.argsort(stable=True)  # chunks of equal work
        at = at[by_size]
        total: dict[str, Tensor] = {}
        terms, sound = [], []
        for positions in self.together(lengths[by_size]):
            some = at[positions]
            chunk = cohort[some]
            keys = noise.fold(key, self.federation.stream_ids[chunk])
            rows = batches(self.federation, chunk, self.batch_size, keys)
            job = Job(self.program, message, self.kept.take(chunk), rows, keys, rate, self.noisy)
            answer = self.algorithm.work(job)
            upload = flat(answer.upload)
            good = finite(answer.terms, upload, answer.clients | answer.memory)
            terms.append(answer.terms)
            sound.append(good)
            taken = good.to(answer.terms)
            if not _surely(good):
                upload = {n: torch.where(per_client(good, v), v, 0.0) for n, v in upload.items()}
            if self.privacy is not None and upload:
                upload, factor = self.privacy.clipped(upload, self.clip)
                taken = taken * factor
            if self.noisy:
                taken = torch.zeros_like(taken)
            if not idle:
                self.kept.put(chunk, self.after(job.clients, answer, good, taken))
            for name, value in upload.items():
                total[name] = total.get(name, 0) + value.sum(0)
        found = torch.zeros(2, len(cohort), dtype=terms[0].dtype, device=terms[0].device)
        if idle:
            total = {name: torch.zeros_like(value) for name, value in total.items()}
        else:
            found[:, at] = torch.stack([torch.cat(terms), 1.0 * ~torch.cat(sound)])
        total = processes.summed(total | {_FOUND: found}, group)
        client_terms, unsound = total.pop(_FOUND).cpu()
        return total, client_terms, unsound == 0

    def after(self, before: State, answer: Answer, good: Tensor, taken: Tensor) -> State:
        """What K clients keep: as before where not ``good`` ``(K,)``, uploads as they were ``taken`` ``(K,)``."""
        kept: State = {}
        for part, values in (answer.clients | answer.memory).items():
            old = before[part]
            if part in answer.memory and self.privacy is not None:
                values = {n: torch.lerp(old[n], v, per_client(taken, v)) for n, v in values.items()}
            if not _surely(good):
                values = {n: torch.where(per_client(good, v), v, old[n]) for n, v in values.items()}
            kept[part] = values
        return kept

    def together(self, lengths: Tensor) -> Iterable[Tensor]:
        """Positions of clients that run together; they are sorted by their numbers of rows, ``lengths``."""
        if self.execution.chunk_size == "auto":
            return chunks(lengths, self.weight, 0, ROUND, padding=1.25)
        return torch.arange(len(lengths)).split(self.execution.chunk_size or len(lengths))

    @property
    def weight(self) -> int:
        """About how many numbers a client's step holds."""
        rows = min(self.batch_size or self.federation.rows, int(self.federation.lengths.max()))
        draws, per_row = (
            draws_at_once(self.algorithm, self.program),
            self.federation.numbers_per_row,
        )
        return 8 * draws * self.program.size + rows * (2 * per_row + draws)


def _surely(all_of: Tensor) -> bool:
    """Whether all are true, as far as a CPU can say: asking waits for other devices."""
    return all_of.device.type == "cpu" and bool(all_of.all())


def cohort_size(clients_per_round: int | float, clients: int) -> int:
    """K: the number of clients that ``clients_per_round`` means among N.

    Example:
        >>> from bayesfed.engine.cohort import cohort_size
        >>> cohort_size(0.2, 85), cohort_size(3, 85), cohort_size(1.0, 85)
        (17, 3, 85)
    """
    wanted = clients_per_round
    if isinstance(wanted, bool) or not isinstance(wanted, int | float):
        raise TypeError(f"clients_per_round is {wanted!r}; give a number of clients or a fraction")
    if isinstance(wanted, float):
        if not 0 < wanted <= 1:
            raise ValueError(
                f"clients_per_round is {wanted}; as a float it is a fraction in (0, 1], as an int a "
                "number of clients"
            )
        return max(1, round(wanted * clients))
    if not 1 <= wanted <= clients:
        raise ValueError(
            f"clients_per_round is {wanted}; it must be between 1 and the {clients} clients there are"
        )
    return wanted
