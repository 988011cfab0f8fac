"""A secret in the NV memory of an emulated TPM 2.0, written and read by its own commands."""

import contextlib
import pathlib
import shutil
import socket
import struct
import subprocess
import tempfile

from .nbdserver import wait_until

PERMALL = "tpm2-00.permall"
# TPM_RH_OWNER, whose password is empty, may write and read the index.
OWNER, INDEX, ATTRIBUTES, SHA256 = 0x40000001, 0x01500001, 0x02020002, 0x000B
PASSWORD = struct.pack(">IIHBH", 9, 0x40000009, 0, 0, 0)
DEFINE_SPACE, WRITE, READ = 0x12A, 0x137, 0x14E


@contextlib.contextmanager
def running(folder):
    """A swtpm on the state in this folder, new if there is none: sends it a command, returns the parameters of its answer."""
    with tempfile.TemporaryDirectory(prefix="tpm-", dir="/tmp") as place:
        path = pathlib.Path(place) / "socket"
        command = ["swtpm", "socket", "--tpm2", "--tpmstate", f"dir={folder}", "--server", f"type=unixio,path={path}",
                   "--flags", "not-need-init,startup-clear"]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process, socket.socket(socket.AF_UNIX) as near:
            def connected():
                # The socket is there before swtpm listens.
                with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                    near.connect(str(path))
                    return True

            def send(code, handles, parameters):
                body = b"".join(struct.pack(">I", handle) for handle in handles) + PASSWORD + parameters
                near.sendall(struct.pack(">HII", 0x8002, 10 + len(body), code) + body)
                answer = near.recv(4096)
                assert struct.unpack(">HII", answer[:10])[2] == 0, (code, answer.hex())
                return answer[14:14 + struct.unpack(">I", answer[10:14])[0]]

            try:
                wait_until(connected, "swtpm")
                yield send
            finally:
                process.terminate()


def store(folder, secret):
    """Makes a TPM's state in this folder, with a secret."""
    public = struct.pack(">IHIHH", INDEX, SHA256, ATTRIBUTES, 0, len(secret))
    with running(folder) as send:
        send(DEFINE_SPACE, [OWNER], struct.pack(">HH", 0, len(public)) + public)
        send(WRITE, [OWNER, INDEX], struct.pack(">H", len(secret)) + secret + struct.pack(">H", 0))


def stored(state, length):
    """The secret in a copy of the state in this file."""
    with tempfile.TemporaryDirectory(prefix="tpm-", dir="/tmp") as folder:
        shutil.copy(state, pathlib.Path(folder) / PERMALL)
        with running(folder) as send:
            return send(READ, [OWNER, INDEX], struct.pack(">HH", length, 0))[2:]
