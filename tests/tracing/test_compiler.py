"""Tests that compiled steps agree with eager ones, and that others run eagerly with a warning."""

from __future__ import annotations

import shutil
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import bayesfed as bf
from bayesfed import models, simulations
from bayesfed.elbo import noise
from bayesfed.tracing import compiler as compiling
from bayesfed.tracing.compiler import Compiler, traceable, using
from bayesfed.tracing.recorder import Recorder
from tests.invariants.cases import small

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="Inductor needs a C++ compiler"
)


@traceable
def descend(w, lr):
    return w - lr * 2 * w


@traceable
def branches(w):
    if float(w.sum()) > 0:
        return w + 1
    return w - 1


@traceable
def draws(w):
    return w + torch.randn(3)


@pytest.fixture
def data():
    torch.manual_seed(0)
    rows = [5, 8, 3, 7]
    offsets = torch.tensor([0, *rows]).cumsum(0)
    fields = {"x": torch.randn(sum(rows), 6), "y": torch.randint(0, 3, (sum(rows),))}
    return bf.Federation(fields, offsets, ["a", "b", "c", "d"])


def regression(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, 0.5))
        with federation.observations() as obs:
            mean = alpha + obs["x"][..., 0]
            pyro.sample("target", dist.Normal(mean, 0.3), obs=obs.get("x")[..., 1])


def network(**settings):
    torch.manual_seed(0)
    return models.Network(models.mlp(6, 5, 3), **settings)


def modulated():
    torch.manual_seed(0)
    return models.Modulated(models.mlp(6, 5, 3), models.mlp(6, 4), context=7)


CASES = {
    "FedABML": lambda: (
        bf.FedABML(local_steps=3, draws=2),
        network(spread="learnt", scale=0.1),
    ),
    "FedAvg": lambda: (bf.FedAvg(local_steps=2), network()),
    "Scaffold": lambda: (bf.Scaffold(local_steps=2), network()),
    "PFedVEM": lambda: (
        small(bf.PFedVEM()),
        network(local=["2."], spread="client", scale=0.1),
    ),
    "FOLA": lambda: (small(bf.FOLA()), network(spread="learnt", scale=0.1)),
    "PACPFL": lambda: (bf.PACPFL(particles=2, draws=3), network(hyper_scale=0.1, scale=0.1)),
    "CAFeMe": lambda: (bf.CAFeMe(inner_steps=1, outer_steps=2), modulated()),
    "SFVI": lambda: (bf.SFVI(local_steps=2, draws=2), regression),
    "SFVIAvg": lambda: (bf.SFVIAvg(local_steps=2, draws=2), regression),
    "PVI": lambda: (bf.PVI(local_steps=2, draws=4), regression),
}


@pytest.fixture
def only_traced(monkeypatch):
    """Skip Inductor, which takes a C++ compiler and more time: run the traced graphs."""
    from bayesfed.tracing import inductor

    monkeypatch.setattr(inductor, "compile_graph", lambda graph, inputs: graph)


def fit(model, data, algorithm, compile="auto", chunk_size=None, **settings):
    execution = bf.Execution(compile=compile, chunk_size=chunk_size)
    return bf.fit(model, data, algorithm, execution=execution, **settings)


def agree(name, data):
    """Compare parameters after two rounds with the same noise, in single precision, to 1e-4 of the largest.

    In double precision they are equal; SFVI's local weights, which are nearly 0 so early, differ by 3e-5 here.
    """
    fits = {}
    for mode in (False, True):
        algorithm, model = CASES[name]()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fits[mode] = fit(
                model, data, algorithm, rounds=2, clients_per_round=3, batch_size=4, compile=mode
            )
    assert "graphs" in fits[True].compiled
    assert fits[False].compiled == ""
    for part in ("params", "local_params"):
        expected, found = (getattr(fits[mode], part) for mode in (False, True))
        for key, value in expected.items():
            size = float(value.abs().max()) + 1e-3
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-4 * size, msg=key)


@needs_compiler
@pytest.mark.parametrize("name", ["FedAvg", pytest.param("SFVI", marks=pytest.mark.slow)])
def test_compiled_and_eager_agree(name, data):
    agree(name, data)


@pytest.mark.parametrize("name", CASES)
def test_traced_and_eager_agree(name, data, only_traced):
    agree(name, data)


