"""Tests of networks applied to a batch of weights, and of the model ``Network``."""

import copy

import pyro
import pytest
import torch
from pyro import poutine
from torch import nn
from torch.distributions import LogNormal, Normal
from torch.nn.utils import vector_to_parameters

import bayesfed as bf
from bayesfed import FedABML, models
from bayesfed.elbo import handlers
from bayesfed.functional.networks import apply, check_stateless, flatten
from bayesfed.models.network import WEIGHTS, Network

S, K, B = 2, 3, 4
MODULES = {
    "Linear": (nn.Linear(5, 2), (5,)),
    "Conv2d": (
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)),
        (2, 4, 4),
    ),
    "LayerNorm": (nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 2)), (5,)),
    "GroupNorm": (nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten()), (2, 4, 4)),
}
modules = pytest.mark.parametrize(("module", "shape"), MODULES.values(), ids=list(MODULES))
pytestmark = pytest.mark.usefixtures("float64")


def by_hand(module, vector, x):
    """Call the module itself with the weights written into it."""
    one = copy.deepcopy(module).double()
    vector_to_parameters(vector, one.parameters())
    with torch.no_grad():
        return one(x)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


# -- apply --------------------------------------------------------------------------------------------


@modules
def test_each_draw_and_client_has_weights_of_its_own(module, shape):
    torch.manual_seed(0)
    w, x = torch.randn(S, K, 1, len(flatten(module))), torch.randn(K, B, *shape)
    out = apply(module, w, x)
    assert out.shape[:3] == (S, K, B)
    for s in range(S):
        for k in range(K):
            close(out[s, k], by_hand(module, w[s, k, 0], x[k]))
    close(apply(module, w[0], x), out[0])
    close(apply(module, w[:1], x), out[:1])


@modules
def test_all_clients_may_have_the_same_weights(module, shape):
    torch.manual_seed(0)
    w, x = torch.randn(S, 1, 1, len(flatten(module))), torch.randn(K, B, *shape)
    out = apply(module, w, x)
    assert out.shape[:3] == (S, K, B)
    for s in range(S):
        for k in range(K):
            close(out[s, k], by_hand(module, w[s, 0, 0], x[k]))


@pytest.mark.parametrize("copies", [1, K], ids=["one body", "a body each"])
def test_a_body_is_shared_and_a_head_is_not(copies):
    torch.manual_seed(0)
    module = models.mlp(5, 6, 2)
    head, body = torch.randn(S, K, 1, 14), torch.randn(copies, 1, 36)
    x = torch.randn(K, B, 5)
    out = apply(module, head, x, shared=body, names=["2.weight", "2.bias"])
    for s in range(S):
        for k in range(K):
            whole = torch.cat([body[k % copies, 0], head[s, k, 0]])
            close(out[s, k], by_hand(module, whole, x[k]))


def test_shared_layers_are_replaced_and_restored():
    """A layer in two places, or two layers with one weight: each gets the weights, and the module is unchanged."""
    layer = nn.Linear(3, 3)
    other, head = nn.Linear(3, 3), nn.Linear(3, 2)
    other.weight = layer.weight
    module = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), other, head)
    before = {name: (value, value.clone()) for name, value in module.named_parameters()}
    weights, x = torch.randn(4, 1, flatten(module).numel()), torch.randn(4, 5, 3)
    found = apply(module, weights, x)
    own = copy.deepcopy(module)
    for client in range(4):
        vector_to_parameters(weights[client, 0], own.parameters())
        torch.testing.assert_close(found[client], own(x[client]))
    for name, value in module.named_parameters():
        assert value is before[name][0] and torch.equal(value, before[name][1])


def test_gradients_do_not_cross_clients():
    torch.manual_seed(0)
    w = torch.randn(1, K, 1, 12, requires_grad=True)
    out = apply(nn.Linear(5, 2), w, torch.randn(K, B, 5))
    (grad,) = torch.autograd.grad(out[:, 1].sum(), w)
    assert grad[:, 1].abs().min() > 0
    assert grad[:, [0, 2]].abs().max() == 0


