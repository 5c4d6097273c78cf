"""Clipping, noise and what they cost, for any aggregation rule."""

import dataclasses
import functools
import math

import pytest
import torch
from scipy.stats import kstest

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.elbo import noise
from bayesfed.engine.batches import batches
from bayesfed.engine.parts import ROWS, flat
from bayesfed.engine.privacy import NORMS
from bayesfed.rules import Turn
from bayesfed.steps.job import Job
from tests.invariants.cases import CASES, SPECIAL, federation
from tests.scenarios import conjugate_hierarchy, exact, ragged

pytestmark = pytest.mark.filterwarnings("ignore:the noise that privacy adds")


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_an_upload_is_clipped_in_its_mechanisms_norm(mechanism):
    order = {"gaussian": 2, "laplace": 1}[mechanism]
    torch.manual_seed(0)
    length = torch.linspace(0.01, 3, 50)
    upload = {"a": length[:, None, None] * torch.randn(50, 3, 2), "b": length * torch.randn(50)}
    clipped, factor = bf.Privacy(clip=2.0, mechanism=mechanism).clip_uploads(upload, 2.0)
    flat, before = (torch.cat([v["a"].flatten(1), v["b"][:, None]], 1) for v in (clipped, upload))
    norm = before.norm(order, dim=1)
    assert (norm > 2).any() and (norm < 2).any()
    assert (flat.norm(order, dim=1) <= 2 * (1 + 1e-6)).all()
    torch.testing.assert_close(flat[norm < 2], before[norm < 2], rtol=0, atol=0)
    ratio = flat / before
    torch.testing.assert_close(ratio, factor[:, None].expand_as(ratio))  # only its length changes


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_the_scale_and_distribution_of_the_noise(mechanism, seed):
    """100,000 draws: the standard error of an estimated scale is 0.3 % or less, so that 1.5 % is five of them; the law
    by Kolmogorov-Smirnov, which fails once in 100,000 runs without a seed."""
    privacy = bf.Privacy(clip=1.5, noise=0.7, mechanism=mechanism)
    total = {"a": torch.zeros(50_000, 2, dtype=torch.float64)}
    drawn = dataclasses.replace(privacy, seed=seed).add_noise(total, 1.5, 0.7, 0)["a"].flatten()
    scale = 2 * 1.5 * 0.7
    found = float(drawn.std() if mechanism == "gaussian" else drawn.abs().mean())
    assert found == pytest.approx(scale, rel=0.015)
    law = {"gaussian": "norm", "laplace": "laplace"}[mechanism]
    assert kstest(drawn.numpy() / scale, law).pvalue > 1e-5


def test_laplace_noise_keeps_epsilon():
    """The privacy loss of one release, audited: ln p(x | one) − ln p(x | other) ≤ ε for neighbours 2 γ apart in L1."""
    epsilon = 0.8
    privacy = bf.Privacy(clip=1.0, epsilon=epsilon, mechanism="laplace")
    scale = 2 * privacy.multiplier(rounds=1, cohort=5, clients=5)
    law = torch.distributions.Laplace(torch.tensor([0.0, 0.0]), scale)
    other = torch.distributions.Laplace(torch.tensor([0.5, 1.5]), scale)  # Σ |difference| = 2 γ
    x = torch.linspace(-20, 20, 401)
    grid = torch.cartesian_prod(x, x)
    loss = (law.log_prob(grid) - other.log_prob(grid)).sum(1)
    assert float(loss.abs().max()) == pytest.approx(epsilon, rel=1e-5)


def test_laplace_composes_and_is_amplified():
    privacy = bf.Privacy(clip=1.0, noise=4.0, mechanism="laplace")
    assert privacy.spent(10, 5, 5) == pytest.approx(10 / 4.0)
    a_round = math.log(1 + 0.1 * (math.exp(1 / 4.0) - 1))
    assert privacy.spent(10, 5, 50) == pytest.approx(10 * a_round)


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("cohort", [12, 60])
def test_a_requested_epsilon_sets_the_noise(mechanism, cohort):
    privacy = bf.Privacy(clip=1.0, epsilon=3.0, delta=1e-4, mechanism=mechanism)
    assert privacy.spent(50, cohort, 60) == pytest.approx(3.0, rel=1e-3)
    given = bf.Privacy(
        clip=1.0, noise=privacy.multiplier(50, cohort, 60), delta=1e-4, mechanism=mechanism
    )
    assert given.spent(50, cohort, 60) == pytest.approx(3.0, rel=1e-3)