def test_gaussian_processes_are_traced(only_traced):
    """GPyTorch's kernels branch on equal inputs, its Cholesky factorisation on failure."""
    train, _ = simulations.polynomials(clients=3, rows=4)
    fits = []
    for mode in (False, True):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = models.GaussianProcess()
            fits.append(fit(model, train, bf.PACPFL(particles=2), rounds=2, compile=mode))
    assert "1 graphs" in fits[1].compiled
    expected, found = (fit.params["particles"] for fit in fits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_chunks_of_traced_clients_sum_to_the_same(data, only_traced):
    """Invariant 2: float64, to 1e-12."""
    fields = {"x": data["x"].double(), "y": data["y"]}
    data = bf.Federation(fields, data.offsets, data.names)
    torch.set_default_dtype(torch.float64)
    try:
        algorithm, model = CASES["FedABML"]()
        whole, chunks = (
            fit(model, data, algorithm, rounds=1, batch_size=4, chunk_size=k, compile=True)
            for k in (None, 2)
        )
    finally:
        torch.set_default_dtype(torch.float32)
    for name, value in whole.params.items():
        torch.testing.assert_close(chunks.params[name], value, rtol=1e-12, atol=1e-12)


@needs_compiler
@pytest.mark.parametrize(("clients", "draws", "shape"), [(3, 2, (7,)), (2, 1, (20_001,))])
def test_compiled_noise_is_the_noise(clients, draws, shape):
    """Odd sizes leave remainders in vectors; the tolerance is single precision's round-off."""
    keys = noise.fold(noise.key(1), torch.arange(clients))[:, None]
    draw = noise.Draw("normal", shape)
    path = noise.word("w"), torch.arange(draws)[:, None, None], 0
    expected = draw(keys, torch.float32, path)
    with using(Compiler(True)) as compiler:
        found = draw(keys, torch.float32, path)
    assert all(compiler.graphs.values())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize(("rows", "inner", "columns"), [(40, 30, 5), (5, 30, 40), (3, 4, 2)])
def test_products_are_rewritten_not_changed(rows, inner, columns):
    @traceable
    def product(a, b):
        return torch.bmm(a, b).mT + 1

    torch.manual_seed(0)
    a, b = torch.randn(6, rows, inner), torch.randn(6, inner, columns)
    with using(Compiler(True)) as compiler:
        found = product(a, b)
    assert all(compiler.graphs.values())
    torch.testing.assert_close(found, product(a, b), rtol=1e-5, atol=1e-5)


@needs_compiler
def test_a_graph_for_every_shape_and_none_for_a_number():
    with using(Compiler(True)) as compiler:
        for size, lr in ((3, 0.25), (3, 0.5), (4, 0.25)):
            assert torch.equal(descend(torch.ones(size), lr), torch.ones(size) * (1 - 2 * lr))
    assert len(compiler.graphs) == 2


@needs_compiler
def test_a_graph_that_was_compiled_before_is_read_from_disk():
    """The graph was compiled by another run, or another process."""
    from torch._dynamo.utils import counters

    from bayesfed.tracing import inductor

    x = torch.arange(6.0)
    for _ in range(2):
        counters.clear()
        recorder = Recorder()
        with recorder.with_inputs([x]):
            y = (x.sigmoid() * 0.1234).sum()
        found = inductor.compile_graph(recorder.graph([y]), [x])
        torch.testing.assert_close(found(x)[0], y)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


def test_arguments_that_were_one_tensor_may_be_two(only_traced):
    """A graph identifies its arguments by position, not by their identity when it was traced."""

    @traceable
    def pull(w, centre):
        return w - 0.5 * (w - centre)

    one = torch.ones(2)
    with using(Compiler(True)) as compiler:
        assert pull(one, one).tolist() == [1, 1]
        assert pull(3 * one, one).tolist() == [2, 2]
    assert len(compiler.graphs) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.nn.functional.one_hot(x.long(), 3) * 0.5,
        lambda x: torch.nn.functional.one_hot(x.long(), num_classes=4),
        lambda x: (x[:, None, None] * torch.ones(2, 3)) @ (x * torch.ones(5, 1, 3))[..., None],
        lambda x: torch.matmul(x * torch.ones(4, 1, 2, 3), x * torch.ones(5, 3, 3)),
        lambda x: (torch.ones(2, 3) @ x).sum() * (torch.ones(4, 3) @ (x * torch.ones(4, 3, 3))),
    ],
)
def test_functions_that_are_replaced_in_recordings_give_the_same(function, only_traced):
    traced = traceable(lambda x: function(x))
    with using(Compiler(True)) as compiler:
        for x in (torch.tensor([0.0, 2.0, 1.0]), torch.tensor([1.0, 1.0, 2.0])):
            found, expected = traced(x), function(x)
            torch.testing.assert_close(found, expected)
    assert all(compiler.graphs.values())


