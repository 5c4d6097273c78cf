"""A temporary network of Flower on this machine: a SuperLink, and a SuperNode for each institution, with TLS and keys.

    with network({"north": "./north.sock", "south": "./south.sock"}, folder) as flower:
        flower.run(app, experiment="grunfeld.toml")

Everything lies in one folder (certificates, keys, database, logs, Flower's home), the ports are free ones of 127.0.0.1,
and nothing outlives the ``with``, Ctrl-C and ``kill`` included; on Linux not even ``kill -9``.
"""

import contextlib
import ctypes
import datetime
import ipaddress
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

BIN = Path(sys.executable).parent
CONNECTION = "local-deployment"
LOCALHOST = "127.0.0.1"
DAY = datetime.timedelta(days=1)


@dataclass
class Network:
    """A running network. Its parts are ``superlink`` and the institutions' names."""

    folder: Path
    environment: Mapping[str, str]
    port: int
    tls: bool
    commands: dict[str, list[str]] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start a part, or start it again, and append to its log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self.commands[name],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C comes to us, and we stop it
                preexec_fn=_die_with_parent,
            )

    def stop(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """End a part and all that it has started, by SIGKILL after 10 s."""
        process = self.processes.pop(name)
        process.send_signal(how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):  # its process group is empty
            for _ in range(100):
                os.killpg(process.pid, 0)
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def log(self, name: str) -> str:
        """Return all that a part has written so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def flwr(self, *arguments: str | Path, seconds: float = 60.0) -> str:
        """Run a command of Flower's and return its output.

        Raises:
            RuntimeError: it failed, or took longer.
        """
        command = [str(BIN / "flwr"), *map(str, arguments)]
        try:
            done = subprocess.run(
                command, env=self.environment, capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired as error:
            said = (error.stdout or b"").decode(errors="replace")
            raise RuntimeError(
                f"{' '.join(command)} took longer than {seconds} s:\n{said}"
            ) from None
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def run(
        self,
        app: Path,
        *,
        seconds: float = 600.0,
        supernodes: int | None = None,
        **config: str | int | float,
    ) -> str:
        """Run an app to its end and return its log; ``supernodes`` is their number in a simulation.

        Raises:
            RuntimeError: it failed, which the exit status of `flwr run` does not show.
        """
        given: list[str] = []
        if config:
            words = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
            given += ["--run-config", words]
        if supernodes:
            words = f"num-supernodes={supernodes} client-resources-num-cpus=1"
            given += ["--federation-config", words]
        log = self.flwr("run", app, CONNECTION, "--stream", *given, seconds=seconds)
        number = log.split("Successfully started run ")[1].split()[0]
        (run,) = json.loads(self.flwr("list", CONNECTION, "--run-id", number, "--format", "json"))[
            "runs"
        ]
        if run["status"] != "finished:completed":
            raise RuntimeError(f"{run['status']}: {run['status-details']}\n{log}")
        return log

    def await_line(self, name: str, line: str, seconds: float = 60.0, since: int = 0) -> None:
        """Wait until a part's log, from an offset on, has a line with these words.

        Raises:
            RuntimeError: it ended before, or it took longer.
        """
        deadline = time.monotonic() + seconds
        while line not in (said := self.log(name)[since:]):
            ended = self.processes[name].poll() is not None
            if time.monotonic() > deadline or (ended and line not in self.log(name)[since:]):
                raise RuntimeError(f"{name} never said {line!r}:\n{said}")
            time.sleep(0.05)


@contextlib.contextmanager
def network(sites: Mapping[str, str], folder: Path, *, tls: bool = True) -> Iterator[Network]:
    """Start a SuperLink, and a SuperNode for each institution, whose messages go to the worker at its address.

    With ``tls`` the SuperLink has a certificate of a temporary authority, and only nodes with a registered key get in.

    Raises:
        RuntimeError: a part did not start; with its output.
    """
    with _superlink(folder.resolve(), tls) as made:
        for site, address in sites.items():
            key = write_key(made.folder, site) if tls else None
            if key:
                made.flwr("supernode", "register", key.with_suffix(".pub"), CONNECTION)
            made.commands[site] = supernode_command(made.folder, made.port, address, key, tls)
            made.start(site)
        for site in sites:
            made.await_line(site, "SuperNode ID:")
        yield made


@contextlib.contextmanager
def simulation(folder: Path) -> Iterator[Network]:
    """Start a SuperLink that simulates its SuperNodes, with Ray: ``run(app, supernodes=3)``."""
    with _superlink(folder.resolve(), False, "--simulation") as made:
        yield made


@contextlib.contextmanager
def _superlink(folder: Path, tls: bool, *more: str) -> Iterator[Network]:
    """Start a SuperLink and write Flower's configuration for it."""
    made = Network(folder, _environment(folder), free_port(), tls)
    (folder / "flwr").mkdir(parents=True, exist_ok=True)
    connection: dict[str, object] = {"address": f"{LOCALHOST}:{made.port}"}
    connection |= {"root-certificates": str(folder / "ca.crt")} if tls else {"insecure": True}
    (folder / "flwr" / "config.toml").write_text(
        tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: connection}})
    )
    if tls:
        write_certificates(folder)
    made.commands["superlink"] = [*superlink_command(folder, made.port, tls), *more]
    with _stopped_at_the_end(made):
        made.start("superlink")
        _await_health(made)
        yield made