def test_gaussian_accounting_against_a_closed_form():
    """One release: δ(ε) of the Gaussian mechanism is known exactly (Balle & Wang 2018, eq. 6); Rényi's bound is above
    it and not by far."""
    multiplier, delta = 2.0, 1e-5
    found = bf.Privacy(clip=1.0, noise=multiplier, delta=delta).spent(1, 4, 4)
    normal = torch.distributions.Normal(0.0, 1.0)

    def spent_delta(epsilon):
        a, b = 1 / (2 * multiplier), epsilon * multiplier
        first, second = (normal.cdf(torch.tensor(v, dtype=torch.float64)) for v in (a - b, -a - b))
        return float(first - math.exp(epsilon) * second)

    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if spent_delta(middle) > delta else (low, middle)
    assert low <= found <= 1.3 * low


@pytest.mark.parametrize(
    "algorithm",
    [bf.SFVI(), bf.SFVIAvg(), bf.PVI(), bf.PACPFL(particles=2), bf.Scaffold(), bf.FedAvg()],
    ids=str,
)
def test_no_noise_and_no_clipping_is_no_privacy(algorithm):
    schools = datasets.eight_schools()
    runs = [
        bf.fit(
            models.eight_schools, schools, algorithm, rounds=4, clients_per_round=5, privacy=privacy
        )
        for privacy in (None, bf.Privacy(clip=math.inf))
    ]
    for name, value in runs[0].params.items():
        assert torch.equal(value, runs[1].params[name])
    assert runs[0].epsilon is None and runs[1].epsilon == math.inf


def test_the_sum_is_private_not_the_uploads_one_by_one():
    """Noise is drawn once a round, whatever the chunks."""
    schools = datasets.eight_schools()
    privacy = bf.Privacy(clip=0.5, noise=1.0, mechanism="laplace", seed=0)
    runs = [
        bf.fit(
            models.eight_schools,
            schools,
            rounds=3,
            privacy=privacy,
            execution=bf.Execution(chunk_size=size),
        )
        for size in (8, 3)
    ]
    for name, value in runs[0].params.items():
        torch.testing.assert_close(value, runs[1].params[name], rtol=1e-4, atol=1e-5)


def test_the_epsilon_of_a_run_is_stored(tmp_path):
    schools = datasets.eight_schools()
    privacy = bf.Privacy(clip=1.0, epsilon=5.0, mechanism="laplace")
    posterior = bf.fit(models.eight_schools, schools, rounds=3, privacy=privacy)
    assert posterior.epsilon == pytest.approx(5.0)
    assert "ε = 5" in repr(posterior)
    posterior.save(tmp_path / "run.safetensors")
    loaded = bf.Posterior.load(tmp_path / "run.safetensors", models.eight_schools, schools)
    assert loaded.epsilon == posterior.epsilon
    assert posterior.to_arviz(40).posterior.attrs["epsilon"] == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip": 0.0}, "clip is 0.0"),
        ({"clip": 1.0, "epsilon": 1.0, "noise": 1.0}, "either epsilon"),
        ({"clip": 1.0, "epsilon": -1.0}, "epsilon is -1.0"),
        ({"clip": 1.0, "noise": -1.0}, "noise is -1.0"),
        ({"clip": 1.0, "delta": 1.0}, "delta is 1.0"),
        ({"clip": 1.0, "mechanism": "exponential"}, "must be 'gaussian' or 'laplace'"),
        ({"clip": math.inf, "epsilon": 1.0}, "needs a finite clip"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        bf.Privacy(**settings)


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_an_epsilon_that_needs_too_much_noise_is_refused(mechanism):
    """Of Laplace noise ε / rounds is 1 / multiplier; 2¹⁷ of the sensitivity is the most of which sums are exact."""
    privacy = bf.Privacy(clip=1.0, epsilon=1e-4, mechanism=mechanism)
    with pytest.raises(ValueError, match="Take a larger epsilon or fewer rounds"):
        privacy.multiplier(1000 if mechanism == "laplace" else 10**7, 5, 5)


def test_it_is_plain_data():
    assert dataclasses.asdict(bf.Privacy(clip=1.0)) == {
        "clip": 1.0,
        "epsilon": None,
        "noise": None,
        "delta": 1e-5,
        "mechanism": "gaussian",
        "seed": None,
    }


# -- what is sent, and what clients remember of it -------------------------------------------------------------------


def summed(tensors):
    return {name: value.sum(0).flatten() for name, value in tensors.items()}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("clip", [0.3, None])
def test_clients_remember_the_part_of_their_uploads_that_the_server_saw(clip):
    """Clipped, without noise: what the server holds of the clients is still the sum of what they remember."""
    settings = {"rounds": 4, "clients_per_round": 3, "privacy": bf.Privacy(clip=clip)}
    runs = {}
    for algorithm in (bf.SFVI(), bf.PVI(), bf.FOLA(), bf.Scaffold(), bf.FedCurv()):
        run = bf.start(conjugate_hierarchy, ragged(), algorithm, **settings)
        for _ in range(4):
            bf.step(run)
        runs[algorithm.name] = run.server, run.clients.tensors
    close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)

    server, kept = runs["SFVI"]
    close({n: v.flatten() for n, v in server["quadratic"].items()}, summed(kept["quadratic"]))
    server, kept = runs["PVI"]
    factor = {n: v.sum(0) for n, v in kept["factor"].items()}
    close(server.q.precision - server.prior.precision, factor["precision"])
    close(server.q.shift - server.prior.shift, factor["shift"])
    server, kept = runs["FOLA"]
    share = ragged().lengths / ragged().rows
    close(server.likelihood, torch.einsum("k,k...->...", share, kept["factor"]["precision"]))
    server, kept = runs["Scaffold"]
    control = {n: v.flatten() for n, v in server["control"].items()}
    close(control, {n: v / 8 for n, v in summed(kept["control"]).items()})
    server, kept = runs["FedCurv"]
    close({n: v.flatten() for n, v in server["fisher"].items()}, summed(kept["fisher"]))


