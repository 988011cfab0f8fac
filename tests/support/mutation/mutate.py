"""Every mutation of every file of a repository."""

import dataclasses
import fnmatch
import os
import pathlib
import shutil

# Files whose loss or change does no harm, with the reason; they are not mutated.
EXCEPTED = {
    "repository.lock": "empty; only locked",
    "writer.lock": "empty; only locked",
    "backups.lock": "empty; only locked",
    "live/lock": "empty; only locked",
    "live/*/lock": "empty; only locked",
    "live/*/control": "a socket",
    "db/LOCK": "empty; only locked",
    "db/LOG*": "what RocksDB told people",
}


SECTOR = 512
# Of a layer, see docs/on-disk-format.md: where its records begin, their length, and that of a slot.
RECORDS, RECORDS_BYTES, RECORD, SLOT = 64 << 10, 64 << 10, 64, 4096


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One change of one file; `path` is relative to the repository."""

    path: str
    kind: str
    # Byte offset of a flip, truncation or zeroing; the other file of a swap or rollback.
    where: object = None
    bit: int = 0
    length: int = 0

    def __str__(self):
        where = "" if self.where is None else f" {self.where}"
        return f"{self.kind}{where} {self.path}" + (f" bit {self.bit}" if self.kind == "flip" else "")

    def apply(self, repository):
        path = repository / self.path
        # The repository that this one was copied from may share it.
        shutil.copyfile(path, repository / "aside")
        (repository / "aside").rename(path)
        if self.kind == "flip":
            with open(path, "r+b") as file:
                file.seek(self.where)
                byte = file.read(1)[0]
                file.seek(self.where)
                file.write(bytes([byte ^ (1 << self.bit)]))
        elif self.kind == "zero":
            with open(path, "r+b") as file:
                file.seek(self.where)
                file.write(bytes(self.length))
        elif self.kind == "truncate":
            os.truncate(path, self.where)
        elif self.kind == "delete":
            path.unlink()
        elif self.kind == "swap":
            other, aside = repository / self.where, repository / "aside"
            path.rename(aside)
            other.rename(path)
            aside.rename(other)
        else:
            shutil.copyfile(self.where, path)


def kind_of(path):
    """The kind of a file. Files of the same kind may be swapped."""
    name = pathlib.PurePath(path)
    if path.startswith("db/"):
        return "db " + (name.suffix or name.name.partition("-")[0])
    if path.startswith("live/"):
        return f"live {len(name.parts)} {name.parts[2] if len(name.parts) > 2 else ''} {name.suffix}"
    return str(name.parent)


def files_of(repository):
    """Relative paths of the files to mutate."""
    found = []
    for path in sorted(repository.rglob("*")):
        relative = str(path.relative_to(repository))
        if path.is_file() and not any(fnmatch.fnmatch(relative, pattern) for pattern in EXCEPTED):
            found.append(relative)
    return found


def positions(numbers, size, count):
    """Both ends, and further positions at random."""
    if size <= count:
        return list(range(size))
    chosen = {0, 1, size // 2, size - 2, size - 1}
    while len(chosen) < count:
        chosen.add(numbers.randrange(size))
    return sorted(chosen)


def small_parts(content):
    """Where records and cells are in a layer of one segment: time marks are cells. A slot of cells has unused ones; content is
    encrypted, and has no zeroes."""
    end = RECORDS + RECORDS_BYTES
    found = [at for at in range(RECORDS, min(end, len(content)), RECORD) if any(content[at : at + RECORD])]
    for slot in range(end, len(content), SLOT):
        used = [at for at in range(slot, slot + SLOT, RECORD) if any(content[at : at + RECORD])]
        # Each as often as all records together: there are few.
        found += used if len(used) < SLOT // RECORD else []
    return found


def mutations(fixture, numbers, count):
    """All mutations, with `count` positions in each file."""
    repository = fixture.repository
    paths = files_of(repository)
    found = []
    for path in paths:
        size = (repository / path).stat().st_size
        content = (repository / path).read_bytes()
        places = positions(numbers, size, count)
        if path.startswith("layers/") or path.endswith(".layer"):
            # Most of a layer is unused space: also choose positions in its used part.
            used = [at for at in range(0, size, 64) if any(content[at : at + 64])]
            sample = numbers.sample(used, min(count, len(used)))
            small = small_parts(content)
            sample = sorted({*sample, *numbers.sample(small, min(count, len(small)))})
            places = sorted({*places, *sample})
            found += [Mutation(path, "zero", at, length=64) for at in sample]
            found += [Mutation(path, "zero", at // SECTOR * SECTOR, length=SECTOR) for at in sample]
        found += [Mutation(path, "flip", at, numbers.randrange(8)) for at in places]
        found += [Mutation(path, "truncate", at) for at in places]
        found.append(Mutation(path, "delete"))
        others = [other for other in paths if other > path and kind_of(other) == kind_of(path)]
        others = [other for other in others if (repository / other).read_bytes() != content]
        for other in numbers.sample(others, min(len(others), max(2, count // 4))):
            found.append(Mutation(path, "swap", other))
        known = {content}
        for version in reversed(fixture.versions):
            older = version / path
            if older.is_file() and older.read_bytes() not in known:
                known.add(older.read_bytes())
                found.append(Mutation(path, "roll back to", older))
    return found
