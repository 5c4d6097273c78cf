"""Messages over a socket of this machine: 8 bytes with the length, big-endian, then the message.

A process that Flower starts for a single message uses it to reach the institution's resident node. An address is
``HOST:PORT``, or, if it has a slash, the path of a Unix socket. A socket does not authenticate anyone, so it must be
of this machine: a Unix socket has mode 0600, and a host must be a loopback address, which every user of the machine can
reach.

Questions of the institution's own people have another socket, a Unix one, and set the first bit of the length.
Programs that forward what a server sent (Flower's client, FLARE's) never set it, so that no message of a server is
taken for such a question, even if an institution has given Flower the wrong socket by mistake.

The module imports neither torch nor NumPy, which would take most of the time of a round.
"""

import contextlib
import ipaddress
import logging
import os
import queue
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

from bayesfed.deploy.transport import Carrier, Wait

LONGEST = 2**31 - 1
"""The largest number of bytes of a message, as in Flower."""
PATIENCE = 60.0
"""Seconds that a node waits for the rest of a caller's message, and for a caller to take its answer."""

_LENGTH = struct.Struct(">Q")
_LOCAL = 1 << 63
_PIECE = 2**20
Handler = Callable[[bytes], bytes]
_Requests = queue.SimpleQueue[tuple[Handler, bytes, Future[bytes]]]
_log = logging.getLogger(__name__)


def call(address: str, payload: bytes, seconds: float, *, local: bool = False) -> bytes:
    """Send a message to the node at an address, and return its answer.

    Args:
        address: of the node.
        payload: the message.
        seconds: the longest time for the whole exchange.
        local: true for a question of the institution's own people, sent to their address.

    Raises:
        ValueError: the address is not valid, or not of this machine; the message is longer than :data:`LONGEST`.
        TimeoutError: there was no whole answer in time.
        ConnectionError: nobody listens there, or the listener hung up or did not answer in this format.
    """
    family, place = _parse(address)
    _check_length(len(payload))
    deadline = time.monotonic() + seconds
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(seconds)
            connection.connect(place)
            _send(connection, payload, deadline, _LOCAL if local else 0)
            return _receive(connection, deadline)
    except TimeoutError:
        raise TimeoutError(f"{address} did not answer within {seconds:g} s") from None
    except OSError as error:
        reason = error.strerror or error
        raise ConnectionError(f"{address}: {reason}; is the node running there?") from None
    except ValueError as error:
        raise ConnectionError(f"{address} answers, but not as a node does: {error}") from None


def serve(
    address: str,
    handle: Handler,
    *,
    local: tuple[str, Handler] | None = None,
    ready: Callable[[str], None] = lambda address: None,
    stop: threading.Event | None = None,
) -> None:
    """Answer messages, one at a time, in the calling thread, until ``stop`` is set.

    Callers that send nothing, hang up or send rubbish are dropped after :data:`PATIENCE` seconds and delay nobody. If
    ``handle`` raises an exception its caller gets no answer, and the exception is logged.

    Args:
        address: where to listen; port 0 means any free port.
        handle: returns the answer to a message.
        local: a Unix socket for questions of the institution's own people, and a function that answers these.
        ready: called with the address once the socket listens.
        stop: ends the server within 0.2 s.

    Raises:
        ValueError: the address is not valid, or not of this machine; the local one is not a Unix socket.
        OSError: the address is taken, or cannot be used.

    Example:
        >>> from functools import partial
        >>> address, stop = queue.Queue(), threading.Event()
        >>> node = partial(serve, "127.0.0.1:0", bytes.upper, ready=address.put, stop=stop)
        >>> threading.Thread(target=node).start()
        >>> call(address.get(), b"hello", 5.0)
        b'HELLO'
        >>> stop.set()
    """
    requests: _Requests = queue.SimpleQueue()
    ended = stop or threading.Event()
    if local is not None and "/" not in local[0]:
        raise ValueError(
            f"{local[0]!r} is open to every user of the machine: give a Unix socket's path"
        )
    with contextlib.ExitStack() as listeners:
        listener, where = listeners.enter_context(_listen(address))
        _start(_accept, listener, requests, handle, 0)
        if local is not None:
            listener, _ = listeners.enter_context(_listen(local[0]))
            _start(_accept, listener, requests, local[1], _LOCAL)
        ready(where)
        while not ended.is_set():
            try:
                handler, message, future = requests.get(timeout=0.2)
            except queue.Empty:
                continue
            try:
                answer = handler(message)
                _check_length(len(answer))
                future.set_result(answer)
            except Exception as error:
                _log.exception("no answer to a message of %d bytes", len(message))
                future.set_exception(error)


def carrier(addresses: Sequence[str]) -> Carrier:
    """Return a carrier to nodes of this machine, each called in a thread of its own: for tests and trials.

    Raises:
        ValueError: an address is not valid, or not of this machine.
    """
    for address in addresses:
        _parse(address)
    waiting: dict[str, Future[bytes]] = {}

    def exchange(messages: Mapping[str, bytes], patience: Wait) -> dict[str, bytes]:
        end, found = time.monotonic() + patience.seconds, dict[str, bytes]()
        enough = len(messages) if patience.enough is None else patience.enough
        for address, message in messages.items():
            future: Future[bytes] = Future()
            waiting[address] = future
            _start(_call, future, address, message, patience.seconds + patience.stale_seconds)
        while True:
            for address in [a for a, future in waiting.items() if future.done()]:
                try:
                    found[address] = waiting.pop(address).result()
                except OSError as error:
                    _log.warning("%s", error)
            pending = [waiting[a] for a in messages.keys() & waiting.keys()]
            left = end - time.monotonic()
            if not pending or len(messages.keys() & found.keys()) >= enough or left <= 0:
                break
            wait(pending, left, FIRST_COMPLETED)
        for address in messages.keys() & waiting.keys():
            _log.warning("%s did not answer within %g s", address, patience.seconds)
            if not patience.stale_seconds:
                del waiting[address]
        return found

    return Carrier(lambda: [address for address in addresses if _answers(address, 1.0)], exchange)


