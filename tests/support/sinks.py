"""Receivers of messages on the loopback address: a mail server, a web server, each with faults."""

import contextlib
import http.server
import json
import queue
import socket
import ssl
import threading
import time


class MailSink:
    """A mail server that keeps what it gets. `behaviour` changes what it answers:
    plain, starttls, refuse (of recipients), garbage, endless, line (without an end), hang."""

    def __init__(self, behaviour="plain", context=None, password=None):
        self.behaviour = behaviour
        self.context = context
        self.password = password
        self.mails = queue.Queue()
        self.log = []
        self.is_over = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.is_over.set()
        # Wakes accept().
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self.guarded, args=[connection], daemon=True).start()

    def guarded(self, connection):
        with contextlib.suppress(OSError, ssl.SSLError), connection:
            self.serve(connection)

    def serve(self, connection):
        if self.behaviour == "hang":
            self.is_over.wait(120)
            return
        if self.behaviour == "garbage":
            connection.sendall(b"\xff\x00 this is no mail server\r\n")
            return
        if self.behaviour == "endless":
            while not self.is_over.is_set():
                connection.sendall(b"220-" + b"x" * 100 + b"\r\n")
            return
        if self.behaviour == "line":
            while not self.is_over.is_set():
                connection.sendall(b"x" * 65536)
            return
        lines = connection.makefile("rwb")

        def say(text):
            lines.write(text.encode() + b"\r\n")
            lines.flush()

        say("220 sink")
        mail = []
        while True:
            line = lines.readline().decode(errors="replace").rstrip("\r\n")
            if not line:
                return
            self.log.append(line)
            verb = line.split()[0].upper()
            if verb == "EHLO":
                encrypted = isinstance(connection, ssl.SSLSocket)
                if self.behaviour == "starttls" and not encrypted:
                    say("250-sink\r\n250 STARTTLS")
                elif self.password is not None:
                    say("250-sink\r\n250 AUTH PLAIN LOGIN")
                else:
                    say("250 sink")
            elif verb == "STARTTLS":
                say("220 go")
                connection = self.context.wrap_socket(connection, server_side=True)
                lines = connection.makefile("rwb")
            elif verb == "AUTH":
                say("235 ok")
            elif verb == "RCPT" and self.behaviour == "refuse":
                say("550 nobody here")
            elif verb == "DATA":
                say("354 go")
                mail = []
                while (line := lines.readline()) not in (b".\r\n", b""):
                    mail.append(line)
                self.mails.put(b"".join(mail))
                say("250 kept")
            elif verb == "QUIT":
                say("221 bye")
                return
            else:
                say("250 ok")


class WebSink:
    """A web server that keeps what it gets. `behaviour`: ok, an HTTP status, redirect, large, hang."""

    def __init__(self, behaviour="ok"):
        self.behaviour = behaviour
        self.requests = queue.Queue()
        self.is_over = threading.Event()
        sink = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                sink.answer(self)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.block_on_close = False
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.is_over.set()
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request):
        length = int(request.headers.get("Content-Length") or 0)
        body = request.rfile.read(length)
        self.requests.put((request.path, request.headers, body))
        if self.behaviour == "hang":
            self.is_over.wait(120)
            return
        large = b"x" * (10 << 20) if self.behaviour == "large" else b"said no"
        if self.behaviour == "redirect":
            request.send_response(302)
            request.send_header("Location", "/elsewhere")
        else:
            request.send_response({"ok": 200, "large": 500}.get(self.behaviour, self.behaviour))
        request.send_header("Content-Length", str(len(large)))
        request.end_headers()
        with contextlib.suppress(OSError):
            request.wfile.write(large)

    def message(self, timeout_s=30):
        """The JSON of the next message."""
        return json.loads(self.requests.get(timeout=timeout_s)[2])

    def messages(self, seconds):
        """The JSON of all messages that come in this time."""
        found = []
        deadline = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while True:
                left = max(0.01, deadline - time.monotonic())
                found.append(json.loads(self.requests.get(timeout=left)[2]))
        return found
