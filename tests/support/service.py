"""The service coldrised, started for one test, and a client for its API."""

import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import signal
import socket
import ssl
import subprocess
import tempfile

from .cli import BUILT
from .ports import free_port
from .websocket import WebSocket

COLDRISED = BUILT / "coldrised"
SETUP_MARK = "/#/setup/"


@dataclasses.dataclass
class Answer:
    """An answer of the service."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path, timeout_s):
        super().__init__("localhost", timeout=timeout_s)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))


class Coldrised:
    """One service on one repository. Start it with `with`, or `start` and `stop`."""

    def __init__(self, folder, repository=None, passphrase_file=None, environment=None, options=(), prefix=()):
        self.folder = pathlib.Path(folder)
        self.state = self.folder / "state"
        self.runs = self.state / "runs"
        # Addresses of sockets have at most 107 bytes.
        self.short = tempfile.TemporaryDirectory(prefix="cr-")
        self.socket = pathlib.Path(self.short.name) / "socket"
        self.repository = repository
        self.passphrase_file = passphrase_file
        self.environment = environment or {}
        self.options = list(options)
        self.min_free = 0
        self.prefix = list(prefix)
        self.process = None
        self.port = free_port()
        self.log_path = self.folder / "coldrised.log"

    def command(self):
        words = [*self.prefix, COLDRISED, "--state", self.state, "--socket", self.socket]
        words += ["--listen", f"127.0.0.1:{self.port}", "--start-runs", "detached"]
        # How full the drive of this host is says nothing about the product.
        words += ["--min-free", str(self.min_free)]
        if self.repository is not None:
            words += ["--repo", self.repository]
        if self.passphrase_file is not None:
            words += ["--passphrase-file", self.passphrase_file]
        return [*map(str, words), *map(str, self.options)]

    def start(self, timeout_s=60):
        """Starts the service and waits until it says that it is ready."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("COLDRISE_")}
        notify = pathlib.Path(self.short.name) / "notify"
        notify.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(str(notify))
            ready.settimeout(0.2)
            with self.log_path.open("ab") as log:
                self.process = subprocess.Popen(
                    self.command(),
                    env={**kept, **self.environment, "NOTIFY_SOCKET": str(notify)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            for _ in range(int(timeout_s / 0.2)):
                assert self.process.poll() is None, f"coldrised ended: {self.log}"
                with contextlib.suppress(TimeoutError):
                    if b"READY=1" in ready.recv(4096):
                        return self
        raise AssertionError(f"coldrised is not ready: {self.log}")

    @property
    def log(self):
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def kill(self):
        """kill -9 of the service alone."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=30)

    def stop(self):
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(timeout=30)

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()
        self.short.cleanup()

    def call(self, method, path, body=None, *, headers=None, token=None, over="unix", timeout_s=60):
        """One request; paths without a leading slash are below /api/v1."""
        sent = dict(headers or {})
        if token is not None:
            sent["Authorization"] = f"Bearer {token}"
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        path = path if path.startswith("/") else f"/api/v1/{path}"
        with contextlib.closing(self.connection(over, timeout_s)) as connection:
            connection.request(method, path, body=body, headers=sent)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())

    def connection(self, over="unix", timeout_s=60):
        if over == "unix":
            return UnixConnection(self.socket, timeout_s)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=timeout_s, context=self.trust())

    def websocket(self, path, *, headers=None, token=None, over="unix", timeout_s=60):
        """An open websocket; a path is below /api/v1."""
        sent = {**(headers or {}), **({"Authorization": f"Bearer {token}"} if token else {})}
        return WebSocket(self.connection(over, timeout_s), f"/api/v1/{path}", sent)

    def trust(self):
        """A TLS context that trusts exactly the service's own certificate."""
        context = ssl.create_default_context(cafile=str(self.state / "tls" / "cert.pem"))
        return context

    def get(self, path, **keywords):
        """The JSON of a GET that must succeed."""
        answer = self.call("GET", path, **keywords)
        assert answer.status == 200, (path, answer.status, answer.body)
        return answer.json

    def post(self, path, body, expected=(200, 201, 202), **keywords):
        """The JSON of a POST that must succeed."""
        answer = self.call("POST", path, body, **keywords)
        assert answer.status in expected, (path, answer.status, answer.body)
        return answer.json

    def token(self, role, machines=None, **more):
        """The text of a new token."""
        new = {"name": f"test {role}", "role": role, "machines": machines or ["*"], **more}
        return self.post("tokens", new)["text"]

    def setup_secret(self):
        """The secret of the one-time link in the log."""
        return self.log.split(SETUP_MARK)[-1].split()[0]
