"""coldrise serve nfs: opens of NFSv4.1 that keep others out, as ESXi locks there."""

from support import nfs41
from support.nfs3 import refused
from support.nfs41 import BOTH, DENY_BOTH, DENY_WRITE, EXCLUSIVE4_1, GUARDED, READ

FOLDER = "coldrise/live/trial"
DENIED = nfs41.SHARE_DENIED


def test_an_open_keeps_others_out(live, nfs):
    server = nfs("--versions", "4")
    flat = f"{FOLDER}/vda-flat.vmdk"
    with nfs41.Client(server.network, "one") as one, nfs41.Client(server.network, "two") as two:
        disk = one.open(flat, BOTH, DENY_BOTH)
        disk.write(b"one")
        assert refused(two.open, flat, BOTH) == DENIED
        assert refused(two.open, flat, READ) == DENIED
        disk.close()
        reader = two.open(flat, READ, DENY_WRITE)
        assert reader.read(3)[0] == b"one"
        assert refused(one.open, flat, BOTH) == DENIED
        shared = one.open(flat, READ)
        reader.close()
        shared.close()
        one.open(flat, BOTH, DENY_BOTH).close()


def test_a_file_of_a_client_is_kept_the_same_way(live, nfs):
    server = nfs("--versions", "4")
    path = f"{FOLDER}/vm.vmx"
    with nfs41.Client(server.network, "one") as one, nfs41.Client(server.network, "two") as two:
        made = one.open(path, BOTH, DENY_BOTH, create=GUARDED)
        made.write(b'memsize = "96"\n')
        assert made.read(0x200) == (b'memsize = "96"\n', True)
        assert refused(two.open, path, BOTH, create=GUARDED) == nfs41.EXIST
        assert refused(two.open, path, READ) == DENIED
        made.close()
        again = two.open(path, BOTH, DENY_WRITE)
        assert again.read(0x200) == (b'memsize = "96"\n', True)
        assert refused(one.open, path, BOTH) == DENIED
        again.close()
        lock = f"{FOLDER}/lock"
        exclusive = {"create": EXCLUSIVE4_1, "verifier": b"client 1"}
        one.open(lock, BOTH, **exclusive).close()
        one.open(lock, BOTH, **exclusive).close()
        other = {"create": EXCLUSIVE4_1, "verifier": b"client 2"}
        assert refused(two.open, lock, BOTH, **other) == nfs41.EXIST