@pytest.mark.usefixtures("float64")
def test_a_clip_slows_what_clients_remember_without_bias():
    """On the old code the mean was 1.02 sd off. .15 sd is five times what 200 falling rates leave without a clip."""
    data = ragged()
    loc, scale = exact(data).mu
    posterior = bf.fit(conjugate_hierarchy, data, rounds=200, privacy=bf.Privacy(clip=1.0))
    mu = posterior.sample(4000)["mu"]
    assert abs(float(mu.mean()) - loc) < 0.15 * scale
    assert float(mu.std()) == pytest.approx(scale, rel=0.15)


@pytest.mark.usefixtures("float64")
def test_under_noise_nothing_is_remembered():
    privacy = bf.Privacy(clip=1e3, noise=1e-3, mechanism="laplace", seed=4)
    run, plain = (
        bf.start(conjugate_hierarchy, ragged(), rounds=3, privacy=p) for p in (privacy, None)
    )
    for _ in range(3):
        bf.step(run), bf.step(plain)
        held, told = held_and_told(run)
        assert not held.any() and not told.any()
        held, told = held_and_told(plain)
        assert held.any() and told.any()


def held_and_told(run):
    """What the server holds of all clients' gradients, and what they remember to have told it."""
    states = run.server["quadratic"], run.clients.tensors["quadratic"]
    return (torch.cat([value.flatten() for value in each.values()]) for each in states)


@pytest.mark.parametrize("name", [*CASES, *SPECIAL])
def test_numbers_of_rows_are_not_sent_under_noise(name):
    algorithm, model = (CASES | SPECIAL)[name]()
    data = federation()
    privacy = bf.Privacy(clip=1.0, noise=1.0, mechanism="laplace")
    if algorithm.rule.no_noise:
        with pytest.raises(ValueError, match=r"cannot be private: .*: use "):
            bf.start(model, data, algorithm, rounds=2, privacy=privacy)
        return
    run, key, uploads = bf.start(model, data, algorithm, rounds=2), noise.key(0), {}
    every, keys = torch.arange(len(data)), noise.fold(key, data.stream_ids)
    for private in (True, False):
        message = algorithm.broadcast(Turn(run.program, key, 5, noise=float(private)), run.server)
        rows = batches(data, every, None, keys)
        job = Job(run.program, message, run.clients.take(every), rows, keys, private=private)
        uploads[private] = flat(algorithm.work(job).upload)
    counts = data.lengths.to(data.dtype)
    assert ROWS not in uploads[True]
    assert not any(torch.equal(value.flatten(), counts) for value in uploads[True].values())
    if ROWS in uploads[False]:
        assert torch.equal(uploads[False][ROWS], counts)
        for name, value in uploads[True].items():  # the same moves, of equal weight
            weighed = value * counts.reshape(-1, *[1] * (value.ndim - 1))
            torch.testing.assert_close(uploads[False][name], weighed)


