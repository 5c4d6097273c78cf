"""The program that a run, a file and a node of a deployment have in common."""

from contextlib import suppress
from dataclasses import replace

from bayesfed.algorithms.algorithm import Algorithm
from bayesfed.checks.data import check_first_outcomes
from bayesfed.checks.sufficient import ENOUGH, check_moments
from bayesfed.data.federation import Federation, Model
from bayesfed.data.moments import other_rows
from bayesfed.elbo import noise
from bayesfed.elbo.index_checks import checked_indices
from bayesfed.elbo.program import Program
from bayesfed.settings import check
from bayesfed.vmap.choose import for_batches
from bayesfed.vmap.error_messages import readable_error


def build_program(model: Model, federation: Federation, algorithm: Algorithm, seed: int) -> Program:
    """Build the program of a model with the guide that an algorithm chooses for it.

    The seed determines the initial values that are drawn, such as particles.

    Raises:
        SettingsError: a setting of the algorithm is out of range.
        ValueError: the model and the algorithm, or the model and the data, do not go together.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed.engine.program import build_program
        >>> program = build_program(bf.models.eight_schools, bf.datasets.eight_schools(), bf.SFVI(), seed=0)
        >>> list(program.sites)
        ['mu', 'tau', 'theta', 'y']
    """
    check(algorithm)
    with noise.seeded(seed), checked_indices(federation.device):
        inspected = for_batches(model, federation)
        try:
            return algorithm.program(inspected, federation)
        except Exception as error:
            # another error than of the outcomes says less than the first
            with suppress(RuntimeError, IndexError, NotImplementedError):
                check_first_outcomes(inspected, federation)
            readable = readable_error(error, inspected.__name__)
            if readable is error:
                raise
            raise readable from error


def build_by_moments(
    model: Model, federation: Federation, algorithm: Algorithm, seed: int
) -> Program:
    """Build the program of clients that are here by their moments alone, once these are seen to be enough.

    Raises:
        ValueError: they are not, see :func:`~bayesfed.checks.sufficient.check_moments`; or as :func:`build_program`.
    """
    few = federation.sufficient
    try:
        program = build_program(model, few, algorithm, seed)
    except ValueError as error:
        if "support" not in str(error):
            raise
        raise ValueError(
            f"moments: {error}. This row is one of those that have a client's means and covariances. {ENOUGH}"
        ) from None
    check_moments(algorithm, program, other_rows(few), few)
    return replace(program, rows=federation.rows)
