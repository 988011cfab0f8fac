"""NBD clients that break the protocol or go away in the middle of it."""

import socket
import ssl
import struct

OPTION_STARTTLS, OPTION_GO = 5, 7
READ, WRITE = 0, 1
DEADLINE_S = 30
MIB = 1 << 20


def connect(address, tls=None):
    """A stream that has got the greeting and answered it; `tls` is a client's context."""
    family = socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX
    stream = socket.socket(family)
    stream.settimeout(DEADLINE_S)
    stream.connect(address if isinstance(address, tuple) else str(address))
    assert receive(stream, 18)[:16] == b"NBDMAGICIHAVEOPT"
    # Fixed newstyle, no zeroes.
    stream.sendall(struct.pack(">I", 3))
    if tls is not None:
        assert option(stream, OPTION_STARTTLS) == [(1, b"")]
        stream = tls.wrap_socket(stream)
    return stream


def receive(stream, length):
    parts = bytearray()
    while len(parts) < length:
        part = stream.recv(length - len(parts))
        if not part:
            raise EOFError(f"{len(parts)} bytes of {length}")
        parts += part
    return bytes(parts)


def option(stream, number, payload=b""):
    """Sends an option; the replies up to the last as [(kind, payload)]."""
    stream.sendall(b"IHAVEOPT" + struct.pack(">II", number, len(payload)) + payload)
    replies = []
    while True:
        magic, answered, kind, length = struct.unpack(">QIII", receive(stream, 20))
        assert (magic, answered) == (0x3E889045565A9, number)
        replies.append((kind, receive(stream, length)))
        if kind == 1 or kind & 1 << 31:
            return replies


def go(stream, name):
    """Opens an export; the kind and the text of the last reply."""
    text = name.encode()
    return option(stream, OPTION_GO, struct.pack(">I", len(text)) + text + b"\0\0")[-1]


def opened(address, name, tls=None):
    stream = connect(address, tls)
    kind, text = go(stream, name)
    assert kind == 1, (kind, text)
    return stream


def request(command, length, offset=0, cookie=1):
    return struct.pack(">IHHQQI", 0x25609513, 0, command, cookie, offset, length)


READS = request(READ, 4 * MIB) + request(READ, 512) * 2
SMALL_READS = request(READ, 65536) * 12

# The bytes that each client sends before it disconnects without reading an answer.
LEAVES = {
    "reads": READS,
    "many reads": SMALL_READS,
    "garbage behind reads": SMALL_READS + b"\xff" * 28,
    "half a request behind reads": SMALL_READS + request(READ, 512)[:13],
    "half a write behind reads": SMALL_READS + request(WRITE, 65536) + b"x" * 1000,
    "an endless write behind reads": SMALL_READS + request(WRITE, 0xFFFF_FFFF),
    "an unknown command behind reads": SMALL_READS + request(99, 512),
}


def leave(address, name, sent, tls=None, waits=False):
    """A client that opens an export, sends these bytes and disconnects. With `waits` it first
    reads until the server closes the connection or is silent."""
    stream = opened(address, name, tls)
    try:
        stream.sendall(sent)
        if waits:
            stream.settimeout(1)
            while stream.recv(MIB):
                pass
    except (OSError, ssl.SSLError):
        pass
    finally:
        stream.close()
