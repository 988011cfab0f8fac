"""A repository in a bucket, and the programs that use it."""

from support.cli import Coldrise


class Bucket:
    """A bucket with a repository, and the programs that use it."""

    def __init__(self, folder, coldrise, server):
        self.folder, self.server = folder, server.start()
        self.url = self.server.url("site a")
        self.passphrase_file = folder / "bucket-passphrase"
        self.passphrase_file.write_text("the bucket's\n", encoding="utf-8")
        # No repository of this host: only the keys and the passphrase.
        self.program = self.use(Coldrise(folder / "none", self.passphrase_file))
        self.source = self.use(coldrise)
        self.to = ["--to", self.url, "--to-passphrase-file", self.passphrase_file]

    def use(self, program, **more):
        program.more = self.server.env(**more)
        return program

    def init(self, *arguments):
        return self.program.json("bucket", "init", self.url, *arguments)

    def copy(self, *arguments):
        return self.source.json("copy", *self.to, *arguments)

    def json(self, action, *arguments):
        return self.program.json("bucket", action, self.url, *arguments)

    def points(self):
        return {point["address"] for point in self.json("list")["points"]}

    def empty(self, name="restored", *arguments):
        """A new repository, encrypted as the source is."""
        new = self.use(Coldrise(self.folder / name, self.source.passphrase_file))
        new.init(*arguments, *([] if new.passphrase_file else ["--no-encryption"]))
        return new

    def restored(self, name="restored"):
        """A new repository with all that is in the bucket."""
        new = self.empty(name, "--chunk-size", "32K")
        new.json("copy", "--from", self.url, "--from-passphrase-file", self.passphrase_file)
        return new

    def sent(self):
        return sum(path.stat().st_size for path in (self.server.data / self.server.bucket).rglob("packs/*"))
