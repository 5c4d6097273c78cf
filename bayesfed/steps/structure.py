"""The structure of a program that steps rely on, and the refusals of programs that lack it."""

from bayesfed.elbo.program import Program
from bayesfed.guides.locals import AtPrior, Locals


def check_globals(program: Program, name: str) -> None:
    """Refuse a program whose clients share nothing.

    Raises:
        ValueError: names the algorithm, and others that do without.
    """
    if not program.init:
        raise ValueError(
            f"{name} learns what clients share, and the model shares nothing: it has no sample site and no pyro.param "
            "outside `with federation.clients():`. Use Local for a point estimate of each client's own, SFVI for a "
            "posterior; or sample outside what clients have in common, such as the location of a local prior"
        )


def check_locals(program: Program, name: str) -> None:
    """Refuse a program whose clients have no variables of their own.

    Raises:
        ValueError: names the algorithm, and what would do.
    """
    if not program.locals:
        raise ValueError(
            f"{name} needs variables of a client's own, and the model samples none: use FedAvg, or move a sample site "
            "inside `with federation.clients():`"
        )


def body(program: Program, name: str = "") -> list[str]:
    """Return the body: the global parameters that the likelihood reads, given the clients' own variables.

    Raises:
        ValueError: there are none, and an algorithm, ``name``, needs some.
    """
    found = [parameter for parameter in program.init if parameter not in program.unread]
    if name and not found:
        raise ValueError(
            f"{name} needs a body that clients share, but the likelihood reads nothing beside "
            f"{program.locals[0].name!r}, a client's own: use Local, or PFedVEM(point=True), whose clients share a "
            "prior"
        )
    return found


def check_moves(program: Program, moves: frozenset[str], locals_: Locals, name: str) -> None:
    """Refuse a program that lacks what steps move: ``"globals"``, ``"body"``, ``"locals"`` or ``"all"``.

    Raises:
        ValueError: names the algorithm and what is missing.
    """
    if "globals" in moves:
        check_globals(program, name)
    if not isinstance(locals_, AtPrior):
        check_locals(program, name)
    if moves == {"locals"}:
        check_no_body(program, name)
    elif "globals" not in moves:
        body(program, name)


def check_no_body(program: Program, name: str) -> None:
    """Refuse a program whose likelihood reads something that clients share.

    Raises:
        ValueError: names it.
    """
    if shared := body(program):
        raise ValueError(
            f"{name} has every client by itself, but the likelihood reads {shared[0]!r}, which all clients share: "
            "sample it inside `with federation.clients():`, or use FedPer"
        )