def superlink_command(folder: Path, port: int, tls: bool) -> list[str]:
    """Return the SuperLink's command; without ``--database`` it loses its runs and its nodes' keys when it ends."""
    secure = [
        *("--ssl-ca-certfile", folder / "ca.crt"),
        *("--ssl-certfile", folder / "server.crt"),
        *("--ssl-keyfile", folder / "server.key"),
        "--enable-supernode-auth",
    ]
    command = [
        *(BIN / "flower-superlink", "--host", LOCALHOST, "--port", port),
        *("--database", folder / "superlink.db"),
        "--disable-runtime-dependency-installation",
        *(secure if tls else ["--insecure"]),
    ]
    return list(map(str, command))


def supernode_command(
    folder: Path, superlink: int, socket_address: str, key: Path | None, tls: bool
) -> list[str]:
    """Return a SuperNode's command; ``--port`` is of its own interface to its ClientApps."""
    command = [
        *(BIN / "flower-supernode", "--superlink", f"{LOCALHOST}:{superlink}"),
        *("--host", LOCALHOST, "--port", free_port()),
        *("--node-config", f"socket={json.dumps(socket_address)}"),
        *(["--root-certificates", folder / "ca.crt"] if tls else ["--insecure"]),
        *(["--auth-supernode-private-key", key] if key else []),
    ]
    return list(map(str, command))


# -- certificates and keys ------------------------------------------------------------------------


def write_certificates(folder: Path) -> None:
    """Write ``ca.crt``, and ``server.crt`` with ``server.key`` for localhost; the authority's own key is not stored."""
    authority, server = (
        ec.generate_private_key(ec.SECP384R1()),
        ec.generate_private_key(ec.SECP384R1()),
    )
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "throw-away authority")])
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.IPv4Address(LOCALHOST))]
    for file, name, key, extension, critical in (
        ("ca", issuer, authority, x509.BasicConstraints(ca=True, path_length=0), True),
        ("server", subject, server, x509.SubjectAlternativeName(names), False),
    ):
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
            .add_extension(extension, critical)
            .sign(authority, hashes.SHA384())
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        (folder / f"{file}.crt").write_bytes(pem)
    _write_secret(
        folder / "server.key",
        server.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def write_key(folder: Path, site: str) -> Path:
    """Write a SuperNode's key (P-384, as by ssh-keygen) to ``SITE.key``, and the public one to ``SITE.pub``."""
    private = ec.generate_private_key(ec.SECP384R1())
    path = folder / f"{site}.key"
    _write_secret(
        path,
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        ),
    )
    path.with_suffix(".pub").write_bytes(
        private.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
    )
    return path


def _write_secret(path: Path, content: bytes) -> None:
    path.touch(0o600)
    path.write_bytes(content)


# -- processes ------------------------------------------------------------------------------------


def free_port() -> int:
    """Return a free port of 127.0.0.1."""
    with socket.create_server((LOCALHOST, 0)) as listener:
        return int(listener.getsockname()[1])


def _environment(folder: Path) -> dict[str, str]:
    """Return an environment in which Flower finds its programs, and starts tasks at once, not once a second."""
    return {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
    }


def _await_health(made: Network, seconds: float = 60.0) -> None:
    context = ssl.create_default_context(cafile=made.folder / "ca.crt") if made.tls else None
    url = f"http{'s' if made.tls else ''}://{LOCALHOST}:{made.port}/health"
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(url, timeout=1.0, context=context).close()
            return
        if made.processes["superlink"].poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the SuperLink did not start:\n{made.log('superlink')}")
        time.sleep(0.1)


@contextlib.contextmanager
def _stopped_at_the_end(made: Network) -> Iterator[None]:
    """Stop all parts at the end, on SIGTERM as on Ctrl-C, those that were started last first."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        for name in reversed(list(made.processes)):
            made.stop(name)
        signal.signal(signal.SIGTERM, before)


def _die_with_parent() -> None:
    """Ask Linux for SIGTERM when the parent process has ended (prctl, PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
