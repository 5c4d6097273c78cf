"""Messages over a socket of this machine: 8 bytes that say the length, big-endian, then so many bytes.

The way from a process that Flower starts for one message to the worker that stays. An address is ``HOST:PORT``, or,
where it has a slash, the path of a Unix socket. Such a socket knows no keys, so it is of this machine only: a Unix
socket is its owner's (mode 0600), and a host is a loopback address, which every user of the machine can reach.

What people at the site ask has another socket, a Unix one, and the first bit of the length is set. Whoever hands on
what a server sent (Flower's client, FLARE's) never sets it, so that no message of a server's is such a question, even
where a site has given Flower the wrong socket by mistake.

Imports neither torch nor NumPy, which would take most of a round.
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
"""Bytes of a message, which are Flower's too."""
PATIENCE = 60.0
"""Seconds that a server waits for the rest of a client's message, and for a client to take its answer."""

_LENGTH = struct.Struct(">Q")
_HERE = 1 << 63
_PIECE = 2**20
Handler = Callable[[bytes], bytes]
_Asked = queue.SimpleQueue[tuple[Handler, bytes, Future[bytes]]]
_log = logging.getLogger(__name__)


def call(address: str, payload: bytes, seconds: float, *, here: bool = False) -> bytes:
    """The answer of the worker at an address, within so many seconds in all.

    Args:
        address: of the worker.
        payload: the message.
        seconds: how long.
        here: it is a question of the site's own people, at the address of these.

    Raises:
        ValueError: the address is none, or is not of this machine; the message is longer than :data:`LONGEST`.
        TimeoutError: there was no whole answer in time.
        ConnectionError: nobody listens there, or whoever does hung up or did not answer in this way.
    """
    family, place = _place(address)
    _check(len(payload))
    deadline = time.monotonic() + seconds
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(seconds)
            connection.connect(place)
            _send(connection, payload, deadline, _HERE if here else 0)
            return _receive(connection, deadline)
    except TimeoutError:
        raise TimeoutError(f"{address} did not answer within {seconds:g} s") from None
    except OSError as error:
        raise ConnectionError(
            f"{address}: {error.strerror or error}; is the site's worker running there?"
        ) from None
    except ValueError as error:
        raise ConnectionError(f"{address} answers, but not as a worker does: {error}") from None


def serve(
    address: str,
    handle: Handler,
    *,
    here: tuple[str, Handler] | None = None,
    ready: Callable[[str], None] = lambda address: None,
    stop: threading.Event | None = None,
) -> None:
    """Answer messages, one at a time, in the thread that calls this, until ``stop`` is set.

    Clients that say nothing, hang up or send rubbish are left alone after :data:`PATIENCE` seconds and keep nobody
    waiting. Where ``handle`` raises an exception its client gets no answer, and the log has it.

    Args:
        address: where to listen; port 0 is any that is free.
        handle: the answer to a message.
        here: a Unix socket at which the site's own people ask, and the answer to a question of theirs.
        ready: called with the address once it listens there.
        stop: ends the server within a fifth of a second.

    Raises:
        ValueError: the address is none, or is not of this machine; that of the site's people is no Unix socket.
        OSError: it is taken, or cannot be.

    Example:
        >>> from functools import partial
        >>> address, stop = queue.Queue(), threading.Event()
        >>> worker = partial(serve, "127.0.0.1:0", bytes.upper, ready=address.put, stop=stop)
        >>> threading.Thread(target=worker).start()
        >>> call(address.get(), b"hello", 5.0)
        b'HELLO'
        >>> stop.set()
    """
    asked: _Asked = queue.SimpleQueue()
    ended = stop or threading.Event()
    if here is not None and "/" not in here[0]:
        raise ValueError(
            f"{here[0]!r} is open to every user of the machine: give a Unix socket's path"
        )
    with contextlib.ExitStack() as listeners:
        listener, where = listeners.enter_context(_listening(address))
        _answered(listener, asked, handle, 0)
        if here is not None:
            listener, _ = listeners.enter_context(_listening(here[0]))
            _answered(listener, asked, here[1], _HERE)
        ready(where)
        while not ended.is_set():
            try:
                answers, message, answer = asked.get(timeout=0.2)
            except queue.Empty:
                continue
            try:
                found = answers(message)
                _check(len(found))
                answer.set_result(found)
            except Exception as error:
                _log.exception("no answer to a message of %d bytes", len(message))
                answer.set_exception(error)


