"""FOLA against numbers worked by hand, its prior loss, and what it can do with the rest of the package."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.func import functional_call

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.elbo import noise
from bayesfed.engine.batches import batches
from bayesfed.engine.program import build_program
from bayesfed.functional.networks import apply
from bayesfed.models.network import Network, mlp
from bayesfed.steps.curvature import _row_by_row, slopes
from bayesfed.steps.laplace_steps import _loss
from tests.algorithms.fola_rounds import (
    EAGER,
    PAPER,
    ROWS,
    N,
    correlated,
    network,
    one_round,
    run,
    separate,
)

# -- the formulas, by hand ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fisher", "online", "squares"),
    [
        # one weight, w = 0; rows (x, y) of client a (1, 2), (1, 4): gradients −2, −4; of client b (2, 1): −2
        ("per-sample", True, [(4 + 16) / 2, 4.0]),
        ("batch", True, [9.0, 4.0]),
        ("hessian", True, [1.0, 4.0]),
        # after the step with η = 0.1 and a prior that does not act at its centre: w = (0.3, 0.2) / (1 + 0.1 · 4)
        ("per-sample", False, [((2 - 0.3 / 1.4) ** 2 + (4 - 0.3 / 1.4) ** 2) / 2, 0.0]),
    ],
)
@pytest.mark.parametrize("covariance", ["diagonal", "full", "e-full"])  # one number: all alike
def test_one_step_by_hand(float64, fisher, online, squares, covariance):
    federation = bf.Federation.from_arrays(
        {"a": {"x": [[1.0], [1.0]], "y": [2.0, 4.0]}, "b": {"x": [[2.0]], "y": [1.0]}}
    )
    gamma, squares = 4.0, list(squares)
    settings = {"lr": 0.1, "local_steps": 1, "cavity": False, "covariance": covariance}
    algorithm = bf.FOLA(fisher=fisher, online=online, gamma=3 * gamma, **settings)
    program = algorithm.program(network([0.0]), federation)
    first = algorithm.start(program)
    w = torch.tensor([0.3, 0.2]) / (1 + 0.1 * gamma)
    if not online:
        squares[1] = float(((2 * w[1] - 1) * 2) ** 2)
    pi = torch.tensor([2.0, 1.0]) / 3
    for r in (1, 2, 3):  # the same Gaussian sent in later rounds: only r differs
        server = first._replace(rounds=torch.tensor(r - 1))
        after, _, upload = one_round(algorithm, program, federation, server, {})
        precision = torch.tensor(squares) / r + (r - 1) / r * gamma
        n = torch.tensor([2.0, 1.0])
        torch.testing.assert_close(upload["precision"].flatten(), n * precision)
        torch.testing.assert_close(upload["shift"].flatten(), n * precision * w)
        whole = (pi * precision).sum() + gamma / r  # eq. 25: the prior is kept
        torch.testing.assert_close(after.precision.flatten(), whole[None])
        torch.testing.assert_close(after.loc, ((pi * precision * w).sum() / whole)[None])
        assert int(after.rounds) == r


def test_squares_of_rows_are_averaged_over_each_clients_own_steps(float64):
    """Minibatches of two rows, 6, 9 and 12 rows: 3, 5 and 6 steps; the last of the nine's is short."""
    federation, lr, model = separate(), 0.05, network([0.1, -0.2, 0.3])
    for covariance in ("diagonal", "full"):
        algorithm = bf.FOLA(
            **PAPER | {"lr": lr, "covariance": covariance}, local_epochs=1, gamma=float(N)
        )
        server = algorithm.start(algorithm.program(model, federation))
        _, _, upload = run(algorithm, model, federation, 1, batch_size=2)
        key = noise.fold(noise.key(0), server.rounds)
        keys = noise.fold(key, federation.stream_ids)
        rows = batches(federation, torch.arange(3), 2, keys)
        for i, steps in enumerate((3, 5, 6)):
            w, total = server.loc, torch.zeros(3, 3)
            for t in range(steps):
                batch = rows(t)
                x, y = (batch.fields[n][i][batch.mask[i]] for n in ("x", "y"))
                each = (x @ w - y)[:, None] * x
                total = total + each.mT @ each / len(each)
                w = (w - lr * each.mean(0) + lr * server.loc) / (1 + lr)
            precision = total / steps if covariance == "full" else (total / steps).diagonal().diag()
            found = upload["precision"][i] / ROWS[i]
            torch.testing.assert_close(found if found.ndim == 2 else found.diag(), precision)
            torch.testing.assert_close(upload["shift"][i] / ROWS[i], precision @ (w - server.loc))


