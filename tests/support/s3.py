"""A real S3 server, versitygw, with its data in a folder of the test, and a proxy before it that disturbs."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request

from support.cli import ROOT
from support.nbdserver import DEADLINE_S, wait_until
from support.ports import free_port
from support.relay import Relay

VERSITYGW = ROOT / "build/versitygw"
ACCESS, SECRET = "coldrise-tests", "se+cr/et=of the tests"
BUSY = (b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n%s")
BUSY_BODY = b"<?xml version=\"1.0\"?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"


class S3Server:
    """One versitygw on the loopback. `env()` leads programs to it through `proxy`, or past it.

    Its data is in `folder`, objects as files in `folder`/data/BUCKET. `certificate` and `key`: paths, for https,
    which the proxy does not understand.
    """

    def __init__(self, folder, bucket="vault", access=ACCESS, secret=SECRET, certificate=None, key=None):
        self.folder, self.bucket, self.access, self.secret = folder, bucket, access, secret
        self.certificate, self.key = certificate, key
        self.data, self.log_path, self.output_path = folder / "data", folder / "access.log", folder / "versitygw.log"
        (self.data / bucket).mkdir(parents=True, exist_ok=True)
        (folder / "sidecar").mkdir(exist_ok=True)
        self.port = free_port()
        self.process = None
        self.proxy = Proxy(self.port)

    def start(self):
        """Returns when it answers."""
        words = [VERSITYGW, "--port", f"127.0.0.1:{self.port}", "--keep-alive", "--quiet", "--health", "/health",
                 "--access-log", self.log_path]
        if self.certificate is not None:
            words += ["--cert", self.certificate, "--key", self.key]
        # Extended attributes are not in every file system, such as an older tmpfs.
        words += ["posix", "--sidecar", self.folder / "sidecar", self.data]
        keys = {"ROOT_ACCESS_KEY_ID": self.access, "ROOT_SECRET_ACCESS_KEY": self.secret}
        with open(self.output_path, "a", encoding="utf-8") as output:
            self.process = subprocess.Popen(words, env=os.environ | keys, stdin=subprocess.DEVNULL, stdout=output,
                                            stderr=output)
        wait_until(self._answers, "versitygw answers")
        return self

    def _answers(self):
        assert self.process.poll() is None, self.output_path.read_text(encoding="utf-8")
        with contextlib.suppress(OSError):
            if self.certificate is not None:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return True
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=DEADLINE_S) as answer:
                return answer.status == 200
        return False

    def stop(self):
        """In an orderly way; `start` begins again on the same port."""
        self._end(signal.SIGTERM)

    def kill(self):
        """Immediately, as in a crash."""
        self._end(signal.SIGKILL)

    def _end(self, number):
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(timeout=DEADLINE_S)
            self.process = None

    def close(self):
        self.proxy.close()
        self.kill()

    def url(self, prefix=""):
        return f"s3://{self.bucket}/{prefix}".rstrip("/")

    def env(self, direct=False, **other):
        """Variables for coldrise: the keys, and the proxy's address, or with `direct` the server's own."""
        scheme = "http" if self.certificate is None else "https"
        port = self.port if direct or self.certificate is not None else self.proxy.port
        return {"AWS_ACCESS_KEY_ID": self.access, "AWS_SECRET_ACCESS_KEY": self.secret, "AWS_REGION": "us-east-1",
                "AWS_ENDPOINT_URL": f"{scheme}://127.0.0.1:{port}"} | other  # fmt: skip

    def logged(self):
        """The server's access log, in its order: operations such as "PutObject", object or "-", status."""
        if not self.log_path.exists():
            return []
        found = []
        for line in self.log_path.read_text(encoding="utf-8").splitlines():
            if match := re.search(r" s3_(\w+) (\S+) \S+ (\d{3}) ", line):
                found.append((match[1], match[2], int(match[3])))
        return found

    def objects(self):
        """The names of all objects in the bucket, read from the files."""
        bucket = self.data / self.bucket
        return sorted(str(path.relative_to(bucket)) for path in bucket.rglob("*") if path.is_file())


class Proxy(Relay):
    """Passes on HTTP/1.1 to a port of the loopback, and disturbs it on request."""

    def __init__(self, target):
        # The first line of each request that arrived.
        self.requests = []
        # Bytes that passed, of both directions.
        self.passed = 0
        self.busy, self.delay_s = 0, 0.0
        # Requests that are held, and how many may pass before.
        self.gated, self.may_pass = None, 0
        self.gate_opens = threading.Event()
        super().__init__("127.0.0.1", target)

    def answer_busy(self, count):
        """The next `count` requests are answered with 503 SlowDown."""
        with self.lock:
            self.busy = count

    def delay(self, seconds):
        """Delays each piece of at most 64 KiB by this time."""
        self.delay_s = seconds

    def hold(self):
        """A black hole: connections open and stay open, and no byte passes."""
        with self.lock:
            self.is_holding = True

    def gate(self, pattern, count):
        """Requests whose first line has this pattern are held after `count` of them. Others pass."""
        self.gate_opens.clear()
        self.gated, self.may_pass = pattern, count

    def release(self):
        self.gated = None
        self.gate_opens.set()
        super().release()

    def _requests(self, near, far):
        with contextlib.suppress(OSError):
            self._pass_on_requests(near, far)
        with contextlib.suppress(OSError):
            far.shutdown(socket.SHUT_WR)

    def _pass_on_requests(self, near, far):
        begun = b""
        while True:
            while b"\r\n\r\n" not in begun:
                if not (data := near.recv(self.piece_bytes)):
                    return
                begun += data
            head, _, begun = begun.partition(b"\r\n\r\n")
            match = re.search(rb"(?im)^content-length: *(\d+)", head)
            left = int(match[1]) if match else 0
            with self.lock:
                self.requests.append(head.split(b"\r\n")[0].decode())
                is_busy, self.busy = self.busy > 0, max(self.busy - 1, 0)
                is_gated = self.gated is not None and re.search(self.gated, self.requests[-1]) is not None
                if is_gated:
                    self.may_pass -= 1
                    is_gated = self.may_pass < 0
            if is_gated:
                self.gate_opens.wait()
            target = None if is_busy else far
            self._pass_on(head + b"\r\n\r\n", near, target)
            data, begun = begun[:left], begun[left:]
            while True:
                self._pass_on(data, near, target)
                left -= len(data)
                if left == 0:
                    break
                if not (data := near.recv(min(self.piece_bytes, left))):
                    return
            if is_busy:
                near.sendall(BUSY % (len(BUSY_BODY), BUSY_BODY))

    def _answers(self, far, near):
        super()._answers(far, near)
        # The server closed the connection, or it was cut.
        with contextlib.suppress(OSError):
            near.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, data, source, target):
        time.sleep(self.delay_s)
        with self.lock:
            self.lock.wait_for(lambda: not self.is_holding)
            self.passed += len(data)
            if self.room is not None:
                self.room -= len(data)
                if self.room <= 0:
                    self.is_holding = True
                    self.lock.notify_all()
            self._count_down(len(data))
        if target is not None:
            target.sendall(data)
