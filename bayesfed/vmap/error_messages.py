"""Readable messages for errors in a user's model: the line, the problem and what to write instead."""

from __future__ import annotations

import re
import textwrap
import traceback

from pyro.infer.reparam.reparam import Reparam

from bayesfed.elbo import index_checks
from bayesfed.tracing.compiler import users_frames
from bayesfed.vmap import writes

_REASONS = {
    r"data-dependent control flow|\.item\(\)|Boolean value of Tensor": (
        "it asks for the value of a tensor (if, while, float(...), .item()), of which there is one for each draw and "
        "each client. Write torch.where(condition, a, b), or keep to tensors"
    ),
    r"in-?place|overwrite|output with shape": (
        "it writes into a view of a tensor. Write into the tensor itself, p[0, 1] = x, or collect the parts in a list "
        "and take torch.stack(parts)"
    ),
    r"Multiple sample sites named '(clients|observations)'": (
        "federation.clients() and federation.observations() open these plates: leave out the program's own"
    ),
    r"ImproperUniform": (
        "the prior is flat, and a variable starts at draws of its prior. Write a prior that is wide in the unit of the "
        "data, such as dist.Normal(0.0, 100.0), or dist.HalfNormal(100.0) of a positive variable. A flat prior itself "
        "is dist.Normal(0.0, 1.0).mask(False), whose draws are starting values"
    ),
    # the last is of Pyro's TruncatedPolyaGamma, which has none of batches
    r"sample\(\) is not implemented|not support sampling|can only concatenate list": (
        "the distribution has no sampler, and a variable starts at draws of its prior. Use another one"
    ),
    r"Batching rule not implemented": (
        "torch.vmap lacks this operation, so that it cannot run for many clients at once. Write the layer with others: "
        "nn.GRUCell or nn.RNNCell in a loop over time in place of nn.LSTM, for example"
    ),
    r"random(ness)? ": (
        "it draws numbers of its own. Sample them with pyro.sample, or give them as data"
    ),
    r"'(Batch|Fields)' object|values to unpack": (
        'the model runs on the rows of some clients: read a field as obs["y"], from `with federation.observations() as '
        "obs:`, or as federation.of_clients(...)"
    ),
    r"t\(\) expects": (
        "a layer of torch takes weights of one network, and each client has its own: write (x.unsqueeze(-2) * w)."
        "sum(-1) + b, or take bayesfed.models.Network"
    ),
    r"to satisfy the constraint": (
        "a draw of the priors gives the distribution a parameter that it cannot have"
    ),
    r"used as indices must be": (
        'an index must be whole numbers: effect[obs["kind"].long()], see docs/first_model.md, "Categories"'
    ),
    r"on the same device": (
        "a tensor that was made outside the model lies on another device than the rows. Make it in the model, or move "
        "it to them, table.to(federation.device)"
    ),
    r"out of (bounds|range)": (
        "an index is larger than what it is to index: categories count from 0, and a variable needs an entry for each; "
        "a client's variable has no entry for other clients, own and not own[i], and the entries of a vector are its "
        "last dimension, own[..., i]"
    ),
    r"reinterpreted_batch_ndims|at least 1D": (
        "there is one number where a vector is wanted. A column named alone is a field of one number a row, columns in "
        "a list, be it of one, are a field of vectors: fields={'x': ['x'], 'y': 'y'}"
    ),
    r"size|shape|broadcast|dim": (
        "shapes do not fit. A variable outside `with federation.clients()` has the shape of its distribution, one "
        "inside (1, 1) in front of it, for one client and its rows, and a field (1, rows): "
        'obs["x"] @ beta, (w * obs["x"]).sum(-1)'
    ),
}
"""Patterns of torch's and Pyro's messages, and the explanations that are shown instead."""
LONG = 160
"""The most characters of the original message that are shown."""


def readable_error(error: Exception, name: str) -> Exception:
    """An error of a model as one that names the line; an error that bayesfed itself has raised is returned unchanged.

    Args:
        error: the error that the model has raised.
        name: the name of the model.
    """
    theirs = users_frames(error)
    if isinstance(error, TypeError) and "positional argument" in str(error) and not theirs:
        return ValueError(
            f"model {name!r} is called with the federation alone, def model(federation): it reads its data by "
            f"obs[...], from `with federation.observations() as obs:` ({error})"
        )
    modules = [
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    passing = writes.__name__, index_checks.__name__
    last = [module for module in modules if module not in passing][-1]
    said, found, _ = str(error).partition("Trace Shapes:")  # which Pyro adds
    said = said.strip()
    if not theirs or last.startswith("bayesfed."):
        return type(error)(said) if found else error
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(strategy := frame.f_locals.get("self"), Reparam):
            return ValueError(
                f"site {frame.f_locals['msg']['name']!r}: {type(strategy).__name__} cannot be used here. Leave it out: "
                "the guide transforms variables onto the reals, and follows the prior of local ones "
                f"({said or type(error).__name__})"
            )
    number, line = theirs[-1].lineno, theirs[-1].line
    said = textwrap.shorten(said.split("\n")[0] or _lacking(error), LONG, placeholder=" ...")
    reason = next((text for what, text in _REASONS.items() if re.search(what, said, re.I)), "")
    where = f"model {name!r}, line {number}" + (f", `{line}`" if line else "")
    return ValueError(f"{where}: {reason} ({said})" if reason else f"{where}: {said}")


def _lacking(error: BaseException) -> str:
    """The words for an error without any: the function that is not implemented."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{traceback.extract_tb(error.__traceback__)[-1].name}() is not implemented"
