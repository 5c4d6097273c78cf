import json

import pyro
import pyro.distributions as dist
import pytest
import torch
from safetensors.torch import load_file, save_file

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.engine import files


def schools(dtype=torch.float32):
    return datasets.eight_schools().to(dtype=dtype)


def fitted(algorithm=None, dtype=torch.float32, model=models.eight_schools):
    algorithm = bf.SFVI(local_steps=2) if algorithm is None else algorithm
    return bf.fit(model, schools(dtype), algorithm, rounds=3, seed=4)


def equal(left, right):
    assert set(left) == set(right)
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert torch.equal(left[name], right[name]), name


def guide_of_ones_own(federation):
    loc = pyro.param("loc", torch.tensor(0.0))
    pyro.sample("mu", dist.Normal(loc, 1.0))
    pyro.sample("tau", dist.LogNormal(loc, 1.0))
    with federation.clients():
        rows = pyro.param("rows", torch.zeros(len(federation), 1))
        pyro.sample("theta", dist.Normal(rows, 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "algorithm",
    [
        bf.SFVI(local_steps=2),
        bf.SFVI(local_steps=2, global_guide=bf.MeanField(0.2), conditioned=False),
        bf.PVI(local_steps=2),
    ],
    ids=["full rank", "mean field", "PVI"],
)
def test_the_loaded_posterior_is_the_saved_one(tmp_path, algorithm, dtype):
    posterior = fitted(algorithm, dtype)
    path = tmp_path / "posterior.safetensors"
    posterior.save(path)
    loaded = bf.Posterior.load(path, models.eight_schools, schools(dtype))
    equal(loaded.sample(20), posterior.sample(20))
    equal(loaded.predict(num_samples=20), posterior.predict(num_samples=20))
    equal(loaded.params, posterior.params)
    equal(loaded.local_params, posterior.local_params)
    equal(loaded.history, posterior.history)
    assert loaded.algorithm == posterior.algorithm
    assert (loaded.seed, loaded.federation.names) == (4, posterior.federation.names)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_flow_is_saved_and_loaded(tmp_path):
    posterior = fitted(bf.SFVI(local_steps=1, global_guide=bf.Flow(bins=4)))
    posterior.save(tmp_path / "p")
    loaded = bf.Posterior.load(tmp_path / "p", models.eight_schools, schools())
    equal(loaded.sample(20), posterior.sample(20))


def test_clients_are_matched_by_name(tmp_path):
    posterior = fitted()
    posterior.save(tmp_path / "p")
    some = schools().select(["F", "A", "C"])
    loaded = bf.Posterior.load(tmp_path / "p", models.eight_schools, some)
    theta, full = loaded.sample(20)["theta"], posterior.sample(20)["theta"]
    assert torch.equal(theta, full[:, [5, 0, 2]])


def test_coordinates_are_those_of_the_fit(tmp_path, monkeypatch):
    """The guide's coordinates come from draws of the prior, which may differ between versions of torch."""
    posterior = fitted()
    posterior.save(tmp_path / "p")
    seed = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda _: seed(123))
    loaded = bf.Posterior.load(tmp_path / "p", models.eight_schools, schools())
    equal(loaded.sample(20), posterior.sample(20))


def test_a_guide_of_the_users_own_must_be_passed(tmp_path):
    posterior = fitted(bf.SFVI(guide=guide_of_ones_own, local_steps=1))
    posterior.save(tmp_path / "p")
    with pytest.raises(ValueError, match=r"pass it again as guide="):
        bf.Posterior.load(tmp_path / "p", models.eight_schools, schools())
    loaded = bf.Posterior.load(
        tmp_path / "p", models.eight_schools, schools(), guide=guide_of_ones_own
    )
    equal(loaded.sample(20), posterior.sample(20))


def test_the_layout_of_the_file(tmp_path):
    fitted().save(tmp_path / "p")
    tensors = load_file(tmp_path / "p")
    assert {name.partition("/")[0] for name in tensors} == {
        "params",
        "local_params",
        "history",
        "start.globals",
        "start.locals",
        "correction",
        "correction.weights",
        "data",
        "program",
    }
    assert tensors["history/elbo"].shape == (3,)
    raw = (tmp_path / "p").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    metadata = json.loads(header["__metadata__"]["bayesfed"])
    assert metadata["clients"] == list("ABCDEFGH")
    assert metadata["algorithm"]["name"] == "SFVI"
    assert (metadata["format"], metadata["version"], metadata["seed"]) == (3, bf.__version__, 4)


def test_an_unknown_client_is_named(tmp_path):
    posterior = bf.fit(models.eight_schools, schools().select(["A", "B", "C"]), rounds=1)
    posterior.save(tmp_path / "p")
    with pytest.raises(ValueError, match=r"has no client 'D', its clients are A, B, C: "):
        bf.Posterior.load(tmp_path / "p", models.eight_schools, schools())


