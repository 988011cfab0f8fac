"""A proxy before a real S3 server, which turns that into one with another dialect of S3."""

import dataclasses
import http.client
import http.server
import re
import threading

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


@dataclasses.dataclass
class Request:
    method: str
    path: str
    headers: dict
    body: bytes

    def is_list(self):
        return "list-type=" in self.path

    def is_read(self):
        return self.method == "GET" and not self.is_list()

    def range(self):
        """The first and the last requested byte; None for all."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        return found and (int(found[1]), int(found[2]))


@dataclasses.dataclass
class Answer:
    status: int
    headers: dict
    body: bytes
    is_chunked: bool = False


def refusal(status, code):
    text = f"<Error><Code>{code}</Code><Message>The server's own words.</Message></Error>" if code else ""
    return Answer(status, {"content-type": "application/xml"}, text.encode())


class DialectProxy:
    """`dialect` gets a request and a function that passes it on; it returns the answer."""

    def __init__(self, target, dialect):
        self.target, self.dialect = target, dialect
        self.requests = []
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Else a body waits for the receipt of its header, which is late.
            disable_nagle_algorithm = True

            def serve(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, self.path, headers, body)
                proxy.requests.append(request)
                self.answer(proxy.dialect(request, proxy.ask))

            do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = serve

            def answer(self, answer):
                self.send_response_only(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                body = answer.body
                if answer.is_chunked:
                    self.send_header("transfer-encoding", "chunked")
                    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
                elif answer.status != 204:
                    self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def ask(self, request):
        """The server's own answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.target)
        connection.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.items():
            connection.putheader(name, value)
        connection.endheaders(request.body)
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        body = answer.read()
        connection.close()
        return Answer(answer.status, {name: value for name, value in headers.items() if name not in HOP_BY_HOP}, body)

    def close(self):
        self.server.shutdown()
        self.server.server_close()