def test_a_category_beyond_the_last_is_an_error_in_a_graph_too(only_traced):
    traced = traceable(lambda x: torch.nn.functional.one_hot(x.long(), 3))
    with using(Compiler(True)) as compiler:
        traced(torch.tensor([0.0, 2.0]))
        assert all(compiler.graphs.values())
        with pytest.raises(RuntimeError, match="index 3 is out of bounds"):
            traced(torch.tensor([0.0, 3.0]))


def test_categories_that_only_numbers_give_run_eagerly(only_traced):
    traced = traceable(lambda x: torch.nn.functional.one_hot(x.long()))
    with using(Compiler(True)), pytest.warns(UserWarning, match="runs eagerly"):
        assert traced(torch.tensor([0.0, 2.0])).tolist() == [[1, 0, 0], [0, 0, 1]]


def test_what_depends_on_numbers_runs_eagerly_and_names_the_line():
    with using(Compiler(True)) as compiler:
        with pytest.warns(
            UserWarning, match=r"branches runs eagerly: test_compiler.py, line \d+.*sum"
        ):
            assert branches(torch.ones(2)).tolist() == [2, 2]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once is enough
            assert branches(-torch.ones(2)).tolist() == [-2, -2]
            branches(torch.ones(3))
    assert not any(compiler.graphs.values())


def test_a_model_with_a_branch_fits(data, only_traced):
    def branching(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients():
            alpha = pyro.sample("alpha", dist.Normal(mu, 0.5))
            with federation.observations() as obs:
                spread = 0.3 if bool((alpha < 100).all()) else 0.4
                pyro.sample("target", dist.Normal(alpha, spread), obs=obs.get("x")[..., 1])

    algorithm = bf.SFVI(local_steps=1, draws=2)
    with pytest.warns(UserWarning, match="runs eagerly: test_compiler.py.*spread") as warned:
        found = fit(branching, data, algorithm, rounds=2, compile=True)
    assert len(warned) == 1  # although other steps fail at the same line
    expected = fit(branching, data, algorithm, rounds=2, compile=False)
    for name, value in expected.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=1e-5, atol=1e-5)


def test_what_draws_numbers_of_its_own_runs_eagerly():
    with (
        using(Compiler(True)),
        pytest.warns(UserWarning, match="draws runs eagerly.*random numbers of its own"),
    ):
        draws(torch.zeros(3))


def test_without_a_compiler_it_runs_eagerly(monkeypatch):
    from bayesfed.tracing import inductor

    def fail(graph, inputs):
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(inductor, "compile_graph", fail)
    with using(Compiler(True)), pytest.warns(UserWarning, match="No working C\\+\\+ compiler"):
        assert descend(torch.ones(1), 0.25).tolist() == [0.5]


def test_wrong_numbers_are_found(monkeypatch):
    from bayesfed.tracing import inductor

    monkeypatch.setattr(inductor, "compile_graph", lambda graph, inputs: lambda *x: [x[0] + 1])
    with using(Compiler(True)), pytest.warns(UserWarning, match="gives other numbers"):
        assert descend(torch.ones(1), 0.25).tolist() == [0.5]


def test_gradients_pass_through_a_step_that_is_not_compiled():
    w = torch.ones(2, requires_grad=True)
    with using(Compiler(True)) as compiler:
        (slope,) = torch.autograd.grad(descend(w, 0.25).sum(), w)
    assert slope.tolist() == [0.5, 0.5]
    assert not compiler.graphs


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_auto_chooses_by_the_work(seconds, data, monkeypatch, only_traced):
    monkeypatch.setattr(compiling, "_COMPILING", seconds)
    monkeypatch.setattr(compiling, "_COMPILING_ONE", 0.0)
    algorithm, model = CASES["FedABML"]()
    posterior = fit(model, data, algorithm, rounds=3, batch_size=4)
    assert posterior.compiled.startswith("compiled" if seconds == 0 else "traced")
    assert "work" in posterior.compiled
    assert "graphs" in posterior.compiled


