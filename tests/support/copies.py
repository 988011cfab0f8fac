"""Points with a history, for copies, and the properties that a copy must keep."""

from support.image import Image

MIB = 1 << 20


def content(coldrise, address, folder):
    path = folder / "restored.raw"
    coldrise.json("restore", address, path, "--force")
    return path.read_bytes()


def addresses(coldrise):
    return {
        f"{machine['machine']}/{point['point']}"
        for machine in coldrise.json("list")["machines"]
        for point in machine["points"]
    }


def make_history(coldrise, nbdkit, tmp_path):
    """web01: three backups of two disks, and a point sealed from the first. Returns {point: {disk: content}}."""
    vda, vdb = Image(16 * MIB), Image(3 * MIB + 4096)
    vda.fill(0, 6 * MIB, "system")
    vdb.fill(MIB, MIB, "data")
    contents = {}
    for day, at in ((1, 5), (2, 7), (3, 9)):
        vda.fill(at * MIB + 4096, 8192, f"day {day}")
        if day == 3:
            # The old content becomes a hole.
            vda.write(2 * MIB, bytes(2 * MIB))
        images = {"vda": vda.save(tmp_path / "vda.raw"), "vdb": vdb.save(tmp_path / "vdb.raw")}
        point = f"2026110{day}T100000Z"
        sources = [f"{disk}=raw:{path}" for disk, path in images.items()]
        coldrise.json("backup", "web01", *sources, "--time", point)
        contents[point] = {disk: path.read_bytes() for disk, path in images.items()}
    coldrise.publish("web01/20261101T100000Z", "trial")
    with nbdkit() as server, server.connect("live/trial/vda") as machine:
        machine.pwrite(b"\x5a" * 1024, 12 * MIB + 512)
    sealed = coldrise.json("seal", "trial")["address"].split("/")[1]
    written = bytearray(contents["20261101T100000Z"]["vda"])
    written[12 * MIB + 512 : 12 * MIB + 1536] = b"\x5a" * 1024
    contents[sealed] = {"vda": bytes(written), "vdb": contents["20261101T100000Z"]["vdb"]}
    return contents


def check(coldrise, contents, folder, machine="web01"):
    for point, disks in contents.items():
        for disk, expected in disks.items():
            assert content(coldrise, f"{machine}/{point}/{disk}", folder) == expected, (point, disk)
