"""A small NBD client. It times a first byte without the start-up time of a client
program, and writes a list of ranges. It sends one request at a time."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from .figures import Failure

_MAGIC = 0x4E42444D41474943
_OPTION_MAGIC = 0x49484156454F5054
_OPTION_REPLY_MAGIC = 0x3E889045565A9
_REQUEST_MAGIC = 0x25609513
_REPLY_MAGIC = 0x67446698
_FIXED_NEWSTYLE_NO_ZEROES = 3
_OPT_GO = 7
_REP_ACK = 1
_REP_INFO = 3
_INFO_EXPORT = 0
_CMD_READ, _CMD_WRITE, _CMD_DISCONNECT, _CMD_FLUSH = 0, 1, 2, 3
_REPLY_LIMIT_BYTES = 64 << 10
_TIMEOUT_S = 60.0


class Connection:
    """An open export, as a context manager."""

    def __init__(self, socket_path: Path, export: str) -> None:
        self._export = export
        self._cookie = 0
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_TIMEOUT_S)
        try:
            self._socket.connect(str(socket_path))
            self.size_bytes = self._negotiate()
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._send(_CMD_DISCONNECT, 0, 0)
        except OSError:
            pass
        self._socket.close()

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        self._send(_CMD_READ, offset_bytes, length_bytes)
        self._await_reply("read", offset_bytes)
        return self._receive(length_bytes)

    def write(self, offset_bytes: int, content: bytes) -> None:
        self._send(_CMD_WRITE, offset_bytes, len(content), content)
        self._await_reply("write", offset_bytes)

    def flush(self) -> None:
        self._send(_CMD_FLUSH, 0, 0)
        self._await_reply("flush", 0)

    def _receive(self, length: int) -> bytes:
        content = bytearray(length)
        view = memoryview(content)
        while view:
            got = self._socket.recv_into(view)
            if got == 0:
                raise Failure(f"export {self._export!r}: the server closed the connection")
            view = view[got:]
        return bytes(content)

    def _negotiate(self) -> int:
        magic, option_magic, _flags = struct.unpack(">QQH", self._receive(18))
        if (magic, option_magic) != (_MAGIC, _OPTION_MAGIC):
            raise Failure("no fixed newstyle NBD server")
        name = self._export.encode()
        payload = struct.pack(">I", len(name)) + name + struct.pack(">H", 0)
        self._socket.sendall(
            struct.pack(">I", _FIXED_NEWSTYLE_NO_ZEROES)
            + struct.pack(">QII", _OPTION_MAGIC, _OPT_GO, len(payload))
            + payload
        )
        size_bytes = None
        while True:
            magic, _option, kind, length = struct.unpack(">QIII", self._receive(20))
            if magic != _OPTION_REPLY_MAGIC or length > _REPLY_LIMIT_BYTES:
                raise Failure(f"export {self._export!r}: malformed option reply")
            content = self._receive(length)
            if kind == _REP_INFO and length >= 10 and struct.unpack(">H", content[:2])[0] == _INFO_EXPORT:
                (size_bytes,) = struct.unpack(">Q", content[2:10])
            elif kind == _REP_ACK:
                break
            elif kind != _REP_INFO:
                raise Failure(
                    f"export {self._export!r}: refused ({kind:#x}: {content.decode(errors='replace')})"
                )
        if size_bytes is None:
            raise Failure(f"export {self._export!r}: the server named no size")
        return size_bytes

    def _send(self, command: int, offset: int, length: int, content: bytes = b"") -> None:
        self._cookie += 1
        request = struct.pack(">IHHQQI", _REQUEST_MAGIC, 0, command, self._cookie, offset, length)
        self._socket.sendall(request + content)

    def _await_reply(self, what: str, offset_bytes: int) -> None:
        magic, error, cookie = struct.unpack(">IIQ", self._receive(16))
        if magic != _REPLY_MAGIC or cookie != self._cookie:
            raise Failure(f"export {self._export!r}: malformed reply to a {what}")
        if error != 0:
            raise Failure(f"export {self._export!r}: {what} at {offset_bytes}: NBD error {error}")
