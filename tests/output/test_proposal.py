"""The density, the draws and the moments of a proposal."""

import pyro.distributions as dist
import pytest
import torch

from bayesfed.elbo.noise import seeded
from bayesfed.output.effort import equal_shares
from bayesfed.output.importance import effective_sample_size
from bayesfed.output.proposal import (
    WIDER,
    Proposals,
    StudentMixture,
    fit_proposal,
    surrogate_proposal,
)

QUARTILES = torch.tensor([-0.72669, 0.0, 0.72669])
"""Of Student's t with five degrees of freedom."""


def test_a_proposal_is_a_mixture_of_students():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        centres, root = torch.randn(3, 2), torch.tensor([[0.7, 0.0], [0.4, 1.1]])
        proposal = StudentMixture(centres, root)
        z = 2 * torch.randn(50, 2)
        draws = proposal.sample(60_000)
    parts = dist.MultivariateStudentT(torch.full((3,), 5.0), centres, root.expand(3, 2, 2))
    mixture = dist.MixtureSameFamily(dist.Categorical(torch.ones(3)), parts)
    torch.testing.assert_close(proposal.log_prob(z), mixture.log_prob(z))
    torch.testing.assert_close(draws.mean(0), centres.mean(0), atol=0.03, rtol=0)


@pytest.mark.parametrize("centres", [1, 400])
def test_a_proposal_has_the_moments_of_the_weighted_draws(centres):
    """Draws from most of a circle. The covariance of the proposal is theirs, except that each t is somewhat wider."""
    angle = torch.linspace(0, 6, 3000, dtype=torch.float64)
    z = torch.stack([angle.cos(), angle.sin()], -1)
    weights = (2 + angle) / (2 + angle).sum()
    proposal = fit_proposal(z, weights, centres)
    mean = weights @ z
    covariance = (weights[:, None] * (z - mean)).mT @ (z - mean)
    torch.testing.assert_close(proposal.centres.mean(0), mean, atol=2e-3, rtol=0)
    of_centres = torch.cov(proposal.centres.mT, correction=0) if centres > 1 else 0.0
    of_each = proposal.root @ proposal.root.mT * 5 / 3 / WIDER**2
    torch.testing.assert_close(of_centres + of_each, covariance, atol=5e-3, rtol=0)
    there, middle = proposal.log_prob(torch.stack([z[1500], mean]))
    assert bool(there > middle + 1) == (centres > 1)  # many centres follow the curve of the draws


def test_draws_of_each_component_fill_its_distribution():
    """A Sobol sequence with the components in turn would give each one a part of its distribution only."""
    centres, root = (
        100.0 * torch.arange(4.0)[:, None].expand(4, 2),
        torch.diag(torch.tensor([1.0, 2.0])),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draws = StudentMixture(centres, root).sample(8192)
    of = (draws[:, 0] / 100).round().long()
    for k in range(4):
        away = draws[of == k] - centres[k]
        assert len(away) == pytest.approx(2048, abs=2)
        shares = (away[:, :, None] < root.diagonal()[:, None] * QUARTILES).double().mean(0)
        torch.testing.assert_close(
            shares, torch.tensor([[0.25, 0.5, 0.75]] * 2).double(), atol=0.02, rtol=0
        )


def test_draws_have_far_less_noise_than_independent_ones():
    errors = []
    for seed in range(20):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            draws = StudentMixture(torch.zeros(1, 3), torch.eye(3)).sample(1000)
        errors.append(torch.cat([draws.mean(0), (draws > QUARTILES[2]).double().mean(0) - 0.25]))
    noise = torch.stack(errors).square().mean(0).sqrt()
    independent = torch.tensor([(5 / 3) ** 0.5] * 3 + [0.25 * 3**0.5] * 3) / 1000**0.5
    assert bool((noise < 0.5 * independent).all())


def surrogate_of(curvatures, mean):
    """Of a Normal with these precisions and this mean along six directions: the surrogate and the directions."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x, any_matrix = torch.randn(400, 6).double(), torch.randn(6, 6).double()
    along = torch.linalg.qr(any_matrix).Q
    log_density = -((x @ along - mean) ** 2) @ torch.tensor(curvatures, dtype=torch.float64) / 2
    return surrogate_proposal(x, log_density, torch.full((400,), 1 / 400).double()), along


def test_a_surrogate_of_a_normal_has_its_moments():
    curvatures = [0.5, 1.0, 1e2, 1e4, 1e6, 1e8]
    found, along = surrogate_of(curvatures, 0.5)
    covariance = along.mT @ found.root @ found.root.mT @ along * 5 / 3 / WIDER**2
    expected = torch.tensor(curvatures).double().reciprocal()
    torch.testing.assert_close(covariance.diagonal(), expected, rtol=1e-3, atol=1e-9)
    torch.testing.assert_close(found.centres[0] @ along, torch.full((6,), 0.5).double())


def test_a_surrogate_that_is_flat_and_steep_beyond_round_off_is_a_proposal():
    """Its covariance has no Cholesky factor in double precision."""
    found, _ = surrogate_of([1e20] * 5 + [1.0], 0.0)
    assert bool((found.root.diagonal() > 0).all()) and bool(found.root.isfinite().all())
    assert bool(found.log_prob(found.sample(100)).isfinite().all())


def test_most_draws_of_a_second_proposal_are_near_a_posterior_far_away():
    """Three of four lie around the surrogate's mode, and about as many have a weight."""
    mean, sd = 4.0, 0.3
    proposals = Proposals()
    with seeded(0):
        q = torch.randn(2000, 3).double()
        proposals.add(q, equal_shares(q), 2000, centres=1)
        z = proposals.sample(torch.float64)
        target = -((z - mean) / sd).square().sum(1) / 2
        weights = (target - proposals.log_prob()).softmax(0)
        assert effective_sample_size(weights) < 10
        added = proposals.add(z, equal_shares(z), 4000, centres=1, log_target=target)
        assert added
        new = proposals.sample(torch.float64)
    near = ((new - mean).abs() < 4 * sd).all(1)
    assert abs(float(near.double().mean()) - 0.75) < 0.03
    target = -((proposals.draws - mean) / sd).square().sum(1) / 2
    weights = (target - proposals.log_prob()).softmax(0)
    assert effective_sample_size(weights) > 0.6 * len(new)


def test_some_draws_of_the_first_proposal_are_kept_with_their_density():
    """Of three proposals, the second is forgotten. The others' density is in proportion to their numbers of draws."""
    with seeded(0):
        z = torch.randn(200, 2, dtype=torch.float64)
    proposals = Proposals()

    def propose(count, prior=0.0):
        assert proposals.add(z, equal_shares(z), count, centres=1, prior=prior)

    with seeded(1):
        propose(1001, prior=1.0)
        drawn = proposals.sample(z.dtype)
        propose(300)
        proposals.sample(z.dtype)
        parts = proposals.parts[:2]
        propose(500)
        proposals.keep_some(1001, 4)
        torch.testing.assert_close(proposals.draws, drawn[::4])
        last_drawn = proposals.sample(z.dtype)
    draws = torch.cat([drawn[::4], last_drawn])
    counts = [125, 126, 500]  # of draws 0 to 499, of 500 to 1000, and of the last
    density = sum(
        count * part.mixture.log_prob(draws).exp()
        for count, part in zip(counts, [*parts, proposals.parts[-1]], strict=True)
    )
    torch.testing.assert_close(proposals.draws, draws)
    torch.testing.assert_close(proposals.log_prob(), (density / 751).log())