def carrier(addresses: Sequence[str]) -> Carrier:
    """The workers at these addresses of this machine, each asked in a thread of its own: for tests, and for trying out.

    Raises:
        ValueError: one is no address, or is not of this machine.
    """
    for address in addresses:
        _place(address)

    def listens(address: str) -> bool:
        family, place = _place(address)
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            return connection.connect_ex(place) == 0

    waiting: dict[str, Future[bytes]] = {}

    def exchange(messages: Mapping[str, bytes], patience: Wait) -> dict[str, bytes]:
        end, found = time.monotonic() + patience.seconds, dict[str, bytes]()
        enough = len(messages) if patience.enough is None else patience.enough
        for address, message in messages.items():
            waiting[address] = _called(address, message, patience.seconds + patience.late)
        while True:
            for address in [a for a, answer in waiting.items() if answer.done()]:
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
            if not patience.late:
                del waiting[address]
        return found

    return Carrier(lambda: [address for address in addresses if listens(address)], exchange)


def _called(address: str, message: bytes, seconds: float) -> Future[bytes]:
    """The answer of :func:`call`, in a thread of its own that keeps no process from ending."""
    answer: Future[bytes] = Future()

    def called() -> None:
        try:
            answer.set_result(call(address, message, seconds))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=called, daemon=True).start()
    return answer


# -- one connection -------------------------------------------------------------------------------


def _answered(listener: socket.socket, asked: _Asked, handle: Handler, mark: int) -> None:
    """Accept clients whose messages bear a mark, in a thread of its own."""
    threading.Thread(target=_accept, args=(listener, asked, handle, mark), daemon=True).start()


def _accept(listener: socket.socket, asked: _Asked, handle: Handler, mark: int) -> None:
    """A thread for each client, until the listener is closed."""
    while listener.fileno() >= 0:
        try:
            connection, _ = listener.accept()
        except OSError:  # closed; or no more files can be open now
            time.sleep(0.05)
            continue
        given = (connection, asked, handle, mark)
        threading.Thread(target=_converse, args=given, daemon=True).start()


def _converse(connection: socket.socket, asked: _Asked, handle: Handler, mark: int) -> None:
    """One message of one client, and its answer."""
    with connection:
        try:
            message = _receive(connection, time.monotonic() + PATIENCE, mark)
            answer: Future[bytes] = Future()
            asked.put((handle, message, answer))
            _send(connection, answer.result(), time.monotonic() + PATIENCE)
        except Exception as error:  # whatever a client does, and what `serve` has logged
            _log.debug("a client went without an answer: %s", error)


def _send(connection: socket.socket, payload: bytes, deadline: float, mark: int = 0) -> None:
    for part in (_LENGTH.pack(len(payload) ^ mark), payload):
        if part:  # whoever has got all that was announced may have hung up
            connection.settimeout(_left(deadline))
            connection.sendall(part)


def _receive(connection: socket.socket, deadline: float, mark: int = 0) -> bytes:
    """One message, whose memory grows as its bytes come, whatever length was announced; without its mark too long."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, deadline))
    length ^= mark
    _check(length)
    return _exactly(connection, length, deadline)


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


def _check(length: int) -> None:
    if length > LONGEST:
        raise ValueError(f"a message of {length:,} bytes is longer than {LONGEST:,}")


# -- addresses ------------------------------------------------------------------------------------


def _place(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """The kind of an address, and what the operating system calls it."""
    if "/" in address:
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
            f"{address!r} is not of this machine: a worker's socket knows no keys, so its host is 127.0.0.1 or "
            "localhost; between machines Flower carries the messages"
        )
    return socket.AF_INET, (host, int(port))


@contextlib.contextmanager
def _listening(address: str) -> Iterator[tuple[socket.socket, str]]:
    """A socket that listens, and its address; a Unix socket's file is its owner's, and gone in the end."""
    family, place = _place(address)
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        if family == socket.AF_INET:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            _clear(address)
        try:
            listener.bind(place)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(f"a worker cannot listen at {address}: {reason}") from None
        try:
            if family == socket.AF_UNIX:
                os.chmod(address, 0o600)  # before anyone can connect
            else:
                host, port = listener.getsockname()
                address = f"{host}:{port}"
            listener.listen()
            yield listener, address
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            if family == socket.AF_UNIX:
                Path(address).unlink(missing_ok=True)


def _clear(path: str) -> None:
    """Remove the socket of a worker that was killed, and nothing else.

    Raises:
        OSError: a worker answers there, or it is not a socket.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise FileExistsError(f"{path} is there and is no socket: give another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(path) == 0:
                raise OSError(f"another worker listens at {path}")
        os.unlink(path)
