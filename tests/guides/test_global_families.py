"""Families of q(z): draws, densities, natural-gradient steps and transport maps."""

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch.func import functional_call

import bayesfed as bf
from bayesfed.elbo import handlers
from bayesfed.guides.full_rank import from_scale_tril, scale_tril
from bayesfed.guides.natural_gradient import QuadraticTerm

pytestmark = pytest.mark.usefixtures("float64")


def perturbed(family, size, by=0.3, seed=0):
    """Parameters of a family, perturbed from the start."""
    recorder = handlers.Parameters()
    with recorder:
        family(torch.zeros(size))
    generator = torch.Generator().manual_seed(seed)
    return {
        name: seen["value"] + by * torch.randn(seen["value"].shape, generator=generator)
        for name, seen in recorder.seen.items()
    }


def run(family, size, params, draws, seed=0):
    """``(z, log q(z), what the family returned, q)`` of a family run in Pyro."""
    torch.manual_seed(seed)
    with handlers.Parameters(params), handlers.draws_plate(draws):
        trace = poutine.trace(family).get_trace(torch.zeros(size))
    node = trace.nodes["global"]
    z = node["value"]
    assert z.shape == (draws, 1, 1, size)
    log_prob = node["fn"].log_prob(z)
    assert log_prob.shape == (draws, 1, 1)
    return z[:, 0, 0], log_prob[:, 0, 0], trace.nodes["_RETURN"]["value"], node["fn"]


def test_scale_tril_is_recovered_from_its_parameters():
    generator = torch.Generator().manual_seed(0)
    tril = torch.randn(5, 4, 4, generator=generator).tril(-1)
    tril = tril + torch.diag_embed(torch.rand(5, 4, generator=generator) + 0.1)
    params = from_scale_tril(tril)
    assert params["global.log_scale"].shape == (5, 4)
    back = scale_tril(params["global.log_scale"], params["global.tril"])
    torch.testing.assert_close(back, tril)
    again = from_scale_tril(back)
    for name, value in params.items():
        torch.testing.assert_close(again[name], value)


def test_entries_above_the_diagonal_are_ignored():
    log_scale, full = torch.tensor([0.1, -0.3]), torch.tensor([[5.0, 7.0], [0.5, -2.0]])
    expected = torch.tensor([[1.0, 0.0], [0.5, 1.0]]) * log_scale.exp()[:, None]
    torch.testing.assert_close(scale_tril(log_scale, full), expected)


@pytest.mark.parametrize("family", [bf.MeanField(), bf.FullRank()], ids=str)
def test_normal_families(family):
    params = perturbed(family, 3)
    loc, log_scale = params["global.loc"], params["global.log_scale"]
    tril = scale_tril(log_scale, params.get("global.tril", torch.zeros(3, 3)))
    z, log_prob, (same, at, scale), _ = run(family, 3, params, 4000)
    q = dist.MultivariateNormal(loc, scale_tril=tril)
    torch.testing.assert_close(log_prob, q.log_prob(z))
    assert torch.equal(same[:, 0, 0], z)
    assert torch.equal(at, loc)
    torch.testing.assert_close(scale, q.stddev)
    # four Monte Carlo errors of a mean and of a covariance, whitened
    white = torch.linalg.solve(tril, (z - loc).T).T
    assert white.mean(0).abs().max() < 4 / 4000**0.5
    assert (white.T.cov() - torch.eye(3)).abs().max() < 4 * 2**0.5 / 4000**0.5


@pytest.mark.parametrize("family", [bf.MeanField(), bf.FullRank()], ids=str)
def test_a_map_carries_a_gaussian_onto_its_copies(family):
    """The copies have a leading dimension; parameters of others are unchanged."""
    start = perturbed(family, 3) | {"theirs": torch.zeros(2)}
    copies = [
        perturbed(family, 3, seed=seed) | {"theirs": torch.full((2,), seed)} for seed in (1, 2)
    ]
    stacked = {name: torch.stack([c[name] for c in copies])[:, None] for name in start}
    maps = family.transport_maps(start, stacked)
    for i, copy in enumerate(copies):
        carried = family.apply_map(start, {name: value[i, 0] for name, value in maps.items()})
        assert carried.keys() == start.keys()
        for name in ("global.loc", "global.log_scale", "theirs"):
            torch.testing.assert_close(carried[name], copy[name])
        if "global.tril" in start:  # entries above the diagonal are ignored
            torch.testing.assert_close(carried["global.tril"], copy["global.tril"].tril(-1))


def test_maps_of_full_rank_average_as_those_of_mean_field_where_covariances_commute():
    """Slopes of diagonal covariances are ratios of scales: their mean is that of the scales."""
    scales = torch.tensor([[0.5, 2.0], [1.5, 1.0]])
    full = bf.FullRank()
    start = full.at(torch.zeros(2), torch.diag(torch.tensor([0.7, 0.3])))
    maps = full.transport_maps(start, full.at(torch.zeros(2, 2), torch.diag_embed(scales)))
    carried = full.apply_map(start, {name: value.mean(0) for name, value in maps.items()})
    torch.testing.assert_close(full.normal(carried)[1], torch.diag(scales.mean(0)))


