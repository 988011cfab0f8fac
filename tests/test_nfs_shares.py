"""coldrise serve nfs: opens of NFSv4.1 that keep others out, as ESXi locks there."""

from support import nfs3, nfs41
from support.nfs3 import refused
from support.nfs41 import BOTH, DENY_BOTH, DENY_READ, DENY_WRITE, EXCLUSIVE4_1, GUARDED, READ, WRITE

FOLDER = "coldrise/live/trial"
DENIED = nfs41.SHARE_DENIED


def test_an_open_blocks_other_writers(live, nfs):
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


def test_a_client_file_is_kept_the_same_way(live, nfs):
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


def test_an_owner_is_bound_by_its_own_deny(live, nfs):
    server = nfs("--versions", "4")
    with nfs41.Client(server.network, "one") as one, nfs41.Client(server.network, "two") as two:
        for number, (deny, access) in enumerate([(DENY_READ, READ), (DENY_WRITE, WRITE)]):
            path, owner = f"{FOLDER}/file{number}", {"owner": b"the same"}
            made = one.open(path, BOTH, deny, create=GUARDED, **owner)
            assert refused(one.open, path, access, **owner) == DENIED
            made.close()
            again = one.open(path, BOTH, DENY_BOTH, **owner)
            assert refused(one.open, path, BOTH, DENY_BOTH, **owner) == DENIED
            again.close()
            # More access and less of a deny do not conflict.
            one.open(path, READ, **owner)
            one.open(path, WRITE, **owner)
            one.open(path, BOTH, **owner).close()
            one.open(path, READ, **owner)
            denying = one.open(path, READ, DENY_WRITE, **owner)
            assert refused(two.open, path, WRITE) == DENIED
            denying.downgrade(READ)
            two.open(path, WRITE).close()
            denying.close()
            two.open(path, BOTH, DENY_BOTH).close()


def test_a_deny_applies_to_all_images_of_a_disk(live, nfs):
    server = nfs("--versions", "3,4")
    images = ["vda.raw", "vda.vhd", "vda.vhdx", "vda.qcow2", "vda-flat.vmdk"]
    with nfs41.Client(server.network, "one") as one, nfs41.Client(server.network, "two") as two:
        for denied in images:
            holder = one.open(f"{FOLDER}/{denied}", BOTH, DENY_WRITE)
            for other in images:
                assert refused(two.open, f"{FOLDER}/{other}", BOTH) == DENIED, (denied, other)
                two.open(f"{FOLDER}/{other}", READ).close()
            # The descriptor of a flat image and files of clients are not disks.
            two.open(f"{FOLDER}/vda.vmdk", BOTH).close()
            two.open(f"{FOLDER}/trial.vmx", BOTH).close()
            holder.close()
        two.open(f"{FOLDER}/vda.vhdx", BOTH, DENY_BOTH).close()
        writer = two.open(f"{FOLDER}/vda.vhd", WRITE)
        assert refused(one.open, f"{FOLDER}/vda.raw", READ, DENY_WRITE) == DENIED
        writer.close()
        one.open(f"{FOLDER}/vda.raw", READ, DENY_WRITE)
        with server.connect() as old:
            other = old.walk(server.root(), "live/trial/vda.vhd")
            assert refused(old.write, other, 0, b"x" * 512) == nfs3.JUKEBOX
            assert old.read(other, 0, 512)
