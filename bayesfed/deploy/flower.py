"""bayesfed as a Flower app: bytes to and from the resident nodes; :mod:`bayesfed.cli.flower_server` is the server.

Flower starts a new process for every message. So :data:`client_app` computes nothing: it forwards the message to the
resident node of its institution, whose address is ``socket`` in the SuperNode's ``--node-config``, and returns the
answer. It does not import torch. In Flower's simulation, which has no node-config, the addresses are ``sockets`` in the
run's configuration, separated by spaces, in the order of the partitions.
"""

import logging
import time
from collections.abc import Mapping

try:
    from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid
except ImportError as error:
    raise ImportError("Flower is not installed: pip install 'bayesfed[flower]'") from error

from bayesfed.deploy.sockets import call
from bayesfed.deploy.transport import Carrier, Wait

_KIND = "query"
_RECORD, _PAYLOAD = "bayesfed", "payload"
_log = logging.getLogger(__name__)

client_app = ClientApp()


@client_app.query()
def forward(message: Message, context: Context) -> Message:
    """Forward a message to the institution's node, and wait for the answer as long as the server does.

    Raises:
        ValueError: the configuration has no node's address; the message is not of :func:`carrier`.
        OSError: the node did not answer; Flower reports it to the server.
    """
    payload = _payload(message.content)
    if payload is None:
        raise ValueError("the message is not of bayesfed's server")
    answer = call(node_address(context), payload, message.metadata.ttl)
    return Message(_content(answer), reply_to=message)


def node_address(context: Context) -> str:
    """Return the address of the node behind a SuperNode, or behind one of a simulation.

    Raises:
        ValueError: there is no address; the message says where to put it.

    Example:
        >>> context = Context(0, 0, {"socket": "/run/ward/node.sock"}, RecordDict(), {}, 0)
        >>> node_address(context)
        '/run/ward/node.sock'
    """
    node, run = context.node_config, context.run_config
    if "socket" in node:
        return str(node["socket"])
    addresses = str(run.get("sockets", "")).split()
    if "partition-id" not in node or not addresses:
        raise ValueError(
            "no node's address: start the SuperNode with --node-config 'socket=\"ADDRESS\"', or a simulation with "
            "--run-config 'sockets=\"ADDRESS ADDRESS\"'"
        )
    partition = int(node["partition-id"])
    if partition >= len(addresses):
        raise ValueError(
            f"{len(addresses)} addresses in sockets for node {partition + 1} of {node['num-partitions']}"
        )
    return addresses[partition]


def carrier(grid: Grid) -> Carrier:
    """Return a carrier to the SuperNodes of a run; a lost one remains reachable for another minute.

    Addresses are the SuperNodes' ids.
    """

    def reachable() -> list[str]:
        return [str(node) for node in grid.get_node_ids()]

    waiting: dict[str, str] = {}  # the address of a message

    def exchange(messages: Mapping[str, bytes], wait: Wait) -> dict[str, bytes]:
        start, found = time.monotonic(), dict[str, bytes]()
        enough = len(messages) if wait.enough is None else wait.enough
        for name in [name for name, address in waiting.items() if address in messages]:
            del waiting[name]  # its answer would be to an earlier message
        sent = grid.push_messages(
            [
                Message(
                    _content(payload), int(address), _KIND, ttl=wait.seconds + wait.stale_seconds
                )
                for address, payload in messages.items()
            ]
        )
        asked = {name: address for name, address in zip(sent, messages, strict=True) if name}
        waiting.update(asked)
        for address in messages.keys() - set(asked.values()):
            _log.warning("node %s: Flower does not list it any more", address)
        while waiting:
            for reply in grid.pull_messages(list(waiting)):
                address = waiting.pop(reply.metadata.reply_to_message_id, "")
                if address and (answer := _answer(reply, address)) is not None:
                    found[address] = answer
            waited = time.monotonic() - start
            if (
                not asked.keys() & waiting.keys()
                or len(messages.keys() & found.keys()) >= enough
                or waited >= wait.seconds
            ):
                break
            time.sleep(min(max(0.1, 0.02 * waited), wait.seconds - waited))
        for name in asked.keys() & waiting.keys():
            _log.warning("node %s: no answer within %g s", waiting[name], wait.seconds)
            if not wait.stale_seconds:
                del waiting[name]
        return found

    return Carrier(reachable, exchange)


def _answer(reply: Message, address: str) -> bytes | None:
    """Return the answer of a SuperNode, or None and a line in the log that says why there is none."""
    if reply.has_error():
        _log.warning("node %s: %s", address, reply.error.reason)
        return None
    if (payload := _payload(reply.content)) is None:
        _log.warning("node %s: its answer is not of bayesfed's client", address)
    return payload


def _content(payload: bytes) -> RecordDict:
    """Return an array record, since Flower sends arrays in pieces of 5 MB: 50 MB take half as long as in one piece."""
    array = Array("uint8", (len(payload),), "bytes", payload)
    return RecordDict({_RECORD: ArrayRecord({_PAYLOAD: array})})


def _payload(content: RecordDict) -> bytes | None:
    record = content.array_records.get(_RECORD)
    return record[_PAYLOAD].data if record is not None and _PAYLOAD in record else None
