"""Ditto as it ships against Algorithm 1 of Li et al. 2021, client by client in plain torch."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import bayesfed as bf
from bayesfed import Ditto, datasets, models

pytestmark = pytest.mark.usefixtures("float64")


def federation():
    generator = torch.Generator().manual_seed(1)
    return bf.Federation.from_arrays(
        {
            f"client {i}": {
                "x": torch.randn(n, 3, generator=generator),
                "y": torch.randint(0, 2, (n,), generator=generator),
            }
            for i, n in enumerate((12, 5, 31, 8))
        }
    )


def network(**settings):
    torch.manual_seed(0)
    return models.Network(models.mlp(3, 2), **settings)


def gradient(w, x, y):
    """Of the mean loss of a logistic regression 3-2."""
    w = w.detach().requires_grad_()
    loss = cross_entropy(x @ w[:6].reshape(2, 3).T + w[6:], y)
    return torch.autograd.grad(loss, w)[0]


@pytest.mark.parametrize(
    "algorithm",
    [Ditto(), Ditto(lam=2.0, lr=0.05)],
    ids=["ships", "strong"],
)
@pytest.mark.parametrize("clients_per_round", [1.0, 2])
@pytest.mark.parametrize("spread", ["fixed", "client"])
def test_against_algorithm_1(algorithm, clients_per_round, spread):
    """w ← mean of SGD from w;  v_k ← v_k − η (∇F_k(v_k) + λ (v_k − w)), of those selected."""
    data, model = federation(), network(spread=spread)
    cohorts, settings = [], Ditto.values(algorithm)
    posterior = bf.fit(
        model,
        data,
        algorithm,
        rounds=3,
        clients_per_round=clients_per_round,
        callbacks=[lambda report: cohorts.append(list(report.cohort))],
    )
    w = model.start.clone()
    v = {}  # each starts at the w that its client is sent first
    for cohort in cohorts:
        ends = {}
        for name in cohort:
            one, own = data.select([name]), w.clone()
            v[name] = v.get(name, w)
            for _ in range(settings["local_epochs"]):
                own = own - settings["lr"] * gradient(own, one["x"], one["y"])
                pull = settings["lam"] * (v[name] - w)
                v[name] = v[name] - settings["lr"] * (gradient(v[name], one["x"], one["y"]) + pull)
            ends[name] = own
        counts = {name: len(data.select([name])["y"]) for name in cohort}
        w = sum(counts[name] * end for name, end in ends.items()) / sum(counts.values())
    torch.testing.assert_close(posterior.params["prior.loc"], w)
    own = posterior.sample(1)["weights"][0]
    # the others make theirs from w in the end
    took_part = sorted({data.names.index(name) for cohort in cohorts for name in cohort})
    expected = torch.stack([v[data.names[i]] for i in took_part])
    torch.testing.assert_close(own[took_part], expected)


def test_the_common_network_is_that_of_fed_avg():
    data, model = federation(), network()
    ditto = bf.fit(model, data, Ditto(lam=3.0), rounds=3, batch_size=4)
    plain = bf.fit(model, data, bf.FedAvg(), rounds=3, batch_size=4)
    assert torch.equal(ditto.params["prior.loc"], plain.params["prior.loc"])


def test_a_new_client_is_drawn_to_the_common_network():
    data, model, algorithm = federation(), network(), Ditto(lam=0.5)
    posterior = bf.fit(model, data, algorithm, rounds=2)
    new = posterior.personalize(data, steps=4, lr=0.2)
    w = posterior.params["prior.loc"]
    for i, name in enumerate(data.names):
        one, v = data.select([name]), w
        for _ in range(4):
            v = v - 0.2 * (gradient(v, one["x"], one["y"]) + 0.5 * (v - w))
        torch.testing.assert_close(new.sample(1)["weights"][0, i], v)


def test_a_model_without_personal_variables_is_refused():
    with pytest.raises(ValueError, match="the model samples none: use FedAvg"):
        bf.fit(network(local=()), federation(), Ditto(), rounds=1)


def test_runs_on_a_hierarchy():
    """Levels lie between the common one and each client's own, nearer to the latter where λ is small."""
    frame = {
        f"client {i}": {"x": torch.zeros(5, 1), "y": torch.full((5,), 1.0 * i)} for i in range(3)
    }
    data = bf.Federation.from_arrays(frame)
    gaps = []
    for lam in (0.01, 10.0):
        posterior = bf.fit(models.varying_intercept, data, Ditto(lam=lam, lr=0.02), rounds=100)
        draws = posterior.sample(1)
        gap = draws["alpha"][0] - draws["mu"]
        assert gap[0] < 0 < gap[2]
        gaps.append(float(gap.abs().mean()))
    assert gaps[0] > 2 * gaps[1]


@pytest.mark.parametrize("local", ["all", ["2."]])
def test_defaults_learn_digits(local):
    torch.set_default_dtype(torch.float32)
    train, test = datasets.digits(clients=8)
    torch.manual_seed(0)
    sizes = (64, 10) if local == "all" else (64, 32, 10)
    model = models.Network(models.mlp(*sizes), local=local)
    posterior = bf.fit(model, train, Ditto(), rounds=20, batch_size=10)
    right = posterior.probabilities(test)["y"].argmax(1) == test["y"]
    assert right.float().mean() > 0.94


def test_a_first_visit_starts_at_the_theta_that_was_sent():
    """Of two clients the one that comes second starts its own network at the common one that the first has left."""
    data = federation().select(["client 0", "client 1"])
    model, cohorts, sent = network(), [], [network().start.clone()]

    def note(report):
        cohorts.append(report.cohort[0])
        sent.append(report.params["prior.loc"].clone())

    algorithm = Ditto(local_epochs=1, lam=0.5, lr=0.05)
    run = bf.start(model, data, algorithm, rounds=2, clients_per_round=1)
    for _ in range(2):
        note(bf.step(run))
    second = data.select([cohorts[1]])
    w = sent[1]
    expected = w - 0.05 * gradient(w, second["x"], second["y"])
    own = run.clients.tensors["params"]["weights.loc"][data.names.index(cohorts[1])]
    torch.testing.assert_close(own.squeeze(), expected)
