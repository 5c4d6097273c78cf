"""The server's side of chains of Hamiltonian Monte Carlo: each leapfrog step is an exchange with all institutions.

The server moves θ, the institutions their clients' variables, as in one process (:mod:`bayesfed.output.chains`). It
stores the chains after each trajectory in ``<file of the run>.chains``, so that they go on if any process is killed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from bayesfed.data.plural import plural
from bayesfed.deploy.institutions import Institutions, run_name
from bayesfed.deploy.messages import ChainSums, MoveChains, Tensors
from bayesfed.deploy.sums import request_sum
from bayesfed.elbo.program import Program
from bayesfed.engine.run import Run
from bayesfed.guides.family import GLOBAL
from bayesfed.output.chains import (
    Chains,
    ChainsFile,
    can_sample,
    chains_key,
    most_gradients,
    number_of_chains,
    sample_chains,
)
from bayesfed.output.client_chains import Leap, Moved
from bayesfed.output.conditionals import has_block
from bayesfed.output.posterior import Posterior


def check_chains(program: Program) -> None:
    """Check before a fit that chains apply to its program.

    Raises:
        ValueError: says why not.
    """
    if program.random != (GLOBAL,) or program.weights_draws or not has_block(program):
        raise ValueError(
            "deployment.chains: chains need a q(θ) with a density, such as SFVI's, and clients whose variables have "
            "one Gaussian: leave out deployment.chains"
        )


def draw_by_chains(institutions: Institutions, run: Run, posterior: Posterior) -> Posterior:
    """Return the posterior with draws of θ by chains, if the plan has them.

    Whatever importance weights say: their k-hat may be low where they miss a tail. What happens is reported; in
    :attr:`~bayesfed.deploy.institutions.Institutions.chain_exchanges` is the number of exchanges. Chains that have not
    mixed leave the posterior as it is.

    Raises:
        MessageError: an institution refuses.
        TimeoutError: an institution does not answer; the chains go on when the server is started again.
    """
    report = institutions.report
    if not institutions.plan.chains:
        return posterior
    if not can_sample(posterior):
        report("chains are left out: the clients have too many rows")
        return posterior
    each = 2 if institutions.plan.secure else 1
    count, size = number_of_chains(posterior), sum(posterior.program.randomness[GLOBAL][0].tail)
    report(
        f"chains: at most {plural(each * most_gradients(posterior), 'exchange')} with all institutions follow, one for "
        f"each leapfrog step{' and one for its seals' * (each - 1)}, of {count} × {plural(size + 1, 'number')}"
    )

    def look(found: Chains) -> None:
        institutions.chain_exchanges = each * found.gradients
        report(
            f"chains: {plural(each * found.gradients, 'exchange')}, R-hat {found.rhat:.3f}, {found.ess:,.0f} effective "
            f"draws of the {found.needed:,.0f} that are needed"
        )

    assert run.file is not None
    path = run.file.path.with_name(run.file.path.name + ".chains")
    of: dict[str, Any] = {"run": run_name(run), "rounds": run.done, "chains": count}
    chains = sample_chains(
        posterior,
        move=_move(institutions, run, posterior),
        resume=ChainsFile(path, of),
        look=look,
    )
    drawn = chains.correction()
    if drawn is None:
        report("chains have not mixed, their draws are not used: write narrower priors")
        return posterior
    return replace(posterior, correction=drawn, correctable=True)


def _move(institutions: Institutions, run: Run, posterior: Posterior) -> Any:
    """Return the function that asks all institutions for a leapfrog step."""
    key = chains_key(posterior, 0)

    def move(asked: Leap) -> Moved:
        message = MoveChains(
            run=run_name(run), iteration=asked.iteration, step=asked.step, size=asked.size
        )
        form: Tensors = {
            "gain": torch.zeros(len(asked.z), dtype=torch.float64),
            "slope": torch.zeros(*asked.z.shape, dtype=torch.float64),
        }
        called = f"step {asked.step} of iteration {asked.iteration} of chains after {plural(run.done, 'round')}"
        sent = {"chains": {"z": asked.z, "taken": asked.taken, "key": key}}
        what = "sums of chains"
        sums = request_sum(institutions, message, ChainSums, lambda _: form, what, called, sent)
        return Moved(**sums)

    return move
