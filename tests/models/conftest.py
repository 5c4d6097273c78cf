"""Fixtures and checks for the tests of all models."""

from collections.abc import Callable, Iterator, Mapping

import pyro
import pytest
import torch
from pyro import poutine
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation, Model

Shapes = Mapping[str, tuple[int, ...]]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Use double precision and a fixed seed, and restore the default afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(0)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def ragged() -> Federation:
    """Return clients with 4, 1 and 2 rows; ``y`` is in every model's support."""
    rows = {"north": 4, "middle": 1, "south": 2}
    return Federation.from_arrays(
        {
            name: {
                "x": torch.randn(n, 2),
                "y": torch.arange(n) % 2.0,
                "sigma": 0.5 + torch.rand(n),
                "exposure": 0.5 + torch.rand(n),
                "time": 0.1 + torch.rand(n),
                "event": torch.arange(n) % 2.0,
            }
            for name, n in rows.items()
        }
    )


@pytest.fixture
def check_sites(ragged: Federation) -> Callable[..., None]:
    """Check that the sample sites are those named, with these event shapes, inside and outside the clients plate."""

    def check(model: Model, global_sites: Shapes, local_sites: Shapes, outcome: str = "y") -> None:
        two = ragged.batch(torch.tensor([2, 0]), torch.tensor([[1, 0, -1], [0, 3, 2]]))
        for data, k, b in [(ragged, 3, 4), (two, 2, 3), (two.drop(outcome), 2, 3)]:
            trace = poutine.trace(model).get_trace(data)
            sites = {
                name: node
                for name, node in trace.nodes.items()
                if node["type"] == "sample" and name not in ("clients", "observations")
            }
            assert list(sites) == [*global_sites, *local_sites, outcome]
            for name, shape in global_sites.items():
                assert sites[name]["cond_indep_stack"] == ()
                assert sites[name]["value"].shape == shape
            for name, shape in local_sites.items():
                assert [f.name for f in sites[name]["cond_indep_stack"]] == ["clients"]
                assert sites[name]["value"].shape == (k, 1, *shape)
            seen = sites[outcome]
            assert {f.name for f in seen["cond_indep_stack"]} == {"clients", "observations"}
            assert seen["value"].shape == (k, b)
            assert seen["is_observed"] == (outcome in data.fields)

    return check


@pytest.fixture
def check_draws(ragged: Federation) -> Callable[..., None]:
    """Check that three draws at once have the log densities of three runs."""

    def check(model: Model, outcome: str = "y") -> None:
        minibatch = ragged.batch(torch.tensor([2, 0]), torch.tensor([[1, -1], [0, 3]]))
        for data in (ragged, minibatch):
            runs = [poutine.trace(model).get_trace(data) for _ in range(3)]
            values = {}
            for name in runs[0].stochastic_nodes:
                if name in ("clients", "observations"):
                    continue
                stacked = torch.stack([run.nodes[name]["value"] for run in runs])
                if not runs[0].nodes[name]["cond_indep_stack"]:  # global: (3, 1, 1, *event)
                    stacked = stacked[:, None, None]
                values[name] = stacked
            together = poutine.trace(three(model, poutine.condition, data=values)).get_trace(data)
            together.compute_log_prob()
            for i, run in enumerate(runs):
                run.compute_log_prob()
                for name in [*values, outcome]:
                    torch.testing.assert_close(
                        together.nodes[name]["log_prob"][i],
                        run.nodes[name]["log_prob"].expand(
                            together.nodes[name]["log_prob"][i].shape
                        ),
                        rtol=1e-12,
                        atol=1e-12,
                    )
        # and three prior draws of everything, y too
        drawn = poutine.trace(three(model)).get_trace(minibatch.drop(outcome))
        assert drawn.nodes[outcome]["value"].shape == (3, 2, 2)

    return check


def three(model: Model, handler: Callable[..., Model] | None = None, **kwargs: object) -> Model:
    """Run the model under a leading plate of three, and under a handler."""

    def run(data: Federation | Batch) -> None:
        with pyro.plate("draws", 3, dim=-3):
            model(data)

    return handler(run, **kwargs) if handler else run


@pytest.fixture
def log_joint() -> Callable[[Model, Federation, Mapping[str, Tensor]], float]:
    """Return Pyro's log joint density at the given values; local ones have one row per client."""

    def evaluate(model: Model, federation: Federation, values: Mapping[str, Tensor]) -> float:
        trace = poutine.trace(poutine.condition(model, data=dict(values))).get_trace(federation)
        left = [n for n in trace.stochastic_nodes if n not in ("clients", "observations")]
        assert not left, f"no value was given for {left}"
        return float(trace.log_prob_sum())

    return evaluate
