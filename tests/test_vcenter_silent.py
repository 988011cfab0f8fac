"""recover --to vcenter at servers that accept connections but are not a vCenter."""

import contextlib
import hashlib
import json
import socket
import ssl
import subprocess
import threading
import time

from support.certificates import make_certificates

# The limit of the first answer, and the start of the program on a busy machine.
LIMIT_S = 15 + 15


class Server:
    """Accepts connections, and treats each as `behave` does."""

    def __init__(self, folder, behave):
        certificates = make_certificates(folder)
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(certificates / "ca-cert.pem", certificates / "ca-key.pem")
        pem = (certificates / "ca-cert.pem").read_text(encoding="ascii")
        self.thumbprint = hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()
        self.behave, self.ended = behave, threading.Event()
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.threads.append(threading.Thread(target=self.serve, args=(connection,)))
            self.threads[-1].start()

    def serve(self, connection):
        with connection, contextlib.suppress(OSError):
            self.behave(self, connection)

    def drip(self, send, content):
        """A byte each second."""
        for at in range(len(content)):
            if self.ended.wait(1):
                return
            send(content[at : at + 1])

    def close(self):
        self.ended.set()
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        for thread in self.threads:
            thread.join()


def silent(server, connection):
    with server.tls.wrap_socket(connection, server_side=True):
        server.ended.wait()


def dripping(server, connection):
    with server.tls.wrap_socket(connection, server_side=True) as stream:
        server.drip(stream.sendall, b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b" " * 100)


def dripping_handshake(server, connection):
    # The header of a long record.
    server.drip(connection.sendall, b"\x16\x03\x03\x40\x00" + bytes(1000))


def moved(server, connection):
    with server.tls.wrap_socket(connection, server_side=True) as stream:
        stream.recv(1 << 16)
        stream.sendall(b"HTTP/1.1 302 Found\r\nLocation: https://elsewhere/\r\nContent-Length: 0\r\n\r\n")
        server.ended.wait(1)


SAID = [
    (silent, "does not answer in time (global): check that this is the vCenter"),
    (dripping, "does not answer in time (global): check that this is the vCenter"),
    (dripping_handshake, "does not answer in time (connect): check"),
    (moved, "answered 302 Found to RetrieveServiceContent: check that this is the vCenter"),
]


def test_servers_other_than_vcenter_are_left_early(coldrise, tmp_path):
    """All concurrently: each takes as long as the first request may."""
    disk = tmp_path / "disk.raw"
    disk.write_bytes(bytes(1 << 20))
    coldrise.backup("web01", vda=disk)
    password = tmp_path / "password"
    password.write_text("x", encoding="utf-8")
    password.chmod(0o600)
    with contextlib.ExitStack() as stack:
        commands = []
        started = time.monotonic()
        for behave, words in SAID:
            server = stack.enter_context(contextlib.closing(Server(tmp_path / behave.__name__, behave)))
            address = f"127.0.0.1:{server.socket.getsockname()[1]}"
            command = coldrise.start(
                "--json", "recover", "web01/latest", "--to", f"vcenter:{address}", "--host", "esx3", "--user", "u",
                "--password-file", password, "--thumbprint", server.thumbprint, stdout=subprocess.PIPE)
            commands.append((command, address, words))
        for command, address, words in commands:
            output, _ = command.communicate(timeout=60)
            message = json.loads(output.splitlines()[-1])["error"]["message"]
            assert command.returncode != 0 and words in message and address in message, message
        assert time.monotonic() - started < LIMIT_S
    assert coldrise.json("sessions")["sessions"] == []