def test_kind_of_step_of_each_family():
    assert all(
        family.takes_natural_steps(rate)
        for family in (bf.MeanField(), bf.FullRank())
        for rate in (1.0, 0.0)
    )
    assert bf.Flow().takes_natural_steps(1.0)
    assert not bf.Flow().takes_natural_steps(0.3)
    flow, z = perturbed(bf.Flow(), 2), torch.randn(5, 2)
    of = bf.Flow().fit_quadratic(
        flow, z, -z[None], QuadraticTerm(*(v[None] for v in bf.Flow().zero_term(flow)))
    )
    to = bf.Flow().direction(flow, QuadraticTerm(*(v[0] for v in of)), z)
    new = bf.Flow().ascend(flow, to, 0.1)
    assert new.keys() == flow.keys()
    changed = {name for name, value in new.items() if not torch.equal(value, flow[name])}
    assert changed == {"global.loc", "global.log_scale", "global.tril"}  # the spline is unchanged
    shaken = bf.Flow().direction(flow, QuadraticTerm(*(v[0] for v in of)), z, noise=3.0)
    assert (shaken.noise > to.noise).all()
    assert (to.noise == 0).all()


@pytest.mark.parametrize("family", [bf.MeanField(0.5), bf.FullRank(0.5), bf.Flow(0.5)], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_the_start(family, size):
    """Standard deviation init_scale; a Flow's spline starts close to the identity, but not at it."""
    z, _, (_, loc, scale), _ = run(family, size, perturbed(family, size, by=0.0), 4000)
    assert (loc == 0).all()
    torch.testing.assert_close(scale, torch.full((size,), 0.5))
    tolerance = 0.3 if isinstance(family, bf.Flow) else 4 / 8000**0.5
    assert (z.std(0) / 0.5).log().abs().max() < tolerance


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_flows_density_integrates_to_one_in_one_dimension(seed):
    """The trapezoid rule between sorted draws; beyond the outermost of 20,000 there is a mass of about 1e-4."""
    z, log_prob, *_ = run(bf.Flow(), 1, perturbed(bf.Flow(), 1, seed=seed), 20_000)
    order = z[:, 0].argsort()
    total = torch.trapezoid(log_prob[order].exp(), z[order, 0])
    assert abs(float(total) - 1) < 1e-3


@pytest.mark.parametrize("seed", [0, 1])
def test_a_flows_density_integrates_to_one_in_two_dimensions(seed):
    """E_q[N(z) / q(z)] = 1, to four Monte Carlo errors; q is wider than N, so these are small."""
    params = perturbed(bf.Flow(), 2, by=0.1, seed=seed)
    params["global.loc"] = torch.zeros(2)
    params["global.log_scale"] = torch.full((2,), 2.0).log()
    z, log_prob, *_ = run(bf.Flow(), 2, params, 20_000)
    weights = (dist.Normal(0.0, 1.0).log_prob(z).sum(-1) - log_prob).exp()
    error = float(weights.std()) / 20_000**0.5
    assert error < 0.02
    assert abs(float(weights.mean()) - 1) < 4 * error


def test_a_flow_is_not_normal():
    """Else the tests of its density would test nothing."""
    params = perturbed(bf.Flow(), 2, by=1.0)
    z, log_prob, *_ = run(bf.Flow(), 2, params, 200)
    tril = scale_tril(params["global.log_scale"], params["global.tril"])
    plain = dist.MultivariateNormal(params["global.loc"], scale_tril=tril).log_prob(z)
    assert (plain - log_prob).abs().max() > 0.5


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_flows_density_matches_finite_differences(size):
    params = perturbed(bf.Flow(), size, by=0.3)
    z, log_prob, _, q = run(bf.Flow(), size, params, 50)
    spline, weights, loc, tril = q.parts
    torch.manual_seed(0)
    noise = torch.randn(50, 1, 1, size)[:, 0, 0]

    def pushed(noise):
        return loc + functional_call(spline, weights, (noise,))[0] @ tril.T

    torch.testing.assert_close(pushed(noise), z)
    step = 1e-6 * torch.eye(size)
    columns = [(pushed(noise + d) - pushed(noise - d)) / 2e-6 for d in step]
    log_det = torch.linalg.slogdet(torch.stack(columns, -1)).logabsdet
    expected = dist.Normal(0.0, 1.0).log_prob(noise).sum(-1) - log_det
    # segments may be a thousandth wide, and derivatives jump at their ends, so differences are off a little
    torch.testing.assert_close(log_prob, expected, rtol=0, atol=1e-3)


def test_a_flow_gives_the_density_of_its_last_draw_only():
    *_, q = run(bf.Flow(), 2, perturbed(bf.Flow(), 2), 3)
    with pytest.raises(NotImplementedError, match="its own last draw only"):
        q.log_prob(torch.zeros(3, 1, 1, 2))


def test_flows_of_one_size_do_not_share_parameters():
    first, second = perturbed(bf.Flow(), 2, seed=1), perturbed(bf.Flow(), 2, seed=2)
    before = run(bf.Flow(), 2, first, 5)[0]
    assert not torch.equal(before, run(bf.Flow(), 2, second, 5)[0])
    assert torch.equal(before, run(bf.Flow(), 2, first, 5)[0])


def test_maps_between_narrow_gaussians_in_single_precision():
    """Scales from 1 to 1e-4 and a correlation of 0.99: the covariance has a condition number of 1e9."""
    full = bf.FullRank()
    rows = [[1.0, 0.0, 0.0], [0.99e-2, 0.14e-2, 0.0], [0.3e-4, 0.2e-4, 1e-4]]
    tril = torch.tensor(rows, dtype=torch.float32)
    stretched = torch.tensor([[1.1], [0.9], [1.05]], dtype=torch.float32) * tril
    start = full.at(torch.zeros(3), tril)
    maps = full.transport_maps(start, full.at(torch.zeros(1, 3), stretched[None]))
    carried = full.apply_map(start, {name: value[0] for name, value in maps.items()})
    assert carried["global.tril"].dtype == torch.float32
    found = full.normal(carried)[1]
    torch.testing.assert_close(found @ found.T, stretched @ stretched.T, rtol=2e-3, atol=0)
