"""libnfs, in a process inside the server's network."""

import ctypes
import ctypes.util
import json
import subprocess
import sys

SERVER, EXPORT = b"127.0.0.1", b"/coldrise"


class Libnfs:
    """A mounted datastore with at most one open file."""

    def __init__(self, network, version):
        self.process = subprocess.Popen(
            network.command(sys.executable, __file__, version),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, call, *arguments):
        self.process.stdin.write(json.dumps([call, *arguments]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def done(self, call, *arguments):
        answer = self.ask(call, *arguments)
        assert "error" not in answer, answer
        return answer["value"]

    def refused(self, call, *arguments):
        """The errno of a failing call."""
        answer = self.ask(call, *arguments)
        assert "error" in answer, f"{call}{arguments} was allowed"
        return answer["errno"]

    def list(self, path):
        return self.done("list", path)

    def open(self, path, flags):
        self.done("open", path, flags)

    def write(self, data, offset):
        self.done("write", data.hex(), offset)

    def read(self, length, offset):
        return bytes.fromhex(self.done("read", length, offset))

    def flush(self):
        self.done("flush")

    def close_file(self):
        self.done("close")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


class Entry(ctypes.Structure):
    """The start of struct nfsdirent."""


Entry._fields_ = [("next", ctypes.POINTER(Entry)), ("name", ctypes.c_char_p)]


class Mounted:
    """The main loop of the process inside."""

    def __init__(self, version):
        self.library = ctypes.CDLL(ctypes.util.find_library("nfs") or "libnfs.so.13")
        for name in ("nfs_init_context", "nfs_readdir"):
            getattr(self.library, name).restype = ctypes.c_void_p
        self.library.nfs_readdir.restype = ctypes.POINTER(Entry)
        self.library.nfs_get_error.restype = ctypes.c_char_p
        self.context = ctypes.c_void_p(self.library.nfs_init_context())
        self.library.nfs_set_version(self.context, version)
        self.check(self.library.nfs_mount(self.context, SERVER, EXPORT))
        self.file = ctypes.c_void_p()

    def check(self, value):
        if value < 0:
            # The library may quote memory that it has freed.
            what = self.library.nfs_get_error(self.context).decode(errors="replace")
            raise OSError(-value, what)
        return value

    def list(self, path):
        folder = ctypes.c_void_p()
        self.check(self.library.nfs_opendir(self.context, path.encode(), ctypes.byref(folder)))
        names = []
        while entry := self.library.nfs_readdir(self.context, folder):
            names.append(entry.contents.name.decode())
        self.library.nfs_closedir(self.context, folder)
        return names

    def open(self, path, flags):
        opened = ctypes.c_void_p()
        name = path.encode()
        self.check(self.library.nfs_open(self.context, name, flags, ctypes.byref(opened)))
        self.file = opened

    def write(self, data, offset):
        data = bytes.fromhex(data)
        offset, length = ctypes.c_uint64(offset), ctypes.c_uint64(len(data))
        written = self.library.nfs_pwrite(self.context, self.file, offset, length, data)
        assert self.check(written) == len(data)

    def read(self, length, offset):
        buffer = ctypes.create_string_buffer(length)
        offset, count = ctypes.c_uint64(offset), ctypes.c_uint64(length)
        found = self.library.nfs_pread(self.context, self.file, offset, count, buffer)
        return buffer.raw[: self.check(found)].hex()

    def flush(self):
        self.check(self.library.nfs_fsync(self.context, self.file))

    def close(self):
        self.check(self.library.nfs_close(self.context, self.file))


def main():
    mounted = Mounted(int(sys.argv[1]))
    for line in sys.stdin:
        call, *arguments = json.loads(line)
        try:
            answer = {"value": getattr(mounted, call)(*arguments)}
        except OSError as error:
            answer = {"error": str(error), "errno": error.errno}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
