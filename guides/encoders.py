"""Local variables that an encoder computes from a client's rows; the model names the encoder with the site.

    with federation.clients():
        z = pyro.sample("z", dist.Normal(0.0, 1.0), infer={"context": encode})

``encode(fields, mask)`` returns the site's value ``(..., K, 1, *event)`` from the fields ``(K, B, *event)`` of K
clients; rows where the mask ``(K, B)`` is False are padding. It may use everything that the model has sampled before,
so that the value is a function of θ, of the client's other variables and of these rows. An algorithm without encoders
treats the site as an ordinary random variable.
"""

from collections.abc import Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo import handlers
from bayesfed.elbo.moments import Moments, unconstrained
from bayesfed.elbo.program import Program
from bayesfed.elbo.sites import CONTEXT


class Encoded(Messenger):
    """Give each site with an encoder its encoded value; ``found`` has the distributions and values of these sites."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.batch = batch
        self.found: dict[str, tuple[Any, Tensor]] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"] or CONTEXT not in msg["infer"]:
            return
        msg["value"] = msg["infer"][CONTEXT](self.batch.fields, self.batch.mask)
        msg["done"] = True
        self.found[msg["name"]] = msg["fn"], msg["value"]


def contexts(program: Program, params: Mapping[str, Tensor], batch: Batch) -> dict[str, Moments]:
    """The encoded values of K clients, by site: ``(K, 1, *shape)``, unconstrained.

    They are differentiable in the global and local parameters.

    Raises:
        ValueError: an encoder's value does not have the shape of its site.
    """
    head, names = batch.head(), [site.name for site in program.contexts]
    with handlers.given(batch.device, params, noise={}):
        guide = poutine.trace(program.guide).get_trace(head)
        latent = [site.name for site in (*program.globals, *program.locals)]
        others = {name: guide.nodes[name]["value"] for name in latent if name not in names}
        with handlers.Until(names), handlers.Values(others), Encoded(batch) as made:
            program.model(head)
    found = {}
    for name in names:
        fn, value = made.found[name]
        shape = (len(batch), 1, *program.sites[name].event_shape)
        if value.shape != shape:
            raise ValueError(
                f"the context encoder of site {name!r} gives values {tuple(value.shape)}, not {shape}: clients, 1 "
                "and the shape of one value"
            )
        u = unconstrained(fn, value)
        found[name] = Moments(u, torch.ones_like(u), True)
    return found
