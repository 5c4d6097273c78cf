"""Messages over a socket: whole ones, and everything that is not one."""

import os
import queue
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from bayesfed.deploy import sockets
from bayesfed.deploy.sockets import call, carrier, serve
from bayesfed.deploy.transport import Wait


@contextmanager
def server(address, handle):
    """A server in a thread, and the address where it listens."""
    ready, stop = queue.Queue(), threading.Event()
    thread = threading.Thread(
        target=serve, args=(address, handle), kwargs={"ready": ready.put, "stop": stop}
    )
    thread.start()
    try:
        yield ready.get(timeout=5)
    finally:
        stop.set()
        thread.join(5)
        assert not thread.is_alive()


@pytest.fixture(params=["tcp", "unix"])
def address(request, tmp_path):
    return "127.0.0.1:0" if request.param == "tcp" else str(tmp_path / "worker.sock")


def raw(address):
    """A connection whose client does not follow the rules."""
    if "/" in address:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        return connection
    host, port = address.split(":")
    return socket.create_connection((host, int(port)))


def deaf_server(answer):
    """A TCP server that reads a little, sends this, and hangs up: its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def once():
        connection, _ = listener.accept()
        with suppress(OSError), connection, listener:  # the client may be gone already
            connection.recv(8)
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(2**16):
                pass

    threading.Thread(target=once, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("size", [0, 1, 7, 2**20 + 1, 20_000_000])
def test_bytes_come_back_whole(address, size):
    sent = os.urandom(min(size, 4096)) * (size // 4096 + 1)
    with server(address, lambda message: message[::-1]) as where:
        assert call(where, sent[:size], 20.0) == sent[:size][::-1]


def test_nothing_is_sent_after_an_empty_message(address, monkeypatch):
    """The server answers its eight bytes and hangs up before the client goes on."""

    us = threading.current_thread()

    def late(deadline):
        time.sleep(0.1 if threading.current_thread() is us else 0.0)
        return deadline - time.monotonic()

    with server(address, lambda message: b"") as where:
        monkeypatch.setattr(sockets, "_left", late)
        assert call(where, b"", 5.0) == b""


def test_the_frame_is_eight_bytes_of_length_and_the_message(address):
    with server(address, bytes.upper) as where, raw(where) as client:
        client.sendall(b"\0\0\0\0\0\0\0\x03abc")
        assert client.makefile("rb").read() == b"\0\0\0\0\0\0\0\x03ABC"


def test_one_message_at_a_time_in_the_thread_that_serves(address):
    running, most, threads = [], [], set()

    def handle(message):
        running.append(message)
        most.append(len(running))
        threads.add(threading.get_ident())
        time.sleep(0.02)
        running.pop()
        return message

    with server(address, handle) as where:
        clients = [threading.Thread(target=call, args=(where, b"x", 10.0)) for _ in range(8)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
    assert most == [1] * 8 and len(threads) == 1


def test_clients_that_misbehave_hold_up_nobody(address):
    with server(address, bytes.upper) as where:
        silent, halfway, endless = raw(where), raw(where), raw(where)
        halfway.sendall(struct.pack(">Q", 100) + b"only this")
        endless.sendall(b"\xff" * 8 + b"whatever")
        for parting in (b"", b"\0", struct.pack(">Q", 100) + b"x", os.urandom(64)):
            with raw(where) as client:
                client.sendall(parting)
        unheard = raw(where)  # hangs up before its answer comes
        unheard.sendall(struct.pack(">Q", 1) + b"a")
        unheard.close()
        assert call(where, b"hello", 5.0) == b"HELLO"
        endless.settimeout(5)
        with (
            pytest.raises(ConnectionError)
            if "/" not in where
            else pytest.raises((ConnectionError, AssertionError))
        ):  # refused: closed with what it sent unread, or closed
            assert endless.recv(1) == b"?"
        for client in (silent, halfway, endless):
            client.close()
        assert call(where, b"again", 5.0) == b"AGAIN"


def test_an_announced_length_takes_no_memory(monkeypatch):
    """2 GB less a byte are announced, nine bytes come: the buffer holds nine."""
    monkeypatch.setattr(sockets, "PATIENCE", 0.3)
    sizes = []
    exactly = sockets._exactly

    def watched(connection, length, deadline):
        try:
            return exactly(connection, length, deadline)
        except BaseException as error:
            sizes.append(sys.getsizeof(error.__traceback__.tb_next.tb_frame.f_locals["found"]))
            raise

    monkeypatch.setattr(sockets, "_exactly", watched)
    with server("127.0.0.1:0", bytes.upper) as where, raw(where) as client:
        client.sendall(struct.pack(">Q", sockets.LONGEST) + b"nine byte")
        client.settimeout(5)
        assert client.recv(1) == b""
    assert sizes and max(sizes) < 200


def test_a_server_outlives_an_exception_of_its_handler(address, caplog):
    def handle(message):
        return {b"good": b"fine"}[message]

    with server(address, handle) as where:
        with pytest.raises(ConnectionError, match=where):
            call(where, b"bad", 5.0)
        assert call(where, b"good", 5.0) == b"fine"
    assert "KeyError: b'bad'" in caplog.text


def test_nobody_there(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for address in (f"127.0.0.1:{port}", str(tmp_path / "none.sock")):
        with pytest.raises(ConnectionError, match=f"{address}.*is the node running"):
            call(address, b"", 5.0)


def test_too_late(address):
    with server(address, lambda message: time.sleep(0.6) or b"") as where:
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match=rf"{where} did not answer within 0\.2 s"):
            call(where, b"", 0.2)
        assert time.monotonic() - begun < 0.5


def test_a_trickle_does_not_stretch_the_time():
    """A byte every tenth of a second: the seconds count for the whole exchange, not for each piece."""
    listener = socket.create_server(("127.0.0.1", 0))

    def trickle():
        connection, _ = listener.accept()
        with suppress(OSError), connection, listener:
            for byte in struct.pack(">Q", 100) + bytes(100):
                connection.sendall(bytes([byte]))
                time.sleep(0.1)

    threading.Thread(target=trickle, daemon=True).start()
    with pytest.raises(TimeoutError):
        call(f"127.0.0.1:{listener.getsockname()[1]}", b"", 0.5)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "hung up after 0 of 8 bytes"),
        (b"HTTP", "hung up after 4 of 8 bytes"),
        (struct.pack(">Q", 5) + b"abc", "hung up after 3 of 5 bytes"),
        (b"HTTP/1.1 400", "answers, but not as a node does: .* longer than 2,147,483,647"),
    ],
)
def test_answers_that_are_none(answer, said):
    address = deaf_server(answer)
    with pytest.raises(ConnectionError, match=f"{address}.*{said}"):
        call(address, b"hello", 5.0)


def test_messages_that_are_too_long(monkeypatch):
    monkeypatch.setattr(sockets, "LONGEST", 10)
    with pytest.raises(ValueError, match="11 bytes is longer than 10"):
        call("127.0.0.1:9", bytes(11), 1.0)


@pytest.mark.parametrize(
    "address", ["nothing", "127.0.0.1:", "127.0.0.1:port", ":", "127.0.0.1:99999"]
)
def test_what_is_no_address(address):
    for use in (
        lambda: call(address, b"", 1.0),
        lambda: serve(address, bytes),
        lambda: carrier([address]),
    ):
        with pytest.raises(ValueError, match="no address: give HOST:PORT, or a Unix socket's path"):
            use()


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "192.168.0.1", "hospital.example", "", "::1", "127.0.0.1.evil.example"]
)
def test_other_machines_are_refused_by_name(host):
    """No name is looked up: one that means this machine today may mean another tomorrow."""
    for use in (lambda: call(f"{host}:1", b"", 1.0), lambda: serve(f"{host}:1", bytes)):
        with pytest.raises(ValueError, match=f"'{host}:1' is not of this machine"):
            use()


def test_localhost_is_this_machine():
    with server("localhost:0", bytes.upper) as where:
        assert where.startswith("127.0.0.1:")
        assert call(where.replace("127.0.0.1", "localhost"), b"a", 5.0) == b"A"


def test_a_unix_socket_is_its_owners_and_leaves_nothing(tmp_path):
    path = tmp_path / "worker.sock"
    with server(str(path), bytes.upper) as where:
        assert where == str(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == []


def test_the_socket_of_a_killed_worker_is_taken_over(tmp_path):
    path = tmp_path / "worker.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    with server(str(path), bytes.upper) as where:
        assert call(where, b"a", 5.0) == b"A"


def test_what_is_in_use_is_left_alone(tmp_path, address):
    with server(address, bytes.upper) as where:
        with pytest.raises(OSError, match=where):
            serve(where, bytes.lower)
        assert call(where, b"a", 5.0) == b"A"
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is no socket"):
        serve(str(tmp_path / "notes.txt"), bytes.lower)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_path_that_is_too_long_says_so(tmp_path):
    path = str(tmp_path / ("x" * 100) / "worker.sock")
    with pytest.raises(OSError, match="worker.sock: AF_UNIX path too long"):
        serve(path, bytes)
    with pytest.raises(ConnectionError, match="worker.sock: AF_UNIX path too long"):
        call(path, b"", 1.0)


def test_a_carrier_brings_what_came_and_logs_the_rest(tmp_path, caplog):
    slow = lambda message: time.sleep(1.0) or b""  # noqa: E731
    with (
        server(str(tmp_path / "a.sock"), bytes.upper) as a,
        server("127.0.0.1:0", bytes.lower) as b,
        server(str(tmp_path / "c.sock"), slow) as c,
    ):
        d = str(tmp_path / "d.sock")
        nodes = carrier([a, b, c, d])
        assert list(nodes.reachable()) == [a, b, c]
        begun = time.monotonic()
        messages = {a: b"Aa", b: b"Bb", c: b"Cc", d: b"Dd"}
        assert nodes.exchange(messages, Wait(0.5)) == {a: b"AA", b: b"bb"}
        assert time.monotonic() - begun < 0.9, "asked one after the other"
        assert f"{c} did not answer within 0.5 s" in caplog.text
        assert f"{d}: No such file or directory" in caplog.text
        assert nodes.exchange({}, Wait(1.0)) == {}


def test_a_carrier_goes_on_once_enough_have_answered_and_brings_the_rest_later(tmp_path):
    slow = lambda message: time.sleep(0.6) or message.upper()  # noqa: E731
    with (
        server(str(tmp_path / "a.sock"), bytes.upper) as a,
        server(str(tmp_path / "b.sock"), slow) as b,
    ):
        nodes, messages, begun = carrier([a, b]), {a: b"a", b: b"b"}, time.monotonic()
        assert nodes.exchange(messages, Wait(5.0, enough=1, stale_seconds=5.0)) == {a: b"A"}
        assert time.monotonic() - begun < 0.5
        time.sleep(0.9)
        assert nodes.exchange({a: b"again"}, Wait(5.0)) == {a: b"AGAIN", b: b"B"}
        assert nodes.exchange(messages, Wait(5.0, enough=1)) == {a: b"A"}
        time.sleep(0.9)
        assert nodes.exchange({}, Wait(5.0)) == {}, "nobody said that it may be late"
        assert nodes.exchange(messages, Wait(5.0, enough=1, stale_seconds=5.0)) == {a: b"A"}
        found = nodes.exchange({b: b"new"}, Wait(5.0))
        assert found == {b: b"NEW"}, "an older answer in place of the one to the last message"


def test_neither_torch_nor_numpy_is_imported():
    """Flower starts a process for every message, which imports this."""
    program = (
        "import sys, bayesfed.deploy.sockets\n"
        "print([name for name in ('torch', 'numpy', 'pydantic', 'flwr') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "[]\n", done.stderr
