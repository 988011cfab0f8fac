"""coldrise serve nfs shows that a point was forgotten, without a restart."""

from support import nfs3
from support.nbdserver import wait_until


def test_a_forgotten_point_vanishes_from_a_running_server(coldrise, point, image, nfs, tmp_path):
    newer = coldrise.backup("web01", vda=tmp_path / "vda.raw")
    server = nfs()
    root = server.root()
    with server.connect() as client:
        folder = client.lookup(root, "web01")
        names = [address.split("/")[1] for address in (point, newer)]
        assert sorted(client.names(folder)) == [*names, "latest"]
        assert client.read_all(client.walk(root, f"{point}/vda.raw")) == image.content
        coldrise.json("forget", point)
        wait_until(lambda: sorted(client.names(folder)) == [names[1], "latest"], "it to vanish")
        assert nfs3.refused(client.lookup, folder, names[0]) == nfs3.NOENT
        assert client.read_all(client.walk(root, f"{newer}/vda.raw")) == image.content
        coldrise.json("forget", "--all", "web01")
        wait_until(lambda: client.names(root) == ["live"], "the machine to vanish")
        assert nfs3.refused(client.lookup, root, "web01") == nfs3.NOENT