# -- modules that are refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2)),
            "'1' .BatchNorm1d.*GroupNorm or LayerNorm",
        ),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.InstanceNorm2d(2, track_running_stats=True)),
            "buffers",
        ),
        (
            nn.Sequential(nn.Linear(5, 2), nn.Dropout(0.5)),
            "'1' .Dropout.*point estimates too.*set p=0.*hyper_scale",
        ),
        (nn.Dropout2d(0.1), "module Dropout2d draws its own noise"),
    ],
    ids=["BatchNorm", "InstanceNorm", "Dropout", "alone"],
)
def test_state_and_noise_are_refused_with_a_hint(module, message):
    with pytest.raises(ValueError, match=message):
        check_stateless(module)
    with pytest.raises(ValueError, match=message):
        Network(module)


def test_dropout_of_nothing_is_let_through():
    check_stateless(nn.Sequential(nn.Linear(5, 2), nn.Dropout(0.0)))


# -- the model ----------------------------------------------------------------------------------------


def federation(targets):
    torch.manual_seed(1)
    return bf.Federation.from_arrays(
        {f"client {i}": {"x": torch.randn(n, 3), "y": targets(n)} for i, n in enumerate((2, 4))}
    )


def trace_of(model, data, w):
    pyro.clear_param_store()
    given = poutine.condition(model, {WEIGHTS: w})
    trace = poutine.trace(given).get_trace(data)
    trace.compute_log_prob()
    return trace.nodes


def test_normal_likelihood():
    torch.manual_seed(0)
    data = federation(torch.randn)
    model = Network(nn.Linear(3, 1).double(), likelihood="normal", noise=0.5, scale=0.7)
    w = torch.randn(2, 1, 4)
    nodes = trace_of(model, data, w)
    expected = 0.0
    for i in range(2):
        x, y = (data[f][data.owner == i] for f in ("x", "y"))
        expected = expected + Normal(by_hand(model.module, w[i, 0], x)[:, 0], 0.5).log_prob(y).sum()
    close(nodes["y"]["log_prob_sum"], expected)
    prior = Normal(flatten(model.module), 0.7).log_prob(w[:, 0]).sum()
    close(nodes[WEIGHTS]["log_prob_sum"], prior)


def test_categorical_likelihood_with_a_shared_body():
    torch.manual_seed(0)
    data = federation(lambda n: torch.arange(n) % 2)
    module = models.mlp(3, 4, 2).double()
    model = Network(module, local=["2."])
    assert model.names == ("2.weight", "2.bias")
    close(torch.cat([model.shared_start, model.start]), flatten(module))
    w = torch.randn(2, 1, 10)
    nodes = trace_of(model, data, w)
    expected = 0.0
    for i in range(2):
        x, y = (data[f][data.owner == i] for f in ("x", "y"))
        logits = by_hand(module, torch.cat([model.shared_start, w[i, 0]]), x)
        expected = expected - nn.functional.cross_entropy(logits, y, reduction="sum")
    close(nodes["y"]["log_prob_sum"], expected)


def test_without_local_weights_all_clients_have_one_network():
    torch.manual_seed(0)
    data = federation(lambda n: torch.arange(n) % 2)
    module = models.mlp(3, 4, 2).double()
    nodes = trace_of(Network(module, local=()), data, torch.zeros(0))
    assert WEIGHTS not in nodes and "prior.loc" not in nodes
    logits = by_hand(module, flatten(module), data["x"])
    expected = -nn.functional.cross_entropy(logits, data["y"], reduction="sum")
    close(nodes["y"]["log_prob_sum"], expected)


def test_with_a_hyper_prior_global_weights_are_random():
    """m and v are centred at their initial values, log σ likewise, and the client's weights at m."""
    torch.manual_seed(0)
    data = federation(lambda n: torch.arange(n) % 2)
    module = models.mlp(3, 4, 2).double()
    model = Network(module, local=["2."], spread="learnt", scale=0.2, hyper_scale=0.3)
    w = torch.randn(2, 1, 10)
    nodes = trace_of(model, data, w)
    m, s, v = (nodes[name]["value"] for name in ("prior.loc", "prior.scale", "shared"))
    start = flatten(module)
    for name, distribution in {
        "prior.loc": Normal(start[16:], 0.3).log_prob(m),
        "shared": Normal(start[:16], 0.3).log_prob(v),
        "prior.scale": LogNormal(torch.full((10,), 0.2).log(), 0.3).log_prob(s),
        WEIGHTS: Normal(m, s).log_prob(w),
    }.items():
        torch.testing.assert_close(
            nodes[name]["log_prob_sum"], distribution.sum(), rtol=1e-6, atol=0
        )


