"""Clients of against_flower.py, in a module of their own so that Ray's workers can import them."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from bayesfed import models


@cache
def rows_of(client: int, rows: int, inputs: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return a client's rows."""
    generator = torch.Generator().manual_seed(client)
    x = torch.rand(rows, inputs, generator=generator)
    return x, torch.randint(0, classes, (rows,), generator=generator)


def client_app(rows: int, sizes: tuple[int, ...], epochs: int, batch: int) -> ClientApp:
    """Return an app that trains a client's network."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        x, y = rows_of(int(context.node_config["partition-id"]), rows, sizes[0], sizes[-1])
        net = models.mlp(*sizes)
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(epochs):
            for some in torch.randperm(rows).split(batch):
                optimizer.zero_grad()
                F.cross_entropy(net(x[some]), y[some]).backward()
                optimizer.step()
        reply = {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": rows}),
        }
        return Message(content=RecordDict(reply), reply_to=message)

    return app
