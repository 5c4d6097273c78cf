"""What can be tested on Linux of the other systems: encodings, and what they lack."""

import ast
import io
import socket
import sys
from pathlib import Path

import pytest

from bayesfed.cli import app as cli
from bayesfed.cli.experiment import socket_address
from bayesfed.deploy.sockets import carrier

ROOT = Path(__file__).parents[1]
SOURCES = [
    path for folder in ("bayesfed", "guides", "models") for path in (ROOT / folder).rglob("*.py")
]


def text_without_encoding(tree):
    """Lines that read or write text in the encoding of the system, which is not UTF-8 on Windows."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(key.arg == "encoding" for key in node.keywords):
            continue
        name = getattr(node.func, "attr", "")
        words = [
            a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)
        ]
        if name in ("read_text", "write_text") and "utf-8" not in words:
            yield node.lineno
        function = getattr(node.func, "id", "")
        if function == "open" and not any("b" in word for word in words):
            yield node.lineno


def test_that_text_is_read_and_written_as_utf_8():
    assert len(SOURCES) > 250
    found = {
        p.relative_to(ROOT).as_posix(): list(text_without_encoding(ast.parse(p.read_text("utf-8"))))
        for p in SOURCES
    }
    assert not {path: lines for path, lines in found.items() if lines}
    assert [
        *text_without_encoding(
            ast.parse("p.read_text()\nopen(p, 'rb')\nopen(p, 'w')\np.write_text(x)")
        )
    ] == [1, 3, 4]


def test_a_system_without_unix_sockets_needs_a_port(monkeypatch):
    monkeypatch.delattr(socket, "AF_UNIX")
    carrier(["127.0.0.1:9301"])
    with pytest.raises(ValueError, match=r"'./a.sock' is a Unix socket, .* give 127.0.0.1:PORT"):
        carrier(["./a.sock"])


def test_the_path_of_a_socket_has_slashes_on_every_system(tmp_path):
    assert socket_address("./a.sock", tmp_path) == (tmp_path / "a.sock").as_posix()
    assert socket_address("127.0.0.1:9301", tmp_path) == "127.0.0.1:9301"


def test_letters_that_a_pipe_cannot_write_do_not_end_a_command(monkeypatch):
    pipe = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, encoding="cp1252"))
    monkeypatch.setattr(cli, "app", lambda **_: print("q(θ) ± 1"))
    assert cli.main([]) == 0
    sys.stdout.flush()
    assert pipe.getvalue().decode("cp1252").strip() == "q(\\u03b8) ± 1"