def test_terms_and_failures_are_hidden_under_noise():
    data = datasets.eight_schools()
    privacy = bf.Privacy(clip=1.0, noise=1.0, mechanism="laplace")
    run = bf.start(models.eight_schools, data, rounds=2, privacy=privacy)
    report = bf.step(run)
    assert math.isnan(report.elbo) and report.client_terms.isnan().all() and not report.refused
    data.fields["y"][3] = math.nan
    report = bf.step(run)
    assert not report.refused and len(report.cohort) == 8
    assert all(value.isfinite().all() for value in report.params.values())
    assert bf.finish(run).history["elbo"].isnan().all()


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("loud, normal", [(0.0, 1.2816), (0.2, 0.8416), (0.6, 0.0)])
def test_an_adaptive_clip_reaches_the_quantile_that_suits_the_noise(mechanism, loud, normal):
    """Norms of 1000 clients whose logarithms are N(3, 1²), of which .9, .8 and half are below e^(3 + normal), known to
    6 %. The loudest noise is 1 in b̄, of which γ takes .28 a round and comes back by .28 · .4: it stays within .6, and
    the mean of 300 rounds within .15, of which .45 is three."""
    multiplier = loud * 1000 / 2 / (7 if mechanism == "laplace" else math.sqrt(7))
    privacy = bf.Privacy(noise=multiplier, mechanism=mechanism, seed=1)
    generator = torch.Generator().manual_seed(0)
    clip, found = privacy.first_clip(), []
    for number in range(400):
        direction = torch.randn(1000, 7, generator=generator, dtype=torch.float64)
        direction /= direction.norm(NORMS[mechanism], dim=1, keepdim=True)
        norm = torch.randn(1000, 1, generator=generator, dtype=torch.float64).add(3).exp()
        upload, _ = privacy.clip_uploads({"a": norm * direction}, float(clip))
        total = {name: value.sum(0) for name, value in upload.items()}
        total = privacy.add_noise(total, float(clip), multiplier, number)
        clip = privacy.next_clip(total, clip, multiplier, 1000)
        assert list(total) == ["a"]
        found.append(float(clip.log()))
    assert sum(found[100:]) / 300 == pytest.approx(3 + normal, abs=0.45 if multiplier else 0.1)


def test_the_step_of_an_adaptive_clip():
    """γ ← γ exp(−(b̄ − .9)), b̄ being the part of the clients that a noisy sum says is short; by a factor e at most."""
    privacy = bf.Privacy(seed=0)
    clipped, _ = privacy.clip_uploads({"a": torch.ones(4, 2)}, 0.5)
    (short,) = clipped.keys() - {"a"}
    for told, by in ((-40.0, 1.0), (-1.0, 0.65), (0.0, 0.4), (1.0, 0.15), (40.0, -1.0)):
        total = {short: torch.tensor(told)}
        clip = privacy.next_clip(total, torch.tensor(2.0, dtype=torch.float64), 0.0, 4)
        assert float(clip) == pytest.approx(2.0 * math.exp(by), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noisy_sums_become_numbers_of_the_federation(dtype):
    data = datasets.eight_schools().to(dtype=dtype)
    privacy = bf.Privacy(clip=1.0, noise=1.0)
    run = bf.start(models.eight_schools, data, bf.FedAvg(), rounds=1, privacy=privacy)
    assert all(value.dtype == dtype for value in bf.step(run).params.values())


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_an_adaptive_clip_takes_its_share_of_the_noise(mechanism):
    """What two releases tell together is what one would with the noise that is accounted for: the inverse scales add
    up with Laplace noise, their squares with Gaussian noise. Tolerances are five standard errors."""
    power = {"gaussian": 2, "laplace": 1}[mechanism]
    privacy = bf.Privacy(noise=1.0, mechanism=mechanism, seed=0)
    clipped, _ = privacy.clip_uploads({"a": torch.ones(1, 50_000, dtype=torch.float64)}, 0.5)
    (short,) = clipped.keys() - {"a"}
    assert float(clipped[short]) == -0.5  # and ½ of another: a sensitivity of 1
    zero = {"a": torch.zeros(50_000), short: torch.zeros(())}
    many = [
        privacy.add_noise(zero if i == 0 else {short: zero[short]}, 0.5, 1.0, i)
        for i in range(2000)
    ]
    bits = torch.stack([told[short] for told in many])

    def inverse(x, sensitivity):
        scale = x.std() if mechanism == "gaussian" else x.abs().mean()
        return (sensitivity / float(scale)) ** power

    rest, share = inverse(many[0]["a"], 2 * 0.5), inverse(bits, 1.0)
    assert share == pytest.approx(0.05, rel=0.12 * power)
    assert rest + share == pytest.approx(1.0, rel=0.015 * power)
