"""Disk images with known content, and a model of what was written to them."""

import random


class Image:
    """A disk's content in memory, with the ranges that were ever stored."""

    def __init__(self, size_bytes):
        self.content = bytearray(size_bytes)
        self.stored = []

    def __len__(self):
        return len(self.content)

    def fill(self, offset, length, seed):
        """Fills a range with incompressible, reproducible bytes."""
        self.write(offset, random.Random(seed).randbytes(length))

    def write(self, offset, data):
        assert offset + len(data) <= len(self.content)
        self.content[offset : offset + len(data)] = data
        self.stored.append((offset, len(data)))

    def zero(self, offset, length):
        assert offset + length <= len(self.content)
        self.content[offset : offset + length] = bytes(length)

    def trim(self, offset, length, block=4096):
        """Makes whole blocks read as zeroes; the rest is unchanged. The disk's short last block
        counts as whole."""
        end = offset + length
        first = -(-offset // block) * block
        last = end if end == len(self.content) else end // block * block
        if last > first:
            self.zero(first, last - first)

    def read(self, offset, length):
        return bytes(self.content[offset : offset + length])

    def save(self, path):
        """Writes a sparse raw file: only what was stored takes space."""
        with open(path, "wb") as file:
            file.truncate(len(self.content))
            for offset, length in self.stored:
                file.seek(offset)
                file.write(self.content[offset : offset + length])
        return path
