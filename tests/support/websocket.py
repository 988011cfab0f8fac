"""A client for websockets (RFC 6455): binary messages both ways, and the close frame."""

import base64
import contextlib
import os
import struct

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA


class Refused(Exception):
    """The server did not upgrade: the status and the body of its answer."""

    def __init__(self, status, body):
        super().__init__(f"{status}: {body.decode(errors='replace')}")
        self.status, self.body = status, body


class Closed(Exception):
    """The server has closed: the code and its reason."""

    def __init__(self, code, reason):
        super().__init__(f"{code}: {reason}")
        self.code, self.reason = code, reason


class WebSocket:
    """One websocket on a connection of http.client."""

    def __init__(self, connection, path, headers=None):
        self.connection = connection
        connection.request("GET", path, headers={
            "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(), **(headers or {})})
        self.socket, self.buffer = connection.sock, b""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self._exactly(1)
        status = int(head.split()[1])
        if status != 101:
            lengths = [line for line in head.lower().splitlines() if line.startswith(b"content-length:")]
            body = self._exactly(int(lengths[0].split(b":")[1])) if lengths else b""
            self.end()
            raise Refused(status, body)
        self.received = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        self.connection.close()

    def _exactly(self, count):
        while len(self.buffer) < count:
            piece = self.socket.recv(64 << 10)
            if not piece:
                raise Closed(1006, "the connection has ended")
            self.buffer += piece
        found, self.buffer = self.buffer[:count], self.buffer[count:]
        return found

    def send(self, data, opcode=BINARY):
        mask = os.urandom(4)
        length = len(data)
        if length < 126:
            head = struct.pack("!BB", 0x80 | opcode, 0x80 | length)
        elif length < 1 << 16:
            head = struct.pack("!BBH", 0x80 | opcode, 0x80 | 126, length)
        else:
            head = struct.pack("!BBQ", 0x80 | opcode, 0x80 | 127, length)
        self.socket.sendall(head + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(data)))

    def receive(self):
        """The next piece of data. Raises `Closed` at the end; answers pings."""
        while True:
            first, second = self._exactly(2)
            length = second & 0x7F
            if length == 126:
                length = struct.unpack("!H", self._exactly(2))[0]
            elif length == 127:
                length = struct.unpack("!Q", self._exactly(8))[0]
            data, opcode = self._exactly(length), first & 0xF
            if opcode in (CLOSE, PING):
                # The server may have gone after what it has sent.
                with contextlib.suppress(OSError):
                    self.send(data, PONG if opcode == PING else CLOSE)
            if opcode == CLOSE:
                code = struct.unpack("!H", data[:2])[0] if data else 1005
                raise Closed(code, data[2:].decode())
            if opcode in (BINARY, TEXT, CONTINUATION):
                return data

    def read_until(self, mark):
        """All that is received up to and with `mark`. The socket's timeout is per piece."""
        while mark not in self.received:
            self.received += self.receive()
        place = self.received.index(mark) + len(mark)
        found, self.received = self.received[:place], self.received[place:]
        return found

    def closed(self):
        """The end, with its code and reason; earlier messages are dropped."""
        try:
            while True:
                self.receive()
        except Closed as end:
            return end
