"""Label shares of clients: their posterior, what predictions and personal steps make of it, and what is refused."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.nn.functional import one_hot

import bayesfed as bf
from bayesfed.models import LabelShares, Modulated, Network, mlp, start_subclasses
from bayesfed.models.label_shares import ClientLabels

PRIOR = LabelShares((0.5, 0.3, 0.2), concentration=1.5)


def rows(seed: int, labels: list[int]) -> dict[str, torch.Tensor]:
    y = torch.tensor(labels)
    noise = torch.randn(len(y), 4, generator=torch.Generator().manual_seed(seed))
    return {"x": noise + one_hot(y, 4), "y": y}


@pytest.fixture
def train() -> bf.Federation:
    return bf.Federation.from_arrays(
        {"a": rows(0, [0, 0, 1, 0]), "b": rows(1, [1, 2, 2]), "one": rows(2, [2, 2, 2, 2, 2])}
    )


@pytest.fixture
def test() -> bf.Federation:
    return bf.Federation.from_arrays({n: rows(9, [0, 1, 2, 2, 1, 0]) for n in ("a", "b", "one")})


def network(prior: LabelShares | None, **settings: object) -> Network:
    torch.manual_seed(0)
    return Network(mlp(4, 5, 3), label_shares=prior, **settings)


def fitted(model: object, data: bf.Federation, algorithm: object = None) -> bf.Posterior:
    algorithm = algorithm or bf.FedAvg(personal_steps=0)
    return bf.fit(model, data, algorithm, rounds=3, batch_size=2, progress=False)


def expected(plain: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The closed form: plain probabilities times E[π | counts] / μ, normalised."""
    mean = torch.tensor(PRIOR.mean)
    found = plain * (counts + PRIOR.concentration * mean) / mean
    return found / found.sum(-1, keepdim=True)


def counts_of(federation: bf.Federation, rows: bf.Federation) -> torch.Tensor:
    own = [one_hot(federation.select([n])["y"], 3).sum(0) for n in federation.names]
    return torch.stack(own)[rows.owner]


def test_predictions_are_those_of_the_program_with_explicit_shares() -> None:
    """p(y | x, own labels) by importance sampling of π from its prior, weighted by the labels."""
    labels, z = torch.tensor([[0, 2, 2]]), torch.tensor([[[0.3, -0.2, 0.9]]])
    mean = torch.tensor(PRIOR.mean)
    pi = dist.Dirichlet(PRIOR.concentration * mean).sample((400_000,))
    weight = pi[:, labels[0]].prod(1)
    joint = (weight[:, None] * pi / mean * z[0, 0].softmax(-1)).mean(0)  # p(y, x | own labels)
    fn = ClientLabels(z, PRIOR)
    found = fn.given(fn.evidence(labels, torch.tensor([[True, True, True]])))
    torch.testing.assert_close(found.probs[0, 0], joint / joint.sum(), atol=4e-3, rtol=0)


ALGORITHMS = {
    "FedAvg": (bf.FedAvg(), {}),
    "FedABML": (bf.FedABML(), {"spread": "learnt", "scale": 0.1}),
    "PFedVEM": (bf.PFedVEM(), {"local": ["2."], "spread": "client", "scale": 0.1}),
    "FOLA": (bf.FOLA(), {"spread": "learnt", "scale": 0.1}),
    "PACPFL": (bf.PACPFL(particles=2, draws=2), {"hyper_scale": 0.3}),
    "SFVI": (bf.SFVI(), {"local": ["2."], "hyper_scale": 0.3}),
}


@pytest.mark.filterwarnings("ignore")  # three rounds are few
@pytest.mark.parametrize(
    "name",
    [
        "FedAvg",
        "FedABML",
        "PFedVEM",
        "FOLA",
        "PACPFL",
        pytest.param("SFVI", marks=pytest.mark.slow),
    ],
)
def test_training_is_the_same_and_predictions_are_shifted(
    name: str, train: bf.Federation, test: bf.Federation
) -> None:
    algorithm, settings = ALGORITHMS[name]
    plain, shares = (
        fitted(network(prior, **settings), train, algorithm) for prior in (None, PRIOR)
    )
    if name != "SFVI":  # whose clients keep their variables, and make none anew
        plain, shares = (one.personalize(train, steps=0) for one in (plain, shares))
    for key, value in plain.params.items():
        torch.testing.assert_close(shares.params[key], value)
    found = shares.probabilities(test, centre=True)["y"]
    before = plain.probabilities(test, centre=True)["y"]
    torch.testing.assert_close(found, expected(before, counts_of(train, test)))
    torch.testing.assert_close(shares.probabilities(test, 7)["y"].sum(1), torch.ones(test.rows))


