"""Tests of products in fewer bits: they change little, and other operations do not change."""

import pytest
import torch

import bayesfed as bf
from bayesfed import models
from bayesfed.tracing.precision import products


def federation():
    generator = torch.Generator().manual_seed(0)

    def client(n):
        x = torch.randn(n, 16, generator=generator)
        return {"x": x, "y": (x[:, 0] > 0).float()}

    return bf.Federation.from_arrays({f"c{n}": client(n) for n in (20, 30, 25)})


def fit(**execution):
    torch.manual_seed(0)
    return bf.fit(
        models.Network(models.mlp(16, 2)),
        federation(),
        bf.FedAvg(local_epochs=2, personal_steps=1),
        rounds=10,
        execution=bf.Execution(**{"compile": False} | execution),
        progress=False,
    )


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_in_bf16_is_close_to_one_in_full(compile):
    full, lowered = fit(), fit(compile=compile, precision="bf16")
    one, other = full.params["prior.loc"], lowered.params["prior.loc"]
    assert other.dtype == torch.float32
    assert not torch.equal(one, other)
    gap = (one - other).norm() / (one - models.Network(models.mlp(16, 2)).start).norm()
    assert gap < 0.02  # bf16 keeps 8 bits: 2⁻⁸ a product, and rounding averages out


def test_the_setting_of_torch_is_restored():
    before = torch.get_float32_matmul_precision()
    with products("tf32", torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_double_precision_is_never_lowered():
    with products("bf16", torch.device("cpu")):
        product = torch.ones(2, 2, dtype=torch.float64) @ torch.ones(2, 2, dtype=torch.float64)
    assert product.dtype == torch.float64
