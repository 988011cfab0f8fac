"""The part of an NFSv4.1 client (RFC 8881) that opens files with share reservations."""

import itertools
import os
import struct
import time

from support.nfs3 import NFS, Refused, Rpc, opaque, string

OK, EXIST, GRACE, SHARE_DENIED, LOCKED = 0, 17, 10013, 10015, 10012
READ, WRITE, BOTH = 1, 2, 3
DENY_NONE, DENY_READ, DENY_WRITE, DENY_BOTH = 0, 1, 2, 3
UNCHECKED, GUARDED, EXCLUSIVE4_1 = 0, 1, 3
NO_DELEGATION = 0x0400
DEADLINE_S = 60

# Operations
(ACCESS_CLOSE, GETATTR, GETFH, LOOKUP, OPEN, OPEN_DOWNGRADE, PUTFH, PUTROOTFH, READ_OP, SETATTR, WRITE_OP,
 EXCHANGE_ID, CREATE_SESSION, SEQUENCE, RECLAIM_COMPLETE) = (
    4, 9, 10, 15, 18, 21, 22, 24, 25, 34, 38, 42, 43, 53, 58)  # fmt: skip

# Attributes, as bitmaps of words.
CHANGE, MODE = (1 << 3,), (0, 1 << 1)


class Client:
    """One client with one session."""

    def __init__(self, network, name):
        self.rpc = Rpc(network.connect(2049, "127.0.0.1"), NFS, version=4)
        owner = os.urandom(8) + opaque(name.encode())
        reply = self.compound((EXCHANGE_ID, owner + struct.pack(">3I", 0, 0, 0)))
        self.id, number = reply.take("QI")
        # Header padding, request, response, cached response, operations, requests, no RDMA.
        channel = struct.pack(">7I", 0, 1 << 20, 1 << 20, 4096, 16, 8, 0)
        arguments = struct.pack(">QII", self.id, number, 0) + channel * 2
        reply = self.compound((CREATE_SESSION, arguments + struct.pack(">3I", 0x40000000, 1, 0)))
        self.session = reply.data[reply.at : reply.at + 16]
        self.numbers = itertools.count(1)
        self.in_session((RECLAIM_COMPLETE, struct.pack(">I", 0)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.rpc.close()

    def compound(self, *operations):
        """The results behind the status of the last of these operations."""
        arguments = string("") + struct.pack(">II", 1, len(operations))
        for number, rest in operations:
            arguments += struct.pack(">I", number) + rest
        reply = self.rpc.call(1, arguments)
        reply.take("I")
        reply.opaque()
        reply.take("I")
        for number, _ in operations:
            assert reply.take("I") == number
            status = reply.take("I")
            if status != OK:
                raise Refused(f"operation {number}", status)
            if number == operations[-1][0]:
                return reply
            skip(reply, number)
        raise AssertionError("an empty compound")

    def in_session(self, *operations):
        sequence = self.session + struct.pack(">4I", next(self.numbers), 0, 0, 0)
        return self.compound((SEQUENCE, sequence), *operations)

    def open(self, path, access=BOTH, deny=DENY_NONE, create=None, verifier=bytes(8), owner=None):
        """Opens a file and returns its state. `create` says how to make it, if at all. Each open
        has an owner of its own unless one is given."""
        owner = owner or b"owner %d" % next(self.numbers_of_owners)
        *folders, name = path.split("/")
        lookups = [(LOOKUP, string(folder)) for folder in folders]
        arguments = struct.pack(">III", 0, access | NO_DELEGATION, deny)
        arguments += struct.pack(">Q", self.id) + opaque(owner)
        if create is None:
            arguments += struct.pack(">I", 0)
        else:
            arguments += struct.pack(">II", 1, create)
            arguments += verifier if create == EXCLUSIVE4_1 else b""
            arguments += struct.pack(">II", 0, 0)
        arguments += struct.pack(">I", 0) + string(name)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                reply = self.in_session((PUTROOTFH, b""), *lookups, (OPEN, arguments))
                state = reply.data[reply.at : reply.at + 16]
                break
            except Refused as error:
                # After its start a server waits for the clients of its predecessor.
                if error.status != GRACE or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        reply = self.in_session(
            (PUTROOTFH, b""), *lookups, (LOOKUP, string(name)), (GETFH, b"")
        )  # fmt: skip
        return Opened(self, state, reply.opaque())

    numbers_of_owners = itertools.count(1)


class Opened:
    """An open file."""

    def __init__(self, client, state, handle):
        self.client, self.state, self.handle = client, state, handle

    def write(self, data, offset=0):
        arguments = self.state + struct.pack(">QI", offset, 2) + opaque(data)
        self.client.in_session((PUTFH, opaque(self.handle)), (WRITE_OP, arguments))

    def read(self, count, offset=0):
        """Bytes, and whether the file ends behind them."""
        arguments = self.state + struct.pack(">QI", offset, count)
        reply = self.client.in_session((PUTFH, opaque(self.handle)), (READ_OP, arguments))
        is_end = bool(reply.take("I"))
        return reply.opaque(), is_end

    def downgrade(self, access, deny=DENY_NONE):
        arguments = self.state + struct.pack(">3I", 0, access, deny)
        reply = self.client.in_session((PUTFH, opaque(self.handle)), (OPEN_DOWNGRADE, arguments))
        self.state = reply.data[reply.at : reply.at + 16]

    def change(self):
        """The change attribute."""
        arguments = bitmap(CHANGE)
        reply = self.client.in_session((PUTFH, opaque(self.handle)), (GETATTR, arguments))
        assert reply.take("I") == 1 and reply.take("I") == CHANGE[0]
        return struct.unpack(">Q", reply.opaque())[0]

    def set_mode(self, mode):
        arguments = bytes(16) + bitmap(MODE) + opaque(struct.pack(">I", mode))
        self.client.in_session((PUTFH, opaque(self.handle)), (SETATTR, arguments))

    def close(self):
        arguments = struct.pack(">I", 0) + self.state
        self.client.in_session((PUTFH, opaque(self.handle)), (ACCESS_CLOSE, arguments))


def bitmap(words):
    return struct.pack(f">{1 + len(words)}I", len(words), *words)


def skip(reply, number):
    """The answer of an operation that is not the last one."""
    if number == SEQUENCE:
        reply.take("16s5I")