def test_new_clients_are_predicted_from_their_own_labels(
    train: bf.Federation, test: bf.Federation
) -> None:
    plain, shares = (fitted(network(prior), train) for prior in (None, PRIOR))
    new = bf.Federation.from_arrays({"n": rows(5, [1, 1, 1, 0])})
    there = bf.Federation.from_arrays({"n": rows(6, [0, 1, 2])})
    found = shares.personalize(new, steps=0).probabilities(there)["y"]
    before = plain.personalize(new, steps=0).probabilities(there)["y"]
    torch.testing.assert_close(found, expected(before, counts_of(new, there)))


def test_rows_without_labels_do_not_count(train: bf.Federation, test: bf.Federation) -> None:
    floats = bf.Federation({**train.fields, "y": train["y"].double()}, train.offsets, train.names)
    plain, shares = (fitted(network(prior), floats) for prior in (None, PRIOR))
    there = test.select(["a"])
    before = plain.probabilities(there)["y"]
    for labels, counts in (([torch.nan] * 3, [0, 0, 0]), ([torch.nan, 2.0, 2.0], [0, 0, 2])):
        new = {"a": {"x": rows(5, [0, 2, 2])["x"], "y": labels}}
        new = bf.Federation.from_arrays(new, missing="keep")
        found = shares.personalize(new, steps=0).probabilities(there)["y"]
        torch.testing.assert_close(found, expected(before, torch.tensor(counts)))


def test_rows_of_the_fit_have_the_density_given_the_others(train: bf.Federation) -> None:
    shares = fitted(network(PRIOR), train)
    found = shares.log_likelihood(train, 1)["y"][0]
    own = train.select(["b"])
    for row in range(3):
        others = {n: v[torch.arange(3) != row] for n, v in own.fields.items()}
        one = {n: v[[row]] for n, v in own.fields.items()}
        rest = shares.personalize(bf.Federation.from_arrays({"b": others}), steps=0)
        alone = rest.log_likelihood(bf.Federation.from_arrays({"b": one}), 1)["y"]
        torch.testing.assert_close(found[4 + row], alone[0, 0])


def test_shares_that_are_passed_replace_those_of_the_client(
    train: bf.Federation, test: bf.Federation
) -> None:
    plain, shares = (fitted(network(prior), train) for prior in (None, PRIOR))

    def given(values: tuple[float, ...]) -> torch.Tensor:
        passed = torch.tensor(values).expand(test.rows, 3)
        fields = {**test.fields, "shares": passed}
        return shares.probabilities(bf.Federation(fields, test.offsets, test.names))["y"]

    before = plain.probabilities(test)["y"]
    torch.testing.assert_close(given(PRIOR.mean), before)
    ratio = torch.tensor([0.1, 0.9, 0.0]) / torch.tensor(PRIOR.mean)
    found = before * ratio / (before * ratio).sum(1, keepdim=True)
    torch.testing.assert_close(given((0.1, 0.9, 0.0)), found)


def test_personal_steps_keep_the_offset(train: bf.Federation) -> None:
    """One step by autograd on the offset loss, with the weights' prior at its centre."""
    model = network(PRIOR)
    shares = fitted(model, train)
    start = shares.personalize(train, steps=0).local_params["weights.loc"]
    found = shares.personalize(train, steps=1, lr=0.1).local_params["weights.loc"]
    own = train.select(["a"])
    w = start[0, 0].clone().requires_grad_()
    z = model.outputs(w, {"x": own["x"][None]}, None).reshape(4, 3)
    counts = one_hot(own["y"], 3).sum(0)
    loss = -expected(z.softmax(-1), counts)[torch.arange(4), own["y"]].log().mean()
    step = -0.1 * torch.autograd.grad(loss, w)[0]
    torch.testing.assert_close(found[0, 0] - start[0, 0], step, atol=1e-5, rtol=1e-3)


def test_clients_of_one_label_each() -> None:
    data = bf.Federation.from_arrays({str(k): rows(k, [k] * 4) for k in range(3)})
    prior = LabelShares.learn(data)
    found = fitted(network(prior), data).probabilities(data)["y"]
    assert (found.argmax(1) == data["y"]).all()
    assert (found.max(1).values > 0.9).all()
    torch.testing.assert_close(found.sum(1), torch.ones(12))


@pytest.mark.parametrize("concentration", [0.3, 3.0, 30.0])
def test_the_concentration_is_recovered(concentration: float) -> None:
    torch.manual_seed(1)
    pi = dist.Dirichlet(concentration * torch.tensor([0.5, 0.3, 0.2])).sample((1500,))
    y = dist.Categorical(pi).sample((20,)).T
    data = bf.Federation.from_arrays({str(i): {"y": own} for i, own in enumerate(y)})
    found = LabelShares.learn(data)
    assert found.concentration == pytest.approx(concentration, rel=0.15)
    assert found.mean == pytest.approx((0.5, 0.3, 0.2), abs=0.03)


