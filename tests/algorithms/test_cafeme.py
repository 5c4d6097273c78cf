"""CAFeMe against the paper's formulas, written out in plain torch."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear, one_hot

import bayesfed as bf
from bayesfed import CAFeMe, datasets, models
from bayesfed.data.minibatches import Minibatches
from bayesfed.elbo import noise
from bayesfed.models import Modulated, mlp
from bayesfed.rules import Turn
from bayesfed.steps.job import Job
from bayesfed.steps.through_steps import ThroughContext, draw_rows, split
from tests.scenarios import summed

float64 = pytest.mark.usefixtures("float64")


def small(**settings):
    torch.manual_seed(0)
    return Modulated(mlp(3, 4, 5, 2), mlp(3, 3), context=3, **settings)


def federation(*lengths):
    torch.manual_seed(1)
    return bf.Federation.from_arrays(
        {
            f"client {i}": {"x": torch.randn(n, 3), "y": (torch.arange(n) + i) % 2}
            for i, n in enumerate(lengths)
        }
    )


def whole(data):
    return Minibatches(lambda step: data.batch(), data.lengths, int(data.lengths.max()))


def keys_of(data):
    return noise.fold(noise.key(3), data.stream_ids)


def update(algorithm, program, theta, data, keys=None):
    """Uploads and terms of all clients, from this θ."""
    keys = keys_of(data) if keys is None else keys
    answer = algorithm.work(Job(program, {"theta": theta}, {}, whole(data), keys))
    return answer.upload, answer.terms


# -- by hand, for one client --------------------------------------------------------------------------


def layers(vector, *shapes):
    """Weights and biases of linear layers, in order, from one vector."""
    for before, after in shapes:
        weight, bias, vector = vector.split(
            [before * after, after, len(vector) - (before + 1) * after]
        )
        yield weight.reshape(after, before), bias
    assert not len(vector)


def logits_by_hand(psi, gates, x):
    """Eq. 4.4 in both hidden layers of a 3-4-5-2 network."""
    first, second, head = layers(psi, (3, 4), (4, 5), (5, 2))
    x = linear(x, *first).relu() * gates[:4].sigmoid()
    x = linear(x, *second).relu() * gates[4:].sigmoid()
    return linear(x, *head)


def gates_by_hand(mu, x, y):
    """Section 4.1, with contexts of three numbers."""
    of_x, row1, row2, out1, out2 = layers(mu, (3, 3), (5, 3), (3, 3), (3, 3), (3, 9))
    rows = torch.cat([linear(x, *of_x).relu(), one_hot(y, 2)], 1)
    context = linear(linear(rows, *row1).relu(), *row2).mean(0)
    return linear(linear(context, *out1).relu(), *out2)


def loss_by_hand(model, omega, rows, context):
    psi, mu = omega[: model.base_size], omega[model.base_size :]
    return cross_entropy(logits_by_hand(psi, gates_by_hand(mu, *context), rows[0]), rows[1])


@float64
def test_units_are_multiplied_by_the_sigmoids_of_their_gates():
    model, data = small(), federation(6)
    gates = torch.randn(1, 1, model.gates_size)
    out = model.outputs(model.start[None, None], gates, data["x"][None])
    by_hand = logits_by_hand(model.start[: model.base_size], gates[0, 0], data["x"])
    torch.testing.assert_close(out[0], by_hand, rtol=1e-12, atol=1e-12)


@float64
def test_film_scales_and_shifts():
    torch.manual_seed(0)
    model, data = Modulated(mlp(3, 4, 2), mlp(3, 3), context=3, film=True), federation(6)
    gates = torch.randn(1, 1, 8)
    first, head = layers(model.start[: model.base_size], (3, 4), (4, 2))
    scale, shift = gates[0, 0].chunk(2)
    by_hand = linear((1 + scale) * linear(data["x"], *first).relu() + shift, *head)
    out = model.outputs(model.start[None, None], gates, data["x"][None])
    torch.testing.assert_close(out[0], by_hand, rtol=1e-12, atol=1e-12)


@float64
def test_a_gate_multiplies_the_whole_map_of_its_channel():
    torch.manual_seed(0)
    cnn = models.cnn((1, 4, 4), 2, channels=(3, 5), hidden=6)
    model = Modulated(cnn, models.mlp(16, 4), context=3)
    assert model.gates_size == 3 + 5 + 6
    gates, x = torch.randn(1, 1, 14), torch.randn(7, 16)
    flat, unflat, conv1, _, pool, conv2, _, _, flatten, hidden, _, head = cnn
    zeta = gates.flatten().sigmoid()
    out = pool(conv1(unflat(flat(x))).relu() * zeta[:3, None, None])
    out = pool(conv2(out).relu() * zeta[3:8, None, None])
    by_hand = head(hidden(flatten(out)).relu() * zeta[8:])
    torch.testing.assert_close(
        model.outputs(model.start[None, None], gates, x[None])[0], by_hand, rtol=1e-12, atol=1e-12
    )


@float64
def test_clients_and_draws_have_networks_of_their_own():
    model = small()
    w = torch.randn(3, 4, 1, model.size)
    gates = torch.randn(3, 4, 1, model.gates_size)
    x = torch.randn(4, 6, 3)
    out = model.outputs(w, gates, x)
    assert out.shape == (3, 4, 6, 2)
    for s in range(3):
        for k in range(4):
            one = logits_by_hand(w[s, k, 0, : model.base_size], gates[s, k, 0], x[k])
            torch.testing.assert_close(out[s, k], one, rtol=1e-12, atol=1e-12)


@float64
def test_the_context_knows_neither_order_nor_padding():
    model, data = small(), federation(6)
    w, x, y = model.start[None, None], data["x"][None], data["y"][None]
    everything = torch.ones(1, 6, dtype=torch.bool)
    gates = model.gates(w, x, y, everything)
    by_hand = gates_by_hand(model.start[model.base_size :], data["x"], data["y"])
    torch.testing.assert_close(gates[0, 0], by_hand, rtol=1e-12, atol=1e-12)
    order = torch.randperm(6)
    padded = torch.cat([x[:, order], 10 * torch.randn(1, 3, 3)], 1)
    labels = torch.cat([y[:, order], torch.ones(1, 3, dtype=torch.int64)], 1)
    again = model.gates(w, padded, labels, torch.arange(9)[None] < 6)
    torch.testing.assert_close(again, gates, rtol=0, atol=1e-12)
    other = model.gates(w, x, 1 - y, everything)  # but the labels matter
    assert (other - gates).abs().max() > 1e-3


@float64
@pytest.mark.parametrize("second_order", [True, False])
@pytest.mark.parametrize("steps", [1, 3])
def test_an_update_is_a_step_through_the_inner_steps(second_order, steps):
    model, data = small(), federation(7)
    algorithm = CAFeMe(inner_lr=0.7, lr=0.3, inner_steps=steps, second_order=second_order)
    program, keys = algorithm.program(model, data), keys_of(data)
    personal, held_out = split(data.batch(), data.lengths, 0.5, keys)
    support, query = ((part.fields["x"][0], part.fields["y"][0]) for part in (personal, held_out))

    omega = model.start.clone().requires_grad_()
    inner = omega
    for _ in range(steps):
        loss = loss_by_hand(model, inner, support, support)
        (grad,) = torch.autograd.grad(loss, inner, create_graph=True)
        inner = inner - 0.7 * (grad if second_order else grad.detach())
    (grad,) = torch.autograd.grad(loss_by_hand(model, inner, query, support), omega)

    message = {"prior.loc": model.start}
    upload, term = update(algorithm, program, message, data)
    torch.testing.assert_close(upload["theta"]["prior.loc"][0], -0.3 * grad, rtol=0, atol=1e-10)
    assert (0.3 * grad).abs().max() > 1e-3
    torch.testing.assert_close(
        -term[0] / 7, loss_by_hand(model, inner, query, support).detach(), rtol=0, atol=1e-10
    )


@float64
def test_the_two_orders_differ():
    model, data = small(), federation(7)
    found = []
    for second_order in (True, False):
        algorithm = CAFeMe(inner_lr=0.7, second_order=second_order)
        program = algorithm.program(model, data)
        message = {"prior.loc": model.start}
        upload, _ = update(algorithm, program, message, data)
        found.append(upload["theta"]["prior.loc"])
    assert (found[0] - found[1]).abs().max() > 1e-4


# -- the rows -----------------------------------------------------------------------------------------


def rows_of(batch, client):
    """What a client has in a batch, padding left out."""
    return list(map(tuple, batch.fields["x"][client, batch.mask[client]].tolist()))


@pytest.mark.parametrize("share", [0.01, 0.5, 0.7, 0.99])
def test_the_two_sets_are_disjoint_and_all_there_is(share):
    data = federation(2, 3, 7, 40)
    batch = data.batch()
    personal, held_out = split(batch, data.lengths, share, keys_of(data))
    for client, name in enumerate(data.names):
        dealt = rows_of(personal, client) + rows_of(held_out, client)
        assert sorted(dealt) == sorted(map(tuple, data.select([name])["x"].tolist()))
    for part in (personal, held_out):
        assert (part.mask.sum(1) >= 1).all()
        torch.testing.assert_close(
            part.scale[:, 0] * part.mask.sum(1), data.lengths.to(part.scale.dtype)
        )
    assert abs(int(personal.mask[3].sum()) - 40 * share) <= 1
    again, _ = split(batch, data.lengths, share, noise.fold(keys_of(data), 1))
    assert share != 0.5 or rows_of(again, 3) != rows_of(personal, 3)
    alone = data.select(["client 2"])
    apart, _ = split(alone.batch(), alone.lengths, share, keys_of(alone))
    assert rows_of(apart, 0) == rows_of(personal, 2)


def test_support_rows_are_some_of_those_that_may_be():
    mask = torch.rand(5, 20) < 0.5
    mask[0, :2] = True
    some = draw_rows(noise.fold(noise.key(0), torch.arange(5)), mask, 4)
    assert not (some & ~mask).any()
    assert torch.equal(some.sum(1), mask.sum(1).clamp(max=4))


def test_every_inner_step_has_support_of_its_own():
    """Of 20 rows, 16 of which are D_pers; twelve single rows of 16 are one and the same once in 10^13 trials."""
    seen = []

    @dataclass(frozen=True)
    class Watched(ThroughContext):
        def support(self, batch, keys, step):
            found = super().support(batch, keys, step)
            seen.append(found.fields["x"][found.mask])
            return found

    model, data = small(), federation(20)
    steps = Watched(support_rows=1, personal_fraction=0.8, inner_steps=12, steps=2)
    algorithm = CAFeMe().replace(steps=steps)
    program = algorithm.program(model, data)
    job = Job(program, algorithm.start(program), {}, whole(data), keys_of(data))
    for visit, calls in ((algorithm.work, 2), (lambda job: algorithm.personalize(job, 12), 1)):
        seen.clear()
        visit(job)
        assert len(seen) == 12 * calls
        for call in range(calls):
            rows = torch.stack(seen[12 * call : 12 * call + 12])
            assert rows.shape == (12, 1, 3) and len(rows.unique(dim=0)) > 1


@pytest.mark.slow
@float64
@pytest.mark.parametrize("support_rows", [None, 2])
def test_a_client_does_the_same_alone_and_in_a_cohort(support_rows):
    model, data = small(), federation(2, 3, 7, 12)
    algorithm = CAFeMe(support_rows=support_rows, outer_steps=2, personal_steps=3)
    fits = [
        bf.fit(model, data, algorithm, rounds=2, execution=bf.Execution(chunk_size=size))
        for size in (None, 1)
    ]
    for together, alone in (
        (fits[0].params, fits[1].params),
        (fits[0].local_params, fits[1].local_params),
    ):
        for name, value in together.items():
            torch.testing.assert_close(value, alone[name], rtol=0, atol=1e-12)


# -- what comes out -----------------------------------------------------------------------------------


@float64
def test_the_server_takes_the_mean():
    model, data = small(), federation(2, 6)
    keys = keys_of(data)
    for weighted, weight in ((False, [0.5, 0.5]), (True, [0.25, 0.75])):
        algorithm = CAFeMe(weighted=weighted)
        program = algorithm.program(model, data)
        server = algorithm.start(program)
        upload, _ = update(algorithm, program, server["theta"], data)
        after, _ = algorithm.decode(Turn(program, keys[0], 2), server, summed(upload))
        own = upload["theta"]["prior.loc"] / (
            upload["weight"]["rows"][:, None] if weighted else 1.0
        )
        expected = server["theta"]["prior.loc"] + torch.tensor(weight) @ own
        torch.testing.assert_close(after["theta"]["prior.loc"], expected, rtol=0, atol=1e-12)


@float64
def test_gates_are_those_of_the_labelled_rows_and_predictions_ignore_each_other():
    model, data = small(), federation(5, 7)
    posterior = bf.fit(model, data, CAFeMe(), rounds=1, progress=False)
    w, gates = posterior.local_params["weights.loc"], posterior.local_params["gates.loc"]
    batch = data.batch()
    made = model.gates(w, batch.fields["x"], batch.fields["y"], batch.mask)
    torch.testing.assert_close(gates, made, rtol=0, atol=1e-12)
    test = federation(9, 9)
    few = bf.Federation.from_arrays(
        {name: {"x": test["x"][i : i + 1], "y": test["y"][i : i + 1]}
         for name, i in (("client 0", 4), ("client 1", 15))}
    )  # fmt: skip
    every = posterior.log_likelihood(test, 1)["y"][:, [4, 15]]
    torch.testing.assert_close(posterior.log_likelihood(few, 1)["y"], every, rtol=0, atol=1e-12)


@float64
def test_a_client_personalises_at_the_inner_rate():
    model, data = small(), federation(5)
    fitted = bf.fit(model, data, CAFeMe(inner_lr=0.7, lr=0.1), rounds=1, progress=False)
    one = fitted.personalize(data, steps=1).local_params["weights.loc"][0, 0]
    omega = fitted.params["prior.loc"].clone().requires_grad_()
    rows = data["x"], data["y"]
    (grad,) = torch.autograd.grad(loss_by_hand(model, omega, rows, rows), omega)
    torch.testing.assert_close(one, (omega - 0.7 * grad).detach(), rtol=0, atol=1e-12)
    slow = fitted.personalize(data, steps=1, lr=0.2).local_params["weights.loc"][0, 0]
    torch.testing.assert_close(slow, (omega - 0.2 * grad).detach(), rtol=0, atol=1e-12)


def accuracy(posterior, federation):
    """Of the most probable class; the log-likelihoods of all ten labels are its log-probabilities."""
    scores = [
        posterior.log_likelihood(
            replace(
                federation,
                fields={**federation.fields, "y": torch.full_like(federation["y"], label)},
            ),
            1,
        )["y"][0]
        for label in range(10)
    ]
    return float((torch.stack(scores, 1).argmax(1) == federation["y"]).double().mean())


def test_it_learns_to_learn_digits():
    """Five steps from the learnt ω against five from its start; 0.955 and 0.42 when this was written."""
    train, test = datasets.digits()
    torch.manual_seed(0)
    model = Modulated(mlp(64, 32, 10), mlp(64, 32), context=32)
    posterior = bf.fit(
        model,
        train,
        CAFeMe(inner_lr=0.5, lr=0.5, personal_steps=5),
        rounds=30,
        clients_per_round=0.5,
        progress=False,
    )
    before = replace(posterior, params=posterior.program.init).personalize(train)
    assert accuracy(posterior, test) > 0.9
    assert accuracy(posterior, test) > accuracy(before, test) + 0.3


@pytest.mark.parametrize("hyper_scale", [None, 0.3])
@pytest.mark.parametrize("name", ["FedAvg", "FedABML", "SFVI"])
@pytest.mark.filterwarnings("ignore:the 143 global dimensions")
def test_to_other_algorithms_gates_are_variables_of_the_client(name, hyper_scale):
    data = federation(4, 5)
    posterior = bf.fit(small(hyper_scale=hyper_scale), data, getattr(bf, name)(), rounds=1)
    draws = posterior.sample(3)
    assert draws["gates"].shape == (3, 2, 9)
    assert draws["gates"].isfinite().all()
    assert ("prior.loc" in draws) == (hyper_scale is not None)


# -- what it refuses ----------------------------------------------------------------------------------


def test_messages():
    with pytest.raises(ValueError, match="personal_fraction is 1.0"):
        CAFeMe(personal_fraction=1.0)
    with pytest.raises(ValueError, match="no hidden layer to modulate"):
        Modulated(mlp(3, 2), mlp(3, 2))
    with pytest.raises(
        ValueError, match=r"local variable \('weights'\) has an encoder.*PerFedAvg adapt"
    ):
        bf.fit(models.Network(nn.Linear(3, 2)), federation(3), CAFeMe(), rounds=1)
    with pytest.raises(ValueError, match="'client 1' has a single row"):
        CAFeMe().program(small(), federation(3, 1))
