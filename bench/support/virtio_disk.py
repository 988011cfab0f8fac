"""Requests to a virtio disk of a QEMU with stopped processors, in place of the guest.

They come through the device, so QEMU counts them as the machine's own. QEMU's qtest socket replaces the processor:
its commands write the machine's memory and ports. The device is driven as by a legacy driver, one request at a time.
"""

from __future__ import annotations

import random
import socket
import struct
import time
from pathlib import Path

from .figures import Failure

_SECTOR_BYTES = 512
BLOCK_BYTES = 4096
_VENDOR_AND_DEVICE = 0x1001_1AF4
_PORTS = 0xC000
# Offsets of the legacy registers.
_FEATURES, _PAGE, _SIZE, _SELECT, _NOTIFY, _STATUS = 0x04, 0x08, 0x0C, 0x0E, 0x10, 0x12
_ACKNOWLEDGED, _HAS_DRIVER, _IS_READY = 1, 2, 4
# Without it each write would be flushed.
_HAS_FLUSH = 1 << 9
_NEXT, _DEVICE_WRITES = 1, 2
_QUEUE, _HEADERS, _CONTENT, _RESULT = 0x100000, 0x110000, 0x120000, 0x130000
_PAGE_BYTES = 4096
_PATIENCE_S = 120
_POLL_S = 0.0001


class VirtioDisk:
    """The first virtio disk of a machine; `qtest` is the socket."""

    def __init__(self, qtest: Path, size_bytes: int, seed: int = 1) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_PATIENCE_S)
        self._socket.connect(str(qtest))
        self._lines = self._socket.makefile("rb")
        self._places = random.Random(seed)
        self._blocks = size_bytes // BLOCK_BYTES
        self._done = 0
        self._set_up()

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def _ask(self, *commands: str) -> list[str]:
        self._socket.sendall("".join(command + "\n" for command in commands).encode())
        answers = []
        for command in commands:
            answer = self._lines.readline().decode().split()
            if answer[:1] != ["OK"]:
                raise Failure(f"qtest: {command}: {' '.join(answer)}")
            answers.append(answer[-1])
        return answers

    def _find(self) -> int:
        """The device's address in the configuration space."""
        for slot in range(32):
            address = 0x8000_0000 | slot << 11
            found = self._ask(f"outl 0xcf8 {address:#x}", "inl 0xcfc")[1]
            if int(found, 16) == _VENDOR_AND_DEVICE:
                return address
        raise Failure("the machine has no virtio disk")

    def _set_up(self) -> None:
        device = self._find()
        commands = [f"outl 0xcf8 {device | 0x10:#x}", f"outl 0xcfc {_PORTS:#x}",
                    # Ports, memory, and access to the machine's memory.
                    f"outl 0xcf8 {device | 0x04:#x}", "outw 0xcfc 0x7"]
        for status in (0, _ACKNOWLEDGED, _ACKNOWLEDGED | _HAS_DRIVER):
            commands.append(f"outb {_PORTS + _STATUS:#x} {status:#x}")
        commands += [f"outl {_PORTS + _FEATURES:#x} {_HAS_FLUSH:#x}", f"outw {_PORTS + _SELECT:#x} 0"]
        self._ask(*commands)
        self._entries = int(self._ask(f"inw {_PORTS + _SIZE:#x}")[0], 16)
        self._available = _QUEUE + 16 * self._entries
        end = self._available + 4 + 2 * self._entries + 2
        self._used = -(-end // _PAGE_BYTES) * _PAGE_BYTES
        self._write(_QUEUE, self._chain(0, _DEVICE_WRITES) + self._chain(3, 0))
        self._write(_CONTENT, b"x" * BLOCK_BYTES)
        # Half of the requests are writes, in an order that repeats.
        self._kinds = [self._places.randrange(2) for _ in range(self._entries)]
        heads = b"".join(struct.pack("<H", 3 * kind) for kind in self._kinds)
        self._write(self._available, struct.pack("<HH", 1, 0) + heads)
        ready = _ACKNOWLEDGED | _HAS_DRIVER | _IS_READY
        self._ask(f"outl {_PORTS + _PAGE:#x} {_QUEUE // _PAGE_BYTES:#x}", f"outb {_PORTS + _STATUS:#x} {ready:#x}")

    def _write(self, address: int, content: bytes) -> None:
        self._ask(f"write {address:#x} {len(content):#x} 0x{content.hex()}")

    @staticmethod
    def _chain(first: int, content_flag: int) -> bytes:
        """Three descriptors: the header, the content, the result."""
        header = _HEADERS + 16 * first
        return (
            struct.pack("<QIHH", header, 16, _NEXT, first + 1)
            + struct.pack("<QIHH", _CONTENT, BLOCK_BYTES, _NEXT | content_flag, first + 2)
            + struct.pack("<QIHH", _RESULT, 1, _DEVICE_WRITES, 0)
        )

    def request(self) -> None:
        """Reads or writes a block at random, and waits for it."""
        kind = self._kinds[self._done % self._entries]
        sector = self._places.randrange(self._blocks) * (BLOCK_BYTES // _SECTOR_BYTES)
        self._done += 1
        header = struct.pack("<IIQ", kind, 0, sector).hex()
        number = self._done & 0xFFFF
        look = (f"readw {self._used + 2:#x}", f"readb {_RESULT:#x}")
        answers = self._ask(
            f"write {_HEADERS + 48 * kind:#x} 0x10 0x{header}",
            f"writeb {_RESULT:#x} 0xff",
            f"writew {self._available + 2:#x} {number:#x}",
            f"outw {_PORTS + _NOTIFY:#x} 0",
            *look,
        )
        while int(answers[-2], 16) != number:
            # QEMU and the server have the same processors.
            time.sleep(_POLL_S)
            answers = self._ask(*look)
        if int(answers[-1], 16) != 0:
            raise Failure("a request of the machine failed")
