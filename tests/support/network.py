"""A private network, with a port 111 of its own."""

import concurrent.futures
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys

CLONE_NEWNET = 0x40000000

# nfs-ganesha ignores a network with only loopback; and clients with another address than 127.0.0.1
# need one.
OTHER_ADDRESS = "192.0.2.1"

SETUP = f"""
ip link set lo up && ip address add {OTHER_ADDRESS}/32 dev lo &&
mount -t tmpfs tmpfs /run && echo ready && exec sleep infinity
"""


RELAY = """
import socket, sys, threading
listener, port = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
def copy(one, other):
    try:
        while data := one.recv(65536):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)
    except OSError:
        pass
while True:
    near, _ = listener.accept()
    far = socket.create_connection(("127.0.0.1", port))
    for pair in ((near, far), (far, near)):
        threading.Thread(target=copy, args=pair, daemon=True).start()
"""


class Network:
    """A network namespace, and a /run for rpcbind's socket."""

    def __init__(self):
        self.relays = []
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

    def relay(self, port):
        """Programs outside reach this port of the network at the same port of their own loopback address, until
        the network is closed."""
        with socket.socket() as listener:
            # It stays in the network of its maker.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(64)
            self.relays.append(subprocess.Popen(
                self.command(sys.executable, "-c", RELAY, listener.fileno(), port), stdin=subprocess.DEVNULL,
                pass_fds=[listener.fileno()]))

    def close(self):
        """Ends all processes in it: rpcbind remains if a test killed its parent."""
        place = f"/proc/{self.process.pid}/ns/net"
        # While it is open its number is not given to a network of another test.
        with open(place, "rb"):
            network = os.readlink(place)
            for process in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{process}/ns/net") == network:
                        os.kill(int(process), signal.SIGKILL)
        for relay in self.relays:
            relay.wait()
        self.process.wait()
        self.process.stdout.close()
