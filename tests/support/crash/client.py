"""NBD connections that keep many requests under way, in one thread.

One thread sees all requests leave and all replies come, so their order is known
without locks.
"""

import errno
import os
import select
import socket
import time

import nbd

# The error of a request whose server has gone.
GONE = (errno.ENOTCONN, errno.EPIPE, errno.ECONNRESET, errno.ESHUTDOWN, errno.EBADF)


class Connection:
    """One connection to one export; it is usable after `wait_until_open`."""

    def __init__(self, server, export, finished):
        """`finished(request, error)` is called for every reply from `Connections.turn`."""
        self.handle = server.handle(export, strict=False)
        self.handle.aio_connect_unix(str(server.socket))
        self.size_bytes = None
        self.is_gone = False
        self._finished = finished

    def wait_until_open(self):
        while self.handle.aio_is_connecting():
            self.handle.poll(-1)
        self.size_bytes = self.handle.get_size()

    def _reply(self, request):
        def callback(error):
            self._finished(request, error.value)
            return 1

        return callback

    def write(self, request, offset, content, is_fua):
        flags = nbd.CMD_FLAG_FUA if is_fua else 0
        self._send(request, self.handle.aio_pwrite, content, offset, flags=flags)

    def zero(self, request, offset, length, is_fua, keep_space):
        flags = (nbd.CMD_FLAG_FUA if is_fua else 0) | (nbd.CMD_FLAG_NO_HOLE if keep_space else 0)
        self._send(request, self.handle.aio_zero, length, offset, flags=flags)

    def trim(self, request, offset, length, is_fua):
        flags = nbd.CMD_FLAG_FUA if is_fua else 0
        self._send(request, self.handle.aio_trim, length, offset, flags=flags)

    def flush(self, request):
        self._send(request, self.handle.aio_flush)

    def read(self, request, offset, length):
        request.buffer = nbd.Buffer(length)
        self._send(request, self.handle.aio_pread, request.buffer, offset)

    def _send(self, request, command, *arguments, flags=0):
        try:
            command(*arguments, completion=self._reply(request), flags=flags)
        except nbd.Error:
            # The callback reports it too if the request was taken.
            self.is_gone = True

    @property
    def under_way(self):
        return 0 if self.is_gone else self.handle.aio_in_flight()

    def notify(self, can_read):
        try:
            if can_read:
                self.handle.aio_notify_read()
            else:
                self.handle.aio_notify_write()
        except nbd.Error:
            self.is_gone = True
        if self.handle.aio_is_dead() or self.handle.aio_is_closed():
            self.is_gone = True

    def break_off(self):
        """Disconnects without notice, like a killed client."""
        with socket.socket(fileno=os.dup(self.handle.aio_get_fd())) as ours:
            ours.shutdown(socket.SHUT_RDWR)

    def close(self):
        """Disconnects in order; requests in flight are answered first."""
        if not self.is_gone:
            try:
                self.handle.shutdown()
            except nbd.Error:
                pass
        self.is_gone = True


class Connections:
    """All connections of a load."""

    def __init__(self, connections):
        self.all = list(connections)

    @property
    def alive(self):
        return [connection for connection in self.all if not connection.is_gone]

    def turn(self, timeout_s):
        """Waits for replies and processes them. True if there was one."""
        poll = select.poll()
        waiting = {}
        for connection in self.alive:
            direction = connection.handle.aio_get_direction()
            events = 0
            if direction & nbd.AIO_DIRECTION_READ:
                events |= select.POLLIN
            if direction & nbd.AIO_DIRECTION_WRITE:
                events |= select.POLLOUT
            descriptor = connection.handle.aio_get_fd()
            poll.register(descriptor, events)
            waiting[descriptor] = connection, direction
        ready = poll.poll(max(0, int(timeout_s * 1000)))
        for descriptor, events in ready:
            connection, direction = waiting[descriptor]
            can_read = events & (select.POLLIN | select.POLLHUP | select.POLLERR)
            connection.notify(bool(can_read and direction & nbd.AIO_DIRECTION_READ))
        return bool(ready)

    def drain(self, timeout_s=30):
        """Processes replies until none is outstanding or every server is gone."""
        end = time.monotonic() + timeout_s
        while any(connection.under_way for connection in self.alive):
            if time.monotonic() > end:
                raise AssertionError(f"requests without a reply for {timeout_s} s")
            self.turn(0.1)

    def close(self):
        for connection in self.all:
            connection.close()
