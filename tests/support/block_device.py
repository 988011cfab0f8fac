"""A block device of this host that is not empty."""

import contextlib
import subprocess


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
