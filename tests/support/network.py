"""A private network, with a port 111 of its own."""

import concurrent.futures
import contextlib
import ctypes
import os
import signal
import socket
import subprocess

CLONE_NEWNET = 0x40000000

# nfs-ganesha ignores a network with only loopback; and clients with another address than 127.0.0.1
# need one.
OTHER_ADDRESS = "192.0.2.1"

SETUP = f"""
ip link set lo up && ip address add {OTHER_ADDRESS}/32 dev lo &&
mount -t tmpfs tmpfs /run && echo ready && exec sleep infinity
"""


class Network:
    """A network namespace, and a /run for rpcbind's socket."""

    def __init__(self):
        command = ["unshare", "--net", "--mount"]
        if os.geteuid() != 0:
            command.append("--map-root-user")
        self.process = subprocess.Popen(
            [*command, "sh", "-c", SETUP], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        assert self.process.stdout.readline() == b"ready\n"

    def command(self, *arguments):
        """The same command, run in this network."""
        enter = ["nsenter", "--target", self.process.pid, "--net", "--mount", "--root", "--"]
        return [str(argument) for argument in (*enter, *arguments)]

    def run(self, *arguments, timeout_s=60):
        """The finished process, with any exit code."""
        return subprocess.run(
            self.command(*arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )

    def connect(self, port, address="127.0.0.1"):
        """A connected socket. It stays in this network, also when used elsewhere."""

        def connect():
            libc = ctypes.CDLL(None, use_errno=True)
            with open(f"/proc/{self.process.pid}/ns/net", "rb") as namespace:
                # It applies only to this thread, which ends here.
                if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            return socket.create_connection((address, port), timeout=60)

        with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
            return pool.submit(connect).result()

    def close(self):
        """Ends all processes in it: rpcbind remains if a test killed its parent."""
        network = os.readlink(f"/proc/{self.process.pid}/ns/net")
        for process in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process}/ns/net") == network:
                    os.kill(int(process), signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
