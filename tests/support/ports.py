"""Ports for servers of the tests."""

import contextlib
import itertools
import os
import random
import socket


def ports_of_this_worker():
    """Below the range from which the kernel takes ports for clients and for servers that want any: it would take one
    before the test's own server has it, or while that is stopped. Each worker of pytest has its own ones."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 16
    ports = range(21000 + 700 * worker, 21700 + 700 * worker)
    first = random.randrange(len(ports))
    return itertools.cycle([*ports[first:], *ports[:first]])


PORTS = ports_of_this_worker()


def free_port():
    """A free port of the loopback that this worker has not handed out recently."""
    for port in PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
