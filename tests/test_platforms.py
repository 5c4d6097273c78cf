"""What can be tested on Linux of the other systems: encodings, and what they lack."""

import ast
import io
import os
import socket
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from bayesfed.cli import app as cli
from bayesfed.cli.experiment import socket_address
from bayesfed.deploy.sockets import carrier
from bayesfed.engine import files
from bayesfed.engine.files import lock

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


class FirstByte:
    """``msvcrt``, whose locks are those of Windows: of a byte at the file's position, not of the same process again."""

    LK_NBLCK, LK_UNLCK = 2, 0
    taken: ClassVar[set[tuple[int, int]]] = set()

    @classmethod
    def locking(cls, descriptor, mode, count):
        assert count == 1
        key = os.fstat(descriptor).st_ino, os.lseek(descriptor, 0, os.SEEK_CUR)
        if mode == cls.LK_UNLCK:
            cls.taken.remove(key)
            return
        if key in cls.taken:
            raise PermissionError(13, "Permission denied")
        cls.taken.add(key)


def test_a_system_without_fcntl_locks_a_byte(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", FirstByte)
    file = tmp_path / ".lock"
    file.write_bytes(b"longer than a byte")
    with lock(file, "the folder"):
        message = "another process has the folder: end it"
        with pytest.raises(BlockingIOError, match=message), lock(file, "the folder"):
            raise AssertionError("locked twice")
        with lock(tmp_path / ".other", "another folder"):
            pass
    with lock(file, "the folder"):
        pass


def test_another_process_is_locked_out_by_fcntl(tmp_path):
    pytest.importorskip("fcntl")
    path = tmp_path / ".lock"
    with lock(path, "it"), pytest.raises(BlockingIOError), lock(path, "it"):  # opened twice
        raise AssertionError("locked twice")
    with lock(path, "it"):
        pass


def test_a_file_that_is_open_elsewhere_is_tried_again_then_named(monkeypatch, tmp_path):
    target, replace, refused = tmp_path / "history.csv", os.replace, []

    def open_elsewhere(source, path):
        refused.append(path)
        if len(refused) < times:
            raise PermissionError(13, "Access is denied")
        replace(source, path)

    monkeypatch.setattr(files, "WINDOWS", True)
    monkeypatch.setattr(files, "WAITS", (0.0, 0.0))
    monkeypatch.setattr(os, "replace", open_elsewhere)
    times = 3
    with files.atomically(target) as temporary:
        temporary.write_text("round\n", encoding="utf-8")
    assert target.read_text(encoding="utf-8") == "round\n" and len(refused) == 3
    refused.clear()
    times = 9
    message = "close the program that has it open"
    with pytest.raises(PermissionError, match=message), files.atomically(target) as temporary:
        temporary.write_text("none", encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["history.csv"] and len(refused) == 3


def test_tensors_of_a_file_are_copies_where_mapped_files_cannot_be_replaced(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "WINDOWS", True)
    path = tmp_path / "run.safetensors"
    files.write_tensors(path, {"x": torch.ones(3)}, "about", {})
    found, _ = files.read_tensors(path, "about")
    with path.open("r+b") as file:  # as a map of the file would show
        file.seek(-12, os.SEEK_END)
        file.write(bytes(12))
    assert found["x"].tolist() == [1.0, 1.0, 1.0]
    assert files.read_tensors(path, "about")[0]["x"].tolist() == [0.0, 0.0, 0.0]


def test_modules_of_one_system_are_imported_where_they_are_used():
    """An import at the top of a module would fail elsewhere."""
    only = {"fcntl", "msvcrt", "pwd", "grp", "resource", "termios", "winreg"}
    for path in SOURCES:
        tops = ast.parse(path.read_text("utf-8")).body
        names = {a.name for node in tops if isinstance(node, ast.Import) for a in node.names}
        assert not names & only, path