def test_labels_without_clusters_are_shared_by_all() -> None:
    y = torch.arange(3000).reshape(300, 10) * 7 % 3
    data = bf.Federation.from_arrays({str(i): {"y": own} for i, own in enumerate(y)})
    assert LabelShares.learn(data).concentration > 1000


def test_a_program_for_one_client(train: bf.Federation, test: bf.Federation) -> None:
    def model(federation: object, prior: LabelShares | None = PRIOR) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(4, 3), 1.0).to_event(2))
        with federation.clients():
            b = pyro.sample("b", dist.Normal(torch.zeros(3), 1.0).to_event(1))
            with federation.observations() as obs:
                z = obs["x"] @ w + b
                y = dist.Categorical(logits=z) if prior is None else ClientLabels(z, prior)
                pyro.sample("y", y, obs=obs.get("y"))

    plain, shares = (
        bf.fit(m, train, bf.FedABML(), rounds=3, progress=False).personalize(train, steps=0)
        for m in (lambda f: model(f, None), model)
    )
    found = shares.probabilities(test, centre=True)["y"]
    before = plain.probabilities(test, centre=True)["y"]
    torch.testing.assert_close(found, expected(before, counts_of(train, test)))


def test_modulated_networks_have_them_too(train: bf.Federation, test: bf.Federation) -> None:
    model = Modulated(mlp(4, 5, 3), mlp(4, 5), context=5, label_shares=PRIOR)
    posterior = fitted(model, train, bf.CAFeMe())
    torch.testing.assert_close(posterior.probabilities(test, 5)["y"].sum(1), torch.ones(test.rows))


def test_saved_posteriors_need_the_rows_of_the_fit(
    tmp_path: object, train: bf.Federation, test: bf.Federation
) -> None:
    posterior = fitted(network(PRIOR), train)
    posterior.save(tmp_path / "p.safetensors")
    again = bf.Posterior.load(tmp_path / "p.safetensors", network(PRIOR), train)
    assert torch.equal(again.probabilities(test)["y"], posterior.probabilities(test)["y"])
    other = LabelShares(PRIOR.mean, 2 * PRIOR.concentration)
    with pytest.raises(ValueError, match="the likelihood of 'y' has changed"):
        bf.Posterior.load(tmp_path / "p.safetensors", network(other), train)
    with pytest.raises(ValueError, match="need the rows of the fit"):
        bf.Posterior.load(tmp_path / "p.safetensors", network(PRIOR), test, other_rows=True)


def test_a_run_with_other_shares_is_not_continued(tmp_path: object, train: bf.Federation) -> None:
    for prior in (PRIOR, PRIOR):
        bf.fit(network(prior), train, rounds=1, resume=tmp_path / "run", progress=False)
    changed = [LabelShares(PRIOR.mean, 2 * PRIOR.concentration), None]
    changed.append(LabelShares(PRIOR.mean[::-1], PRIOR.concentration))
    for prior in changed:
        with pytest.raises(ValueError, match="another model.*the likelihood of 'y' has changed"):
            bf.fit(network(prior), train, rounds=1, resume=tmp_path / "run", progress=False)


def test_refusals(train: bf.Federation) -> None:
    with pytest.raises(ValueError, match="label_shares, subclasses and clusters are for labels"):
        Network(mlp(4, 1), likelihood="normal", label_shares=PRIOR)
    with pytest.raises(ValueError, match="3 labels, and the network outputs for 5"):
        fitted(Network(mlp(4, 5), label_shares=PRIOR), train)
    with pytest.raises(ValueError, match="client 'b': 2 in field 'y' is no label"):
        LabelShares.learn(train, classes=2)
    with pytest.raises(ValueError, match=r"client 'x': 0\.5 in field 'y' is no label"):
        LabelShares.learn(bf.Federation.from_arrays({"x": {"y": [1.0, 0.5]}}))
    with pytest.raises(ValueError, match="positive and sum to 1"):
        LabelShares((0.5, 0.6), 1.0)
    with pytest.raises(ValueError, match="concentration is 0"):
        LabelShares((0.5, 0.5), 0.0)


def test_the_shares_of_subclasses_are_those_of_variational_em() -> None:
    """One label with two sub-classes: the fixed point of q(ρ) and q(m), solved by iteration in scalar form."""
    torch.manual_seed(3)
    z = 2 * torch.randn(1, 5, 2)
    fn = ClientLabels(z, subclasses=2)
    count = fn.evidence(torch.zeros(1, 5), torch.tensor([[True] * 4 + [False]]))[0, 0]
    first = torch.digamma(0.3 + count[0]) - torch.digamma(0.3 + count[1])
    q = torch.sigmoid(z[0, :4, 0] - z[0, :4, 1] + first)
    torch.testing.assert_close(count, torch.stack([q.sum(), 4 - q.sum()]), atol=1e-3, rtol=0)
    shares = (count + 0.3) / 4.6
    two = ClientLabels(torch.cat([z, z.flip(-1)], -1), subclasses=2)
    found = two.trained(torch.cat([count, torch.zeros(2)])).probs
    joint = torch.stack(
        [(shares * z.exp()).sum(-1), (0.5 * z.exp()).sum(-1)], -1
    )  # of a label without rows the prior's shares
    torch.testing.assert_close(found, joint / joint.sum(-1, keepdim=True))