def test_where_numbers_take_the_time_nothing_is_traced():
    """Two runs make the same choice, because it depends only on counts of operations and bytes."""
    for _ in range(2):
        compiler = Compiler("auto")
        with using(compiler):
            for _ in range(3):
                descend(torch.ones(1000, 1000), 0.1)
        (work,) = compiler._work.values()
        assert 8_000_000 <= work.bytes < 9_000_000
        assert (work.calls, list(compiler.graphs.values())) == (3, [None])


@pytest.mark.parametrize("name", CASES)
def test_runs_that_are_traced_by_themselves_agree(name, data, monkeypatch):
    """Do as ``agree`` with ``"auto"``; the problem is so small that every step is traced."""
    monkeypatch.setattr(compiling, "_BYTES", 1e30)
    fits = {}
    for mode in (False, "auto"):
        algorithm, model = CASES[name]()
        fits[mode] = fit(
            model, data, algorithm, rounds=3, clients_per_round=3, batch_size=4, compile=mode
        )
    assert fits["auto"].compiled.startswith("traced")
    for part in ("params", "local_params"):
        expected, found = (getattr(fits[mode], part) for mode in (False, "auto"))
        for key, value in expected.items():
            size = float(value.abs().max()) + 1e-3
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-4 * size, msg=key)


def test_of_many_shapes_a_few_are_traced():
    with using(Compiler("auto")) as compiler:
        for size in range(1, 8):
            for _ in range(3):
                assert descend(torch.ones(size), 0.25).tolist() == [0.5] * size
    assert len(compiler._work) == compiling.TRACED


def test_a_module_of_the_users_own(data, only_traced):
    """Layers of other kinds are traced too."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            return self.a(x) * torch.sigmoid(self.b(x))

    torch.manual_seed(0)
    model = models.Network(Gated(), scale=0.1)
    algorithm = bf.FedABML(local_steps=1, draws=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(model, data, algorithm, rounds=1, compile=True)


# -- invariants 1 and 3, compiled; 2 holds for any uploads, 4 is in tests/invariants/test_resume.py -------------


@needs_compiler
def test_terms_add_up_to_pyros_elbo_compiled(float64):
    from bayesfed.elbo.elbo import client_terms, server_pass
    from bayesfed.guides.locals import Conditioned
    from tests.invariants.test_partition import make_federation, make_model, pooled_elbo

    federation = make_federation([3, 1, 4], "Normal", 0)
    model = make_model(["real", "positive"], ["real", "positive"], "Normal")
    program = Conditioned(True).build(bf.FullRank(), model, federation)
    params = program.init | program.init_locals(federation.batch())
    key, draws = noise.key(0), 3
    theirs = program.noise(key, draws, local=False)
    ours = program.noise(noise.fold(key, federation.stream_ids), draws, local=True)

    @traceable
    def terms(program, params, theirs, ours, batch, draws):
        shared = {name: params[name] for name in program.init}
        server, _, values = server_pass(program, shared, theirs, draws)
        return server, client_terms(program, params, values, batch, ours, draws)

    with using(Compiler(True)) as compiler:
        server, clients = terms(program, params, theirs, ours, federation.batch(), draws)
    assert len(compiler.graphs) == 1
    assert None not in compiler.graphs.values()
    expected = pooled_elbo(program, federation, params, theirs | ours, draws)
    found = (server + clients.sum(1)).mean()
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-9)


@pytest.mark.parametrize("name", ["FedABML", "PFedVEM", "SFVI"])
def test_chunks_change_nothing_compiled(name, data, only_traced, float64):
    algorithm, model = CASES[name]()
    settings = {"rounds": 2, "clients_per_round": 4, "batch_size": 4, "compile": True}
    data = data.to(dtype=torch.float64)
    whole = fit(model, data, algorithm, **settings)
    parts = fit(model, data, algorithm, chunk_size=3, **settings)
    assert "graphs" in parts.compiled
    for part in ("params", "local_params"):
        for key, value in getattr(whole, part).items():
            found = getattr(parts, part)[key]
            torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-9)