def test_a_spread_of_the_clients_own():
    data = federation(lambda n: torch.arange(n) % 2)
    model = Network(models.mlp(3, 2).double(), spread="client", scale=0.2)
    rho = torch.tensor([0.1, 3.0]).reshape(2, 1, 1)
    with handlers.Parameters({"prior.rho": rho.log()}, starting=["prior.loc"]):
        prior = poutine.trace(model).get_trace(data).nodes[WEIGHTS]["fn"].base_dist
    close(prior.scale, rho.expand(2, 1, 8))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"local": ["head."]},
            r"local=\['head.'\] is a prefix of no parameter's name; there are 0.weight, 0.bias",
        ),
        ({"spread": "wide"}, "spread is 'wide'"),
        ({"likelihood": "poisson"}, "likelihood is 'poisson'"),
    ],
    ids=["local", "spread", "likelihood"],
)
def test_an_invalid_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Network(models.mlp(3, 4, 2), **settings)


def test_a_label_that_the_network_has_no_output_for():
    data = federation(lambda n: torch.arange(n).sub(1).clamp(min=0))
    with pytest.raises(ValueError, match="client 'client 1', row 3: observed site 'y' is 2"):
        bf.fit(Network(models.mlp(3, 2).double()), data, FedABML(), rounds=1)


# -- the prior's scale ----------------------------------------------------------------------------------


def test_the_longest_prefix_of_a_name_gives_its_scale():
    module = models.mlp(3, 2, 2)
    network = Network(module, scale={"": 0.1, "2.": 0.5, "2.bias": 2.0})
    by_hand = torch.tensor([0.1] * 8 + [0.5] * 4 + [2.0] * 2)
    torch.testing.assert_close(network.scales.double(), by_hand, rtol=1e-6, atol=0)
    learnt = Network(module, spread="learnt", scale={"0": 0.1, "2": 0.5})
    with handlers.Parameters() as seen:
        trace = poutine.trace(learnt).get_trace(
            bf.Federation.from_arrays(
                {"a": {"x": torch.zeros(1, 3), "y": torch.zeros(1).long()}}
            ).batch()
        )
    assert set(seen.seen) == {"prior.loc", "prior.scale"}
    prior = trace.nodes[WEIGHTS]["fn"].base_dist
    torch.testing.assert_close(prior.scale.flatten()[[0, -1]].double(), torch.tensor([0.1, 0.5]))


def test_scales_that_leave_a_weight_out_are_refused():
    with pytest.raises(ValueError, match="no standard deviation for the local weights '0.weight'"):
        Network(models.mlp(3, 2, 2), scale={"2.": 1.0})
    with pytest.raises(ValueError, match="one ρ_i for all weights"):
        Network(models.mlp(3, 2, 2), spread="client", scale={"": 1.0, "2.": 0.1})


def test_rows_that_the_first_layer_does_not_take_are_refused_with_their_shape():
    with pytest.raises(ValueError, match=r"the network Linear does not take rows of shape \(3,\)"):
        apply(nn.Linear(4, 2), torch.zeros(5, 1, 10), torch.ones(5, 7, 3))
    flat = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    size = sum(p.numel() for p in flat.parameters())
    with pytest.raises(ValueError, match=r"the network Sequential .* \(64,\).*nn.Unflatten"):
        apply(flat, torch.zeros(5, 1, size), torch.ones(5, 7, 64))


def test_an_output_that_is_no_tensor_is_refused():
    class Two(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    with pytest.raises(TypeError, match="the network Two returns a tuple"):
        apply(Two(3, 2), torch.zeros(5, 1, 8), torch.ones(5, 7, 3))


def test_a_normal_over_many_weights_says_what_predicts_better():
    data = bf.Federation.from_arrays({"a": {"x": torch.zeros(2, 64), "y": [0, 1]}})
    for units, better in ((20, True), (2, False)):
        model = Network(models.mlp(64, units, 2), hyper_scale=0.3)
        with pytest.warns(UserWarning, match="taken to be independent") as said:
            bf.start(model, data, bf.SFVI(), rounds=1)
        (text,) = (str(w.message) for w in said if "independent" in str(w.message))
        assert ("take FedAvg, FedABML or PFedVEM" in text) == better