def test_rows_of_a_network_one_by_one(float64, monkeypatch):
    """The squared gradient of every row, and the products of its entries, whatever the size of the chunks."""
    rng = torch.Generator().manual_seed(1)
    module = mlp(4, 3, 2)
    clients = {
        f"{n} rows": {
            "x": torch.randn(n, 4, generator=rng),
            "y": torch.randint(2, (n,), generator=rng),
        }
        for n in (3, 5)
    }
    federation = bf.Federation.from_arrays(clients)
    guide = bf.FOLA().program(Network(module), federation).guide
    start = guide.start
    w, loss, batch = torch.stack([start, start + 0.1]), _loss(guide), federation.batch()
    whole = slopes(loss, w, batch, "per-sample")
    full = slopes(loss, w, batch, "per-sample", full=True)
    torch.testing.assert_close(slopes(loss, w, batch, "layers"), whole)
    torch.testing.assert_close(full[1].diagonal(0, -2, -1), whole[1])
    monkeypatch.setattr("bayesfed.steps.curvature.GRADIENTS", 3 * w.numel())
    torch.testing.assert_close(_row_by_row(loss, w, batch, full=True), full)
    plain = slopes(loss, w, batch, "batch")[0]
    torch.testing.assert_close(whole[0], plain)
    for i, data in enumerate(clients.values()):
        products = []
        for x, y in zip(data["x"], data["y"], strict=True):
            v = w[i].clone().requires_grad_()
            parts = v.split([p.numel() for p in module.parameters()])
            named = {
                n: q.view_as(p) for (n, p), q in zip(module.named_parameters(), parts, strict=True)
            }
            value = nn.functional.cross_entropy(functional_call(module, named, (x,)), y)
            (grad,) = torch.autograd.grad(value, v)
            products.append(torch.outer(grad, grad))
        torch.testing.assert_close(full[1][i], torch.stack(products).mean(0))


def test_eigenvalues_for_a_diagonal(float64):
    """The paper's e-full: the eigenvalues of the whole Hessian, in ascending order."""
    federation, model = correlated(), network([0.0, 0.0, 0.0])
    settings = {"lr": 0.1, "fisher": "hessian", "cavity": False}
    _, _, upload = run(bf.FOLA(covariance="e-full", **settings), model, federation, 1)
    _, _, full = run(bf.FOLA(covariance="full", **settings), model, federation, 1)
    for found, matrix in zip(upload["precision"], full["precision"], strict=True):
        torch.testing.assert_close(found, torch.linalg.eigvalsh(matrix))


