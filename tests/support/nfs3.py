"""A client of NFSv3 (RFC 1813) that exposes statuses, handles and verifiers."""

import itertools
import struct

MOUNT, NFS = 100005, 100003

OK, PERM, NOENT, IO, ACCES, EXIST, XDEV, NOTDIR, ISDIR = 0, 1, 2, 5, 13, 17, 18, 20, 21
INVAL, FBIG, NOSPC, ROFS, NAMETOOLONG, NOTEMPTY = 22, 27, 28, 30, 63, 66
STALE, BADHANDLE, NOTSUPP, JUKEBOX = 70, 10001, 10004, 10008
FILE, FOLDER, LINK = 1, 2, 5
UNCHECKED, GUARDED, EXCLUSIVE = 0, 1, 2
UNSTABLE, DATA_SYNC, FILE_SYNC = 0, 1, 2


class Refused(Exception):
    """The server's status was not OK."""

    def __init__(self, procedure, status):
        super().__init__(f"{procedure}: status {status}")
        self.status = status


class Denied(Exception):
    """The server does not accept this client."""


class Reader:
    """Decodes XDR."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, form):
        values = struct.unpack_from(">" + form, self.data, self.at)
        self.at += struct.calcsize(">" + form)
        return values[0] if len(values) == 1 else values

    def opaque(self):
        length = self.take("I")
        found = self.data[self.at : self.at + length]
        self.at += length + -length % 4
        return found

    def attributes(self):
        """Optional attributes."""
        return self.fattr() if self.take("I") else None

    def fattr(self):
        kind, mode, links, _uid, _gid = self.take("5I")
        size, used, _rdev, fsid, fileid = self.take("5Q")
        _atime, mtime, _ctime = (self.take("2I") for _ in range(3))
        return {"type": kind, "mode": mode, "links": links, "size": size, "used": used,
                "fsid": fsid, "fileid": fileid, "mtime": mtime}  # fmt: skip

    def changes(self):
        if self.take("I"):
            self.take("Q4I")
        return self.attributes()


def opaque(data):
    return struct.pack(">I", len(data)) + data + bytes(-len(data) % 4)


def string(text):
    return opaque(text.encode())


class Rpc:
    """One connection to one program, for one thread."""

    def __init__(self, connection, program, user=0, version=3):
        self.connection, self.program, self.version = connection, program, version
        self.ids = itertools.count(1)
        # AUTH_SYS: stamp, machine, user, group, no further groups.
        credentials = struct.pack(">I", 0) + string("client") + struct.pack(">3I", user, user, 0)
        self.credentials = struct.pack(">I", 1) + opaque(credentials) + struct.pack(">2I", 0, 0)

    def call(self, procedure, arguments=b""):
        number = next(self.ids)
        header = struct.pack(">6I", number, 0, 2, self.program, self.version, procedure)
        message = header + self.credentials + arguments
        self.connection.sendall(struct.pack(">I", 1 << 31 | len(message)) + message)
        reply = Reader(self.receive())
        assert reply.take("2I") == (number, 1), "no reply to this call"
        if reply.take("I") != 0:
            raise Denied
        reply.take("I")
        reply.opaque()
        accepted = reply.take("I")
        assert accepted == 0, f"the call was not done: {accepted}"
        return reply

    def receive(self):
        message, is_last = b"", False
        while not is_last:
            mark = struct.unpack(">I", self.exactly(4))[0]
            is_last = bool(mark >> 31)
            message += self.exactly(mark & 0x7FFFFFFF)
        return message

    def exactly(self, length):
        parts = []
        while length:
            part = self.connection.recv(min(length, 1 << 20))
            if not part:
                raise ConnectionError("the server closed the connection")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def close(self):
        self.connection.close()


def mount(network, path, address="127.0.0.1", port=20048):
    """The handle of an exported folder."""
    rpc = Rpc(network.connect(port, address), MOUNT)
    try:
        reply = rpc.call(1, string(path))
        status = reply.take("I")
        if status != OK:
            raise Refused("mount", status)
        return reply.opaque()
    finally:
        rpc.close()


class Nfs:
    """NFSv3 on one connection."""

    def __init__(self, network, address="127.0.0.1", port=2049, user=0):
        self.rpc = Rpc(network.connect(port, address), NFS, user)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.rpc.close()

    def call(self, name, procedure, arguments):
        reply = self.rpc.call(procedure, arguments)
        status = reply.take("I")
        if status != OK:
            raise Refused(name, status)
        return reply

    def getattr(self, handle):
        return self.call("getattr", 1, opaque(handle)).fattr()

    def setattr(self, handle, size=None, mode=None, touch=False):
        arguments = opaque(handle)
        arguments += struct.pack(">I", 0) if mode is None else struct.pack(">2I", 1, mode)
        arguments += struct.pack(">2I", 0, 0)
        arguments += struct.pack(">I", 0) if size is None else struct.pack(">IQ", 1, size)
        arguments += struct.pack(">2I", int(touch), int(touch)) + struct.pack(">I", 0)
        self.call("setattr", 2, arguments)

    def lookup(self, folder, name):
        return self.call("lookup", 3, opaque(folder) + string(name)).opaque()

    def walk(self, handle, path):
        for name in path.split("/"):
            handle = self.lookup(handle, name)
        return handle

    def readlink(self, handle):
        reply = self.call("readlink", 5, opaque(handle))
        reply.attributes()
        return reply.opaque().decode()

    def read(self, handle, offset, count):
        """Bytes, and whether the file ends behind them."""
        reply = self.call("read", 6, opaque(handle) + struct.pack(">QI", offset, count))
        reply.attributes()
        _count, is_end = reply.take("2I")
        return reply.opaque(), bool(is_end)

    def read_all(self, handle, piece=1 << 20):
        parts, at = [], 0
        while True:
            part, is_end = self.read(handle, at, piece)
            parts.append(part)
            at += len(part)
            if is_end:
                return b"".join(parts)
            assert part, "neither bytes nor an end"

    def write(self, handle, offset, data, stable=UNSTABLE):
        """Its stability, and the write verifier."""
        arguments = opaque(handle) + struct.pack(">Q2I", offset, len(data), stable) + opaque(data)
        reply = self.call("write", 7, arguments)
        reply.changes()
        count, committed = reply.take("2I")
        assert count == len(data)
        return committed, reply.take("8s")

    def commit(self, handle):
        """The write verifier."""
        reply = self.call("commit", 21, opaque(handle) + struct.pack(">QI", 0, 0))
        reply.changes()
        return reply.take("8s")

    def create(self, folder, name, how=UNCHECKED, verifier=bytes(8), size=None, mode=None):
        """The handle of the file; an exclusive creation sends `verifier`."""
        arguments = opaque(folder) + string(name) + struct.pack(">I", how)
        if how == EXCLUSIVE:
            arguments += verifier
        else:
            arguments += struct.pack(">I", 0) if mode is None else struct.pack(">2I", 1, mode)
            arguments += struct.pack(">2I", 0, 0)
            arguments += struct.pack(">I", 0) if size is None else struct.pack(">IQ", 1, size)
            arguments += struct.pack(">2I", 0, 0)
        reply = self.call("create", 8, arguments)
        assert reply.take("I") == 1, "a file without a handle"
        return reply.opaque()

    def mkdir(self, folder, name):
        arguments = opaque(folder) + string(name) + struct.pack(">6I", 0, 0, 0, 0, 0, 0)
        reply = self.call("mkdir", 9, arguments)
        assert reply.take("I") == 1, "a folder without a handle"
        return reply.opaque()

    def symlink(self, folder, name, target):
        nothing_set = struct.pack(">6I", 0, 0, 0, 0, 0, 0)
        self.call("symlink", 10, opaque(folder) + string(name) + nothing_set + string(target))

    def remove(self, folder, name):
        self.call("remove", 12, opaque(folder) + string(name))

    def rmdir(self, folder, name):
        self.call("rmdir", 13, opaque(folder) + string(name))

    def rename(self, folder, old, new, to=None):
        to = folder if to is None else to
        self.call("rename", 14, opaque(folder) + string(old) + opaque(to) + string(new))

    def fsinfo(self, handle):
        """Maximum read and write, in bytes, and the properties."""
        reply = self.call("fsinfo", 19, opaque(handle))
        reply.attributes()
        rtmax, _, _, wtmax, *_ = reply.take("7I")
        reply.take("Q2I")
        return rtmax, wtmax, reply.take("I")

    def pathconf(self, handle):
        """The longest name, and whether the server refuses longer ones."""
        reply = self.call("pathconf", 20, opaque(handle))
        reply.attributes()
        _links, longest, refuses_longer, *_ = reply.take("6I")
        return longest, bool(refuses_longer)

    def list(self, folder, limit=1 << 16, after=0, verifier=bytes(8), calls=None):
        """[(name, file id, cookie)], with as many calls as necessary, or with `calls` of them."""
        found = []
        for _ in itertools.count() if calls is None else range(calls):
            arguments = opaque(folder) + struct.pack(">Q", after) + verifier
            reply = self.call("readdir", 16, arguments + struct.pack(">I", limit))
            reply.attributes()
            verifier = reply.take("8s")
            while reply.take("I"):
                fileid = reply.take("Q")
                name = reply.opaque().decode()
                after = reply.take("Q")
                found.append((name, fileid, after))
            if reply.take("I"):
                return found
        return found

    def list_plus(self, folder, limit=1 << 16):
        """{name: (attributes, handle)} of a folder's entries, with READDIRPLUS."""
        found, after, verifier = {}, 0, bytes(8)
        while True:
            arguments = opaque(folder) + struct.pack(">Q", after) + verifier
            reply = self.call("readdirplus", 17, arguments + struct.pack(">2I", limit, limit))
            reply.attributes()
            verifier = reply.take("8s")
            while reply.take("I"):
                reply.take("Q")
                name = reply.opaque().decode()
                after = reply.take("Q")
                attributes = reply.attributes()
                handle = reply.opaque() if reply.take("I") else None
                if name not in (".", ".."):
                    found[name] = attributes, handle
            if reply.take("I"):
                return found

    def names(self, folder):
        return sorted(name for name, _, _ in self.list(folder) if name not in (".", ".."))

    def space(self, handle):
        """Total, free and available bytes."""
        reply = self.call("fsstat", 18, opaque(handle))
        reply.attributes()
        return reply.take("3Q")


def refused(call, *arguments, **keywords):
    """The status of a failing call."""
    try:
        call(*arguments, **keywords)
    except Refused as error:
        return error.status
    raise AssertionError(f"{call.__name__}{arguments} was allowed")