def _call(future: Future[bytes], address: str, message: bytes, seconds: float) -> None:
    """Set the result of a future by :func:`call`."""
    try:
        future.set_result(call(address, message, seconds))
    except Exception as error:
        future.set_exception(error)


def _start(function: Callable[..., None], *arguments: object) -> None:
    """Call a function in a thread that does not keep the process from ending."""
    threading.Thread(target=function, args=arguments, daemon=True).start()


# -- one connection -------------------------------------------------------------------------------


def _accept(listener: socket.socket, requests: _Requests, handle: Handler, mark: int) -> None:
    """Start a thread for each caller whose messages bear a mark, until the listener is closed."""
    while listener.fileno() >= 0:
        try:
            connection, _ = listener.accept()
        except OSError:  # closed; or no more files can be open now
            time.sleep(0.05)
            continue
        _start(_converse, connection, requests, handle, mark)


def _converse(connection: socket.socket, requests: _Requests, handle: Handler, mark: int) -> None:
    """Receive one message of one caller, and send its answer."""
    with connection:
        try:
            message = _receive(connection, time.monotonic() + PATIENCE, mark)
            future: Future[bytes] = Future()
            requests.put((handle, message, future))
            _send(connection, future.result(), time.monotonic() + PATIENCE)
        except Exception as error:  # any fault of a caller, and what `serve` has logged
            _log.debug("a caller got no answer: %s", error)


def _send(connection: socket.socket, payload: bytes, deadline: float, mark: int = 0) -> None:
    for part in (_LENGTH.pack(len(payload) ^ mark), payload):
        if part:  # a caller that has all announced bytes may have hung up
            connection.settimeout(_left(deadline))
            connection.sendall(part)


def _receive(connection: socket.socket, deadline: float, mark: int = 0) -> bytes:
    """Receive one message; memory grows as bytes arrive, whatever the announced length.

    Without its mark a message counts as too long.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, deadline))
    _check_length(length ^ mark)
    return _exactly(connection, length ^ mark, deadline)


def _exactly(connection: socket.socket, length: int, deadline: float) -> bytes:
    found = bytearray()
    while len(found) < length:
        connection.settimeout(_left(deadline))
        piece = connection.recv(min(_PIECE, length - len(found)))
        if not piece:
            raise ConnectionError(f"hung up after {len(found):,} of {length:,} bytes")
        found += piece
    return bytes(found)


def _left(deadline: float) -> float:
    if (seconds := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return seconds


def _check_length(length: int) -> None:
    if length > LONGEST:
        raise ValueError(f"a message of {length:,} bytes is longer than {LONGEST:,}")


# -- addresses ------------------------------------------------------------------------------------


def _parse(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Return the family of an address, and the form that the operating system takes."""
    if "/" in address:
        if not hasattr(socket, "AF_UNIX"):
            raise ValueError(
                f"{address!r} is a Unix socket, which this system (Windows) does not have: give 127.0.0.1:PORT"
            )
        return socket.AF_UNIX, address
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(
            f"{address!r} is no address: give HOST:PORT, or a Unix socket's path with a slash in it"
        )
    if host == "localhost":
        host = "127.0.0.1"
    try:
        loopback = ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ValueError(
            f"{address!r} is not of this machine: a node's socket authenticates nobody, so its host is 127.0.0.1 or "
            "localhost; between machines Flower carries the messages"
        )
    return socket.AF_INET, (host, int(port))


def _answers(address: str, seconds: float) -> bool:
    """Return whether somebody listens at an address."""
    family, place = _parse(address)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(seconds)
        return probe.connect_ex(place) == 0


@contextlib.contextmanager
def _listen(address: str) -> Iterator[tuple[socket.socket, str]]:
    """Open a listening socket, and give its address; the file of a Unix socket is private, and removed at the end."""
    family, place = _parse(address)
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        if family == socket.AF_INET:
            # On Windows SO_REUSEADDR would let another program listen at the same port.
            option = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        else:
            _clear(address)
        try:
            listener.bind(place)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(f"a node cannot listen at {address}: {reason}") from None
        try:
            if family != socket.AF_INET:
                os.chmod(address, 0o600)  # before anyone can connect
            else:
                host, port = listener.getsockname()
                address = f"{host}:{port}"
            listener.listen()
            yield listener, address
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            if family != socket.AF_INET:
                Path(address).unlink(missing_ok=True)


def _clear(path: str) -> None:
    """Remove the socket of a node that was killed, and nothing else.

    Raises:
        OSError: a node answers there, or the path is not a socket.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise FileExistsError(f"{path} is there and is no socket: give another path")
        if _answers(path, 1.0):
            raise OSError(f"another node listens at {path}")
        os.unlink(path)