# -- the prior loss -------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_the_prior_loss_has_a_gradient(float64, covariance):
    """Clients end where the gradient of the task loss plus λ Σ_S⁻¹ (w − μ_S) is zero (eq. 15, 16), not at their own."""
    federation, weight = separate(), 3.0
    start = torch.tensor([1.0, -1.0, 2.0])
    gamma = torch.diag(torch.tensor([0.5, 2.0, 40.0]))
    if covariance == "full":
        gamma = gamma + 0.4
    algorithm = bf.FOLA(
        lr=0.5,
        local_steps=150,
        prior_weight=weight,
        fisher="hessian",
        cavity=False,
        covariance=covariance,
    )
    program = algorithm.program(network(start), federation)
    sent = gamma if covariance == "full" else gamma.diagonal()
    server = algorithm.start(program)._replace(precision=sent)
    _, _, upload = one_round(algorithm, program, federation, server, {})
    for i in range(3):
        precision, shift = upload["precision"][i], upload["shift"][i]
        w = start + (
            torch.linalg.solve(precision, shift) if covariance == "full" else shift / precision
        )
        rows = federation.batch(torch.tensor([i]))
        v = w.clone().requires_grad_()
        task = -torch.distributions.Normal(rows.fields["x"][0] @ v, 1.0).log_prob(
            rows.fields["y"][0]
        )
        prior = weight * 0.5 * (v - start) @ gamma @ (v - start)
        (of_task,) = torch.autograd.grad(task[rows.mask[0]].mean(), v)
        (of_prior,) = torch.autograd.grad(prior, v)
        assert of_prior.abs().min() > 1e-2
        torch.testing.assert_close(of_task + of_prior, torch.zeros(3), atol=1e-8, rtol=0)


@pytest.mark.parametrize("weight", [1e-3, 1.0, 1e6])
def test_steps_are_stable_for_any_weight_of_the_prior(float64, weight):
    algorithm = bf.FOLA(**PAPER, prior_weight=weight)
    server, _, _ = run(algorithm, network([3.0, 3.0, 3.0]), separate(), 3)
    assert server.loc.isfinite().all() and server.precision.isfinite().all()
    assert (server.loc.abs() < 10).all()


def test_weights_without_a_gradient_stay_where_they_are(float64):
    """At their start, with the precision of their prior."""
    x = {n: {"x": separate().fields["x"][s], "y": separate().fields["y"][s]} for n, s in _slices()}
    for fields in x.values():
        fields["x"] = fields["x"] * torch.tensor([1.0, 0.0, 1.0])
    federation = bf.Federation.from_arrays(x)
    for cavity in (False, True):
        algorithm = bf.FOLA(**PAPER | {"cavity": cavity})
        server, _, _ = run(algorithm, network([0.0, 1.7, 0.0]), federation, 4)
        assert float(server.loc[1]) == 1.7
        assert float(server.precision[1]) == pytest.approx(1 / N)
        assert (server.loc[[0, 2]] != 0).all()


def _slices():
    ends = torch.tensor(ROWS).cumsum(0).tolist()
    return [(str(i), slice(e - n, e)) for i, (n, e) in enumerate(zip(ROWS, ends, strict=True))]


# -- with the rest of the package -----------------------------------------------------------------


@pytest.mark.parametrize("settings", [PAPER, PAPER | {"cavity": True}, {}], ids=str)
def test_chunks_do_not_change_results(float64, settings):
    fits = [
        bf.fit(
            network([0.0, 0.0, 0.0]),
            separate(),
            bf.FOLA(**settings),
            rounds=3,
            batch_size=2,
            execution=bf.Execution(compile=False, chunk_size=c),
        )
        for c in (1, 3)
    ]
    for name, value in fits[0].params.items():
        torch.testing.assert_close(value, fits[1].params[name], atol=1e-12, rtol=1e-10)


