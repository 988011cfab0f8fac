"""An empty FUSE file system under a type of the test's choice, without a library."""

import contextlib
import ctypes
import os
import stat
import struct
import threading

LOOKUP, GETATTR, OPENDIR, READDIR, STATFS, INIT = 1, 3, 27, 28, 17, 26
FORGET = {2, 42}
ATTRIBUTES = struct.pack("<QQQQQQIIIIIIIIII", 1, 0, 0, 0, 0, 0, 0, 0, 0,
                         stat.S_IFDIR | 0o755, 2, 0, 0, 0, 4096, 0)
ANSWERS = {
    INIT: struct.pack("<IIIIHHIIHH8I", 7, 31, 65536, 0, 1, 1, 4096, 1, 1, 0, *[0] * 8),
    GETATTR: struct.pack("<QII", 1, 0, 0) + ATTRIBUTES,
    STATFS: struct.pack("<QQQQQIIII24x", 1 << 20, 1 << 20, 1 << 20, 9, 9, 4096, 255, 4096, 0),
    OPENDIR: struct.pack("<QII", 1, 0, 0),
    READDIR: b"",
}
libc = ctypes.CDLL(None, use_errno=True)


def serve(device):
    """Answers until it is unmounted."""
    while True:
        try:
            request = os.read(device, 1 << 18)
        except OSError:
            return
        _length, operation, unique = struct.unpack_from("<IIQ", request)
        if operation in FORGET:
            continue
        answer = ANSWERS.get(operation)
        error = 0 if answer is not None else -2 if operation == LOOKUP else -38
        answer = answer or b""
        os.write(device, struct.pack("<IiQ", 16 + len(answer), error, unique) + answer)


@contextlib.contextmanager
def fuse_mount(folder, kind):
    """Mounts it at `folder`; `kind` is its type in /proc/self/mountinfo."""
    folder.mkdir()
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
    done = libc.mount(b"test", str(folder).encode(), kind.encode(), 0, options.encode())
    assert done == 0, os.strerror(ctypes.get_errno())
    server = threading.Thread(target=serve, args=(device,), daemon=True)
    server.start()
    try:
        yield folder
    finally:
        libc.umount2(str(folder).encode(), 2)
        server.join(timeout=30)
        os.close(device)
