"""Full drives."""

import os


def fill(path):
    """Fills all free space, to the last block."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            while True:
                try:
                    file.write(b"x" * size)
                except OSError:
                    break
        os.fsync(file.fileno())