def test_one_subclass_is_no_subclass(train: bf.Federation, test: bf.Federation) -> None:
    z = torch.randn(1, 4, 3)
    fn = ClientLabels(z, PRIOR, subclasses=1)
    counts = fn.evidence(torch.tensor([[0, 1, 1, 2]]), torch.tensor([[True] * 4]))
    torch.testing.assert_close(fn.given(counts).probs, expected(z.softmax(-1), counts))
    torch.testing.assert_close(fn.trained(counts).probs, z.softmax(-1))


@pytest.mark.filterwarnings("ignore")  # three rounds are few
@pytest.mark.parametrize("name", ALGORITHMS)
def test_subclasses_under_each_algorithm(
    name: str, train: bf.Federation, test: bf.Federation
) -> None:
    algorithm, settings = ALGORITHMS[name]
    torch.manual_seed(0)
    model = Network(mlp(4, 5, 6), label_shares=PRIOR, subclasses=2, **settings)
    if name in ("FOLA", "PACPFL", "SFVI"):
        with pytest.raises(ValueError, match="θ is random: take FedAvg"):
            fitted(model, train, algorithm)
        return
    posterior = fitted(model, train, algorithm)
    for one in (posterior, posterior.personalize(train, steps=2)):
        probabilities = one.probabilities(test, 3)["y"]
        torch.testing.assert_close(probabilities.sum(1), torch.ones(test.rows))
    assert posterior.log_likelihood(train, 3)["y"].isfinite().all()


def test_subclasses_find_what_a_label_means_to_a_client() -> None:
    """Half of the clients have label 0 near −2 and label 1 near 2, the others the reverse."""
    torch.manual_seed(0)
    parts: list[dict[str, dict[str, torch.Tensor]]] = [{}, {}]
    for i in range(20):
        for part, count in zip(parts, (20, 100), strict=True):
            y = torch.arange(count) % 2
            x = (4.0 * y - 2) * (1 - 2 * (i % 2)) + torch.randn(count)
            part[str(i)] = {"x": x[:, None], "y": y}
    train, test = map(bf.Federation.from_arrays, parts)
    module = start_subclasses(mlp(1, 16, 4), train, subclasses=2)
    posterior = bf.fit(
        Network(module, subclasses=2),
        train,
        bf.FedAvg(personal_steps=0),
        rounds=20,
        clients_per_round=0.5,
        batch_size=10,
        progress=False,
    )
    right = posterior.probabilities(test)["y"].argmax(1) == test["y"]
    assert right.double().mean() > 0.95  # of a best one of 0.977; without sub-classes it is 0.5


def test_subclasses_start_apart_and_with_equal_means(train: bf.Federation) -> None:
    torch.manual_seed(0)
    module = mlp(4, 5, 6)
    started = start_subclasses(module, train, subclasses=2, width=3.0)
    torch.testing.assert_close(started[-1].weight, 3 * module[-1].weight)
    z = started(train["x"]).unflatten(-1, (3, 2))
    for k in range(3):
        own = z[train["y"] == k, k].mean(0)
        torch.testing.assert_close(own, torch.zeros(2), atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="no linear layer"):
        start_subclasses(torch.nn.ReLU(), train, subclasses=2)


def test_outputs_are_a_multiple_of_the_subclasses(train: bf.Federation) -> None:
    with pytest.raises(ValueError, match="no multiple of subclasses=2"):
        fitted(Network(mlp(4, 5), subclasses=2), train)


def test_clients_whose_steps_are_too_long_keep_their_own_label_shares(train: bf.Federation) -> None:
    """Alone, and beside others whose steps are not: those of large inputs are taken again, shorter."""
    calm, wild = rows(3, [0, 1, 1]), rows(4, [2, 0, 0, 1])
    wild["x"] = 30 * wild["x"]
    both = bf.Federation.from_arrays({"calm": calm, "wild": wild})
    posterior = fitted(network(PRIOR), train)
    together = posterior.personalize(both, steps=5, lr=0.3).local_params["weights.loc"]
    for place, name in enumerate(both.names):
        alone = posterior.personalize(both.select([name]), steps=5, lr=0.3)
        torch.testing.assert_close(together[place], alone.local_params["weights.loc"][0])