def test_another_model_is_noticed(tmp_path):
    fitted().save(tmp_path / "p")

    def other_sites(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        with federation.clients():
            theta = pyro.sample("eta", dist.Normal(mu, tau))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(theta, obs["sigma"]), obs=obs.get("y"))

    def more_globals(federation):
        pyro.sample("nu", dist.Normal(0.0, 1.0))
        models.eight_schools(federation)

    with pytest.raises(
        ValueError, match="a model with sites mu, tau, theta, y; this one has mu, tau, eta, y"
    ):
        bf.Posterior.load(tmp_path / "p", other_sites, schools())
    with pytest.raises(ValueError, match="this one has nu, mu, tau, theta, y"):
        bf.Posterior.load(tmp_path / "p", more_globals, schools())


def test_a_guide_that_only_looks_the_same_is_noticed(tmp_path):
    fitted(bf.SFVI(guide=guide_of_ones_own, local_steps=1)).save(tmp_path / "p")

    def wider(federation):
        loc = pyro.param("loc", torch.tensor(0.0))
        pyro.sample("mu", dist.Normal(loc, 2.0))
        pyro.sample("tau", dist.LogNormal(loc, 1.0))
        with federation.clients():
            rows = pyro.param("rows", torch.zeros(len(federation), 1))
            pyro.sample("theta", dist.Normal(rows, 1.0))

    with pytest.raises(ValueError, match="of another model: the guide of 'mu', or a prior that it"):
        bf.Posterior.load(tmp_path / "p", models.eight_schools, schools(), guide=wider)


def test_other_rows_are_accepted_on_request(tmp_path):
    """Local posteriors are matched by name; the model is compared on a row of zeros."""

    def model(scale):
        def heights(federation):
            mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
            with federation.clients():
                a = pyro.sample("a", dist.Normal(mu, 1.0))
                with federation.observations() as obs:
                    pyro.sample("y", dist.Normal(a + obs["x"], scale), obs=obs.get("y"))

        return heights

    def data(start):
        rows = {n: torch.arange(start, start + 3.0) + i for i, n in enumerate("abc")}
        return bf.Federation.from_arrays({n: {"x": -v, "y": v} for n, v in rows.items()})

    algorithm = bf.SFVI(local_steps=1, corrected=False)  # draws of q(w_i | θ), whatever the rows
    posterior = bf.fit(model(1.0), data(0.0), algorithm, rounds=2)
    posterior.save(tmp_path / "p")
    other = data(5.0).select(["c", "a"])
    with pytest.raises(ValueError, match=r"'x' of client 'c' \(and 1 more\).*say other_rows=True"):
        bf.Posterior.load(tmp_path / "p", model(1.0), other)
    loaded = bf.Posterior.load(tmp_path / "p", model(1.0), other, other_rows=True)
    expected = posterior.predict(other, num_samples=20)["y"]
    assert torch.equal(loaded.predict(num_samples=20)["y"], expected)
    with pytest.raises(ValueError, match="another model: the likelihood of 'y' has changed"):
        bf.Posterior.load(tmp_path / "p", model(1.1), other, other_rows=True)


def test_other_rows_are_refused_if_they_determine_weights(tmp_path):
    fitted(bf.PACPFL(particles=2)).save(tmp_path / "p")
    with pytest.raises(ValueError, match="predictions of this posterior need the rows of the fit"):
        bf.Posterior.load(tmp_path / "p", models.eight_schools, schools(), other_rows=True)


def test_another_type_is_noticed(tmp_path):
    fitted(dtype=torch.float64).save(tmp_path / "p")
    with pytest.raises(ValueError, match=r"holds float64, the federation float32: .*\.to\(dtype"):
        bf.Posterior.load(tmp_path / "p", models.eight_schools, schools())


def test_other_files_are_refused(tmp_path):
    def load(name):
        return bf.Posterior.load(tmp_path / name, models.eight_schools, schools())

    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        load("nothing")
    (tmp_path / "text").write_text("not a tensor in sight")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load("text")
    fitted().save(tmp_path / "p")
    (tmp_path / "torn").write_bytes((tmp_path / "p").read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load("torn")
    save_file({"a": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(ValueError, match="not one of bayesfed's"):
        load("other")
    later = {"bayesfed": json.dumps({"format": 9, "version": "8.0", "clients": []})}
    save_file({"a": torch.zeros(1)}, tmp_path / "later", later)
    with pytest.raises(ValueError, match=r"format 9, written by bayesfed 8\.0; .*reads format 3"):
        load("later")


def test_a_failed_save_leaves_the_earlier_file(tmp_path, monkeypatch):
    posterior = fitted()
    posterior.save(tmp_path / "p")
    before = (tmp_path / "p").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        posterior.save(tmp_path / "p")
    assert (tmp_path / "p").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["p"]
