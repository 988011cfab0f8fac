"""Ports for servers of the tests."""

import contextlib
import random
import socket


def free_port():
    """Below the range from which the kernel takes ports for clients, which would take it before a server listens,
    or while it is away for a moment."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