def test_many_variables_of_clients_are_their_modes(float64, monkeypatch):
    """w_i: the ridge regression with the prior N(m, σ²) at m = μ_S; beyond so many numbers nothing is integrated."""
    monkeypatch.setattr("bayesfed.guides.laplace.INTEGRATED_UP_TO", 2)
    federation = separate()
    line = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(line.weight)
    model = Network(line, scale=0.5, likelihood="normal")
    algorithm = bf.FOLA(personal_steps=1000, lr=0.3, fisher="hessian")
    posterior = bf.fit(model, federation, algorithm, rounds=2, execution=EAGER)
    assert not posterior.program.guide.integrated
    loc = posterior.program.guide.family.normal(posterior.params)[0]
    for some in (posterior, posterior.personalize(federation)):
        draws = some.sample(20)
        assert (draws["prior.loc"].std(0) > 0).all()
        for i, (_, rows) in enumerate(_slices()):
            x, y = federation.fields["x"][rows], federation.fields["y"][rows]
            best = torch.linalg.solve(x.mT @ x + 4 * torch.eye(3), x.mT @ y + 4 * loc)
            torch.testing.assert_close(draws["weights"][:, i].reshape(-1, 3), best.expand(20, 3))


def test_what_it_cannot_do_is_said():
    with pytest.raises(ValueError, match="fisher"):
        bf.fit(network([0.0]), separate(weights=1), bf.FOLA(fisher="rows"), rounds=1)
    schools = datasets.eight_schools()
    with pytest.raises(ValueError, match="theta makes them depend on each other: use 'hessian'"):
        bf.FOLA(fisher="per-sample").program(models.eight_schools, schools)

    def nothing_shared(federation):
        with federation.clients():
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(w, 1.0), obs=obs.get("y"))

    def mixture(federation):
        kind = pyro.sample("kind", dist.Bernoulli(0.5))
        with federation.clients(), federation.observations() as obs:
            pyro.sample("y", dist.Normal(kind, 1.0), obs=obs.get("y"))

    with pytest.raises(ValueError, match="no global variable or parameter.*use FedAvg"):
        bf.FOLA().program(nothing_shared, schools)
    with pytest.raises(ValueError, match="'kind' is discrete"):
        bf.FOLA().program(mixture, schools)


@pytest.mark.parametrize(
    ("how", "least"),
    [
        ({}, 0.85),
        ({"prior_weight": None}, 0.85),
        ({"cavity": True}, 0.75),
        ({"fisher": "batch"}, 0.85),
    ],
    ids=str,
)
def test_learns_digits(how, least):
    """20 clients with 3 digits each: the global model on all clients' test images."""
    train, test = datasets.digits()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = mlp(64, 32, 10)
    algorithm = bf.FOLA(lr=0.5, **how)
    posterior = bf.fit(Network(module, local=()), train, algorithm, rounds=8, batch_size=10)
    x, y = test.fields["x"], test.fields["y"]
    loc = posterior.params["global.loc"]
    out = apply(module, loc[None, None], x[None])[0]
    assert float((out.argmax(-1) == y).float().mean()) > least


def test_many_local_weights_are_at_their_prior_and_rows_come_in_minibatches():
    """A guide that takes Laplace's approximation at θ for them read all rows in each step: 47 % for 72 % of digits."""
    train, _ = datasets.digits(clients=5)
    model = models.Network(models.mlp(64, 32, 10), local=["2."])
    program = build_program(model, train, bf.FOLA(), 0)
    assert program.learns_locals
    assert not program.workspace


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_a_wide_prior_is_kept_beside_many_rows(covariance):
    """Of a slope of which the rows say nothing; per row its precision is 5 · 10⁻¹¹."""

    def program(federation):
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        slope = pyro.sample("slope", dist.Normal(3.0, 1000.0))
        with federation.clients(), federation.observations() as obs:
            pyro.sample("y", dist.Normal(level + slope * obs["x"], 1.0), obs=obs.get("y"))

    rows = {"x": torch.zeros(10_000), "y": torch.ones(10_000)}
    data, algorithm = (
        bf.Federation.from_arrays({"a": rows, "b": rows}),
        bf.FOLA(covariance=covariance),
    )
    posterior = bf.fit(program, data, algorithm, rounds=2)
    assert float(posterior.params["global.log_scale"][1].exp()) == pytest.approx(1000, rel=1e-3)
    assert float(posterior.params["global.loc"][1]) == pytest.approx(3.0, abs=1.0)
