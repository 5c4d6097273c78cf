"""Networks as functions of a weight vector, for batches of weights and clients."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pyro.distributions.util import broadcast_shape
from torch import Tensor, nn
from torch.func import functional_call, vmap

Named = dict[str, Tensor]


def check_stateless(module: nn.Module) -> None:
    """Raise an error for a module that keeps state or draws its own noise.

    Raises:
        ValueError: names the submodule and says what to use instead.
    """
    for name, child in module.named_modules():
        where = f"{name!r} ({type(child).__name__})" if name else type(child).__name__
        if any(True for _ in child.buffers(recurse=False)):
            raise ValueError(
                f"module {where} keeps state in buffers (running statistics would mix clients): use "
                "GroupNorm or LayerNorm in place of BatchNorm"
            )
        if isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0:
            raise ValueError(
                f"module {where} draws its own noise, which here is an input of every step, by round and client, so "
                "that runs are resumed and agree between machines; this holds for point estimates too. Remove it or "
                "set p=0. Against overfitting take hyper_scale (a prior of the weights), held_out, or FedABML, whose "
                "noise on the weights is the Bayesian counterpart of dropout"
            )


def flatten(module: nn.Module, names: Sequence[str] | None = None) -> Tensor:
    """Return the parameters of these names (by default all) as one vector ``(D,)``.

    Example:
        >>> from torch import nn
        >>> from bayesfed.functional.networks import flatten
        >>> flatten(nn.Linear(3, 2)).shape
        torch.Size([8])
    """
    params = dict(module.named_parameters())
    chosen = params if names is None else {name: params[name] for name in names}
    if not chosen:
        return torch.zeros(0)
    return torch.cat([value.detach().flatten() for value in chosen.values()])


def call_with(module: nn.Module, params: Mapping[str, Tensor], *args: Tensor) -> Any:
    """Return the module's output with these parameters, named as in ``module.named_parameters()``.

    A parameter that several modules share is replaced in each of them, and a module that appears several times is
    handled once: torch's own ``tie_weights`` replaces its parameters twice and then restores the replaced ones (torch
    2.13).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from bayesfed.functional.networks import call_with
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> twice, own = nn.Sequential(layer, layer), layer.weight
        >>> call_with(twice, {"0.weight": 3 * torch.eye(2)}, torch.ones(2))
        tensor([9., 9.])
        >>> layer.weight is own
        True
    """
    name_of = {id(value): name for name, value in module.named_parameters()}
    places = {
        f"{path}.{name}" if path else name: name_of[id(value)]
        for path, part in module.named_modules()
        for name, value in part.named_parameters(recurse=False, remove_duplicate=False)
    }
    given = {place: params[name] for place, name in places.items() if name in params}
    return functional_call(module, given, args, tie_weights=False)


_UNFIT = r"shapes cannot be multiplied|Expected (\d|size)|size mismatch|must match|invalid for input|expected input"
"""Texts of torch's errors for a layer that gets rows of another shape than it takes."""


def apply(
    module: nn.Module,
    weights: Tensor,
    x: Tensor,
    *context: Tensor,
    shared: Tensor | None = None,
    names: Sequence[str] | None = None,
) -> Tensor:
    """Return the module's outputs for every row of every client, each client with its own weights.

    Args:
        module: takes ``(B, *event)`` and, if given, the context tensors of one client.
        weights: ``(..., K, 1, D)``, or ``(..., 1, 1, D)`` if all clients have the same.
        x: ``(K, B, *event)``.
        context: tensors ``(K, ...)`` that the module takes after x.
        shared: the other parameters ``(..., K or 1, 1, D')``, if ``weights`` holds only those of ``names``.
        names: the parameters that ``weights`` holds, in the module's order; by default all.

    Returns:
        ``(..., K, B, *output)``.

    Raises:
        TypeError: the module returns something other than a tensor.
        ValueError: a layer does not take rows of this shape.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from bayesfed.functional.networks import apply
        >>> apply(nn.Linear(3, 2), torch.zeros(5, 4, 1, 8), torch.ones(4, 7, 3)).shape
        torch.Size([5, 4, 7, 2])
    """
    params = dict(module.named_parameters())
    own = list(params) if names is None else list(names)
    rest = [name for name in params if name not in set(own)]

    def unpack(vector: Tensor, of: Sequence[str]) -> dict[str, Tensor]:
        parts = vector.split([params[name].numel() for name in of], -1)  # before vmap: one gradient
        shape = vector.shape[:-1]
        return {n: p.reshape(*shape, *params[n].shape) for n, p in zip(of, parts, strict=True)}

    def run(weights: Named, other: Named, x: Tensor, context: tuple[Tensor, ...]) -> Tensor:
        kind = type(module).__name__
        try:
            out = call_with(module, weights | other, x, *context)
        except RuntimeError as error:
            said = str(error).rstrip(".")
            if not re.search(_UNFIT, said):
                raise
            raise ValueError(
                f"the network {kind} does not take rows of shape {tuple(x.shape[1:])}: {said}. Give its first "
                "layer that shape, or reshape within the network, by nn.Unflatten for example"
            ) from None
        if not isinstance(out, Tensor):
            raise TypeError(
                f"the network {kind} returns a {type(out).__name__}, not a tensor. Let the forward() of a module "
                "around it return the part that holds the outputs"
            )
        return out

    weights = weights.squeeze(-2)
    other = weights.new_zeros(1, 0) if shared is None else shared.squeeze(-2)
    batch = broadcast_shape(weights.shape[:-2], other.shape[:-2])
    clients, several = weights.shape[-2], other.shape[-2]
    mine, rest_of = (_flatten_draws(value, batch) for value in (weights, other))
    if clients == 1 and several == 1 and not context:  # one network for all rows
        rows = x.flatten(0, 1)
        one = unpack(mine[:, 0], own), unpack(rest_of[:, 0], rest)
        out = _map_draws(lambda w, v: run(w, v, rows, ()), *one)
        return out.reshape(*batch, *x.shape[:2], *out.shape[2:])
    per_client = vmap(run, in_dims=(0 if clients > 1 else None, 0 if several > 1 else None, 0, 0))

    def draw(w: Named, v: Named) -> Tensor:
        first = w if clients > 1 else _only(w)
        second = v if several > 1 else _only(v)
        return per_client(first, second, x, context)

    out = _map_draws(draw, unpack(mine, own), unpack(rest_of, rest))
    return out.reshape(*batch, *out.shape[1:])


def _flatten_draws(value: Tensor, batch: Sequence[int]) -> Tensor:
    """Reshape ``(..., K, D)`` to ``(P, K, D)``, where P is 1 if all draws have the same."""
    if value.ndim == 2 or all(size == 1 for size in value.shape[:-2]):
        return value.reshape(1, *value.shape[-2:])
    return value.expand(*batch, *value.shape[-2:]).reshape(-1, *value.shape[-2:])


def _map_draws(draw: Callable[[Named, Named], Tensor], w: Named, v: Named) -> Tensor:
    """Apply a function of two sets of weights to every draw: ``(P, ...)``."""
    counts = [len(next(iter(part.values()))) if part else 1 for part in (w, v)]
    if max(counts) == 1:
        return draw(_only(w), _only(v))[None]
    dims = tuple(0 if count > 1 else None for count in counts)
    parts = [part if count > 1 else _only(part) for part, count in zip((w, v), counts, strict=True)]
    return vmap(draw, in_dims=dims)(*parts)


def _only(weights: Named) -> Named:
    """Remove the dimension of a single draw, by a squeeze: its gradient is a view, that of an index a copy."""
    return {name: value.squeeze(0) for name, value in weights.items()}
