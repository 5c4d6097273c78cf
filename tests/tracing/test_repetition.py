"""Operations on repeated draws that are computed once, and those that must not be."""

import pytest
import torch
from torch.distributions import MultivariateNormal

from bayesfed.tracing.recorder import Recorder
from bayesfed.tracing.repetition import Repetition

DRAWS, TIMES, SIZE = 2, 3, 4


def recorded(function):
    """Return a recording's function of draws and values, and the shapes of the operations' results."""
    torch.manual_seed(0)
    z, u = torch.randn(DRAWS, SIZE), torch.randn(TIMES * DRAWS, SIZE)
    recorder = Recorder()
    with recorder.with_inputs([z, u]), Repetition(z, TIMES) as repetition:
        results = [function(repetition.repeated, u)]
    shapes = {
        operation.target.__name__: tuple(operation.results[0].form.shape)
        for operation in recorder.recording(results).operations
    }
    return recorder.function(results), shapes


def covariance(z):
    return torch.eye(SIZE) + z[..., None] * z[..., None, :]


def density(z, u):
    mean = u.new_zeros(SIZE)
    return MultivariateNormal(mean, covariance(z), validate_args=False).log_prob(u)


def test_a_covariance_is_factorised_once_for_each_draw():
    function, shapes = recorded(density)
    assert shapes["linalg_cholesky_ex.default"][0] == DRAWS
    z, u = torch.randn(DRAWS, SIZE), torch.randn(TIMES * DRAWS, SIZE)
    (found,) = function(z, u)
    assert found.shape == (TIMES * DRAWS,)
    for i in range(TIMES * DRAWS):
        assert torch.allclose(found[i], density(z[i % DRAWS], u[i]), rtol=1e-4)


@pytest.mark.parametrize(
    "function",
    [
        lambda z, u: u - z.sum(0),
        lambda z, u: u - z.cumsum(0),
        lambda z, u: u - z.flip(0) * z.mean(),
        lambda z, u: u - z.reshape(DRAWS, TIMES, SIZE).sum(1).repeat(TIMES, 1),
    ],
    ids=["sum", "cumsum", "flip", "reshape"],
)
def test_operations_over_draws_have_all_of_them(function):
    run, _ = recorded(function)
    z, u = torch.randn(DRAWS, SIZE), torch.randn(TIMES * DRAWS, SIZE)
    assert torch.allclose(run(z, u)[0], function(z.repeat(TIMES, 1), u), atol=1e-5)


def test_what_was_computed_once_cannot_be_written_into():
    def written(z, u):
        y = 2 * z
        y[:, 0] = 0.0
        return u + y

    with pytest.raises(ValueError, match="computed once"):
        recorded(written)


def test_other_tensors_can_be_written_into():
    def written(z, u):
        y = torch.zeros(TIMES * DRAWS, SIZE)
        y[:, 0] = z[:, 0].exp()
        return u + y

    run, shapes = recorded(written)
    assert shapes["exp.default"] == (DRAWS,)
    z, u = torch.randn(DRAWS, SIZE), torch.randn(TIMES * DRAWS, SIZE)
    assert torch.allclose(run(z, u)[0], written(z.repeat(TIMES, 1), u), atol=1e-6)
