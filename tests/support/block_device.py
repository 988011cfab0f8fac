"""Block devices of this host."""

import contextlib
import errno
import os
import subprocess

from support.nbdserver import wait_until


@contextlib.contextmanager
def block_device(backing, size):
    """The path of a loop device full of bytes 0xff; its content is in the file `backing`."""
    backing.write_bytes(b"\xff" * size)
    made = subprocess.run(["losetup", "--find", "--show", backing], capture_output=True, text=True, check=True)
    device = made.stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


@contextlib.contextmanager
def mounted_apart(device, folder):
    """Mounts a device in a namespace of its own. The private network of another test, created meanwhile, would get a copy
    of a mount that all see, and keep the device in use as long as it lives."""
    holder = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", 'mount "$0" "$1" && echo ready && exec sleep infinity', device, folder],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"ready\n"
        yield
    finally:
        # The mount goes with the last process in it.
        holder.kill()
        holder.communicate()
        wait_until(lambda: is_free(device), "the end of the mount")


def is_free(device):
    try:
        os.close(os.open(device, os.O_RDONLY | os.O_EXCL))
    except OSError as error:
        assert error.errno == errno.EBUSY
        return False
    return True
