"""coldrise attest: proofs that others can verify on any copy, and that only the key's owner can create."""

import json
import subprocess

import pytest

from support.cli import Coldrise
from support.image import Image
from support.proof import is_signed, root, sections_lead_to_roots
from support.sources import tool
from support.targets import served

pytestmark = pytest.mark.encrypted

MIB = 1 << 20
SIZE = 6 * MIB + 5 * 512


@pytest.fixture
def proven(coldrise, tmp_path):
    """A disk with holes and a short end, stored; its path, address, key and proof."""
    image = Image(SIZE)
    image.fill(100, MIB, "begin")
    image.fill(3 * MIB, 5000, "middle")
    image.fill(SIZE - 700, 700, "end")
    path = image.save(tmp_path / "vda.raw")
    address = coldrise.backup("web01", vda=path)
    key, proof = tmp_path / "key", tmp_path / "proof.json"
    made = coldrise.json("attest", "--new-key", key)
    signed = coldrise.json("attest", address, "--key", key, "-o", proof)
    assert signed["fingerprint"] == made["fingerprint"] and key.stat().st_mode & 0o077 == 0
    return path, address, key, proof


def test_others_can_verify_a_proof(coldrise, proven):
    path, address, key, proof = proven
    found = json.loads(proof.read_text())
    statement = found["statement"]
    assert f"{statement['machine']}/{statement['point']}" == address
    assert statement["disks"] == [{"disk": "vda", "root": root(path, SIZE), "size_bytes": SIZE}]
    assert is_signed(found) and sections_lead_to_roots(found)
    assert found["public_key"] == (key.parent / "key.pub").read_text()
    openssl = tool("openssl", "pkey", "-in", key, "-pubout")
    assert openssl.split() == found["public_key"].split()


def test_any_copy_is_checked(coldrise, proven, tmp_path):
    path, address, key, proof = proven
    restored = tmp_path / "restored.qcow2"
    coldrise.json("restore", address, restored)
    (tmp_path / "other").mkdir()
    other = Coldrise.encrypted(tmp_path, tmp_path / "other")
    other.init("--chunk-size", "4K")
    elsewhere = other.backup("copy", sda=path)
    trust = ("--public-key", f"{key}.pub")
    for program, copy in [(coldrise, path), (coldrise, address), (coldrise, restored),
                          (coldrise, f"vda=raw:{path}"), (other, elsewhere)]:
        done = program.json("attest", "--check", proof, *trust, copy)
        assert done["is_equal"] and done["is_trusted_key"] and done["disks"][0]["sections"] == 7
    with served(tmp_path, "file", path) as uri:
        assert coldrise.json("attest", "--check", proof, uri)["is_equal"]


def test_a_modified_copy_is_detected(coldrise, proven):
    path, _, _, proof = proven
    with open(path, "r+b") as file:
        file.seek(5 * MIB + 77)
        file.write(b"\1")
    done = coldrise.run("--json", "attest", "--check", proof, path)
    checked = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1 and not checked["is_equal"] and not checked["is_trusted_key"]
    assert checked["disks"][0]["differing_offsets"] == [5 * MIB]
    assert "DIFFERS" in coldrise.run("attest", "--check", proof, path).stdout
    # One of seven sections: samples of four find it in some runs and not in others.
    sample = ("attest", "--check", proof, path, "--sample", "50%")
    results = {coldrise.run(*sample).returncode for _ in range(20)}
    assert results == {0, 1}
    with open(path, "r+b") as file:
        file.truncate(SIZE - 512)
    shorter = coldrise.run("attest", "--check", proof, path)
    assert shorter.returncode == 1 and str(SIZE - 512) in shorter.stderr


def test_several_disks(coldrise, tmp_path, proven):
    _, _, key, _ = proven
    paths = {name: Image(2 * MIB) for name in ("vda", "vdb")}
    paths["vdb"].fill(0, MIB, "vdb")
    paths = {name: image.save(tmp_path / f"two-{name}.raw") for name, image in paths.items()}
    address = coldrise.backup("db01", **paths)
    proof = tmp_path / "two.json"
    coldrise.json("attest", address, "--key", key, "-o", proof)
    assert sections_lead_to_roots(json.loads(proof.read_text()))
    assert coldrise.json("attest", "--check", proof, address)["is_equal"]
    both = [f"{name}={path}" for name, path in paths.items()]
    assert len(coldrise.json("attest", "--check", proof, *both)["disks"]) == 2
    one = coldrise.run("attest", "--check", proof, both[0])
    assert one.returncode == 0 and "vdb was not checked" in one.stderr
    swapped = coldrise.run("attest", "--check", proof, f"vda={paths['vdb']}")
    assert swapped.returncode == 1


@pytest.mark.parametrize("size, section", [(300_032, MIB), (5 << 30, 2 * MIB)])
def test_small_and_large_disks(coldrise, proven, tmp_path, size, section):
    """Less than one section, and enough that sections grow; some of its zeroes are stored, others are holes."""
    _, _, key, _ = proven
    path, proof = tmp_path / "size.raw", tmp_path / "size.json"
    with open(path, "wb") as file:
        file.truncate(size)
        for at in (0, size // 3, size - 5000):
            file.seek(at)
            file.write(b"\7" * 5000 + bytes(70000) if at < size // 2 else b"\7" * 5000)
    address = coldrise.backup("size", vda=path)
    coldrise.json("attest", address, "--key", key, "-o", proof)
    found = json.loads(proof.read_text())
    assert found["statement"]["disks"][0]["root"] == root(path, size) and sections_lead_to_roots(found)
    assert found["sections"]["vda"]["section_bytes"] == section
    assert coldrise.json("attest", "--check", proof, path)["is_equal"]


def mutations(text):
    """Forged and broken proofs, each with a word of the answer."""
    def changed(change):
        proof = json.loads(text)
        change(proof)
        return json.dumps(proof)

    def disk(**fields):
        return changed(lambda proof: proof["statement"]["disks"][0].update(fields))

    def sections(**fields):
        return changed(lambda proof: proof["sections"]["vda"].update(fields))

    yield "", "not a valid proof"
    yield text[: len(text) // 2], "not a valid proof"
    yield "[" * 100000, "not a valid proof"
    yield disk(size_bytes=SIZE + 512), "signature"
    yield disk(size_bytes=2**63), "impossible size"
    yield disk(size_bytes=-1), "not a valid proof"
    yield disk(size_bytes=1e300), "not a valid proof"
    yield disk(root="00" * 32), "signature"
    yield disk(disk="../x"), "not a disk"
    yield changed(lambda proof: proof["statement"].update(point="20200101T000000Z")), "signature"
    yield changed(lambda proof: proof["statement"].update(version=2)), "version 2"
    yield changed(lambda proof: proof["statement"].update(version=2**70)), "not a valid proof"
    yield changed(lambda proof: proof["statement"].update(extra=1)), "not a valid proof"
    yield changed(lambda proof: proof["statement"]["disks"].append(proof["statement"]["disks"][0])), "twice"
    yield changed(lambda proof: proof.update(signature="AAAA")), "signature"
    yield changed(lambda proof: proof.update(public_key="-----BEGIN PUBLIC KEY-----")), "public key"
    yield sections(section_bytes=0), "cover"
    yield sections(section_bytes=2**63), "cover"
    yield sections(section_bytes=3 << 20), "cover"
    yield sections(hashes=[]), "cover"
    yield sections(hashes=["ab"] * 7), "hexadecimal"
    yield sections(hashes=["00" * 32] * 7), "root"
    yield sections(hashes=["é" * 32] * 7), "hexadecimal"
    yield changed(lambda proof: proof["sections"].clear()), "without sections"
    yield changed(lambda proof: proof["sections"].update(vdb=proof["sections"]["vda"])), "not name"


def test_forged_and_broken_proofs_are_refused(coldrise, proven, tmp_path):
    path, _, _, proof = proven
    forged = tmp_path / "forged.json"
    for text, word in mutations(proof.read_text()):
        forged.write_text(text)
        done = coldrise.run("attest", "--check", forged, path)
        assert done.returncode in (1, 2) and word in done.stderr, (text[:200], done.stderr)
        assert "panic" not in done.stderr and "defect" not in done.stderr


def test_keys(coldrise, proven, tmp_path):
    path, address, key, proof = proven
    output = tmp_path / "new.json"
    again = coldrise.run("attest", "--new-key", key)
    assert again.returncode == 1 and "exists" in again.stderr
    # The same statement by another key is a right proof, but not for those who know the key.
    other = tmp_path / "openssl-key"
    tool("openssl", "genpkey", "-algorithm", "ed25519", "-out", other)
    other.chmod(0o600)
    coldrise.json("attest", address, "--key", other, "-o", output)
    assert is_signed(json.loads(output.read_text()))
    foreign = coldrise.run("attest", "--check", output, "--public-key", f"{key}.pub", path)
    assert foreign.returncode == 1 and "another key" in foreign.stderr
    taken = coldrise.run("attest", address, "--key", key, "-o", proof)
    assert taken.returncode == 1 and "exists" in taken.stderr
    key.chmod(0o644)
    readable = coldrise.run("attest", address, "--key", key, "-o", tmp_path / "none.json")
    assert readable.returncode == 2 and "chmod 600" in readable.stderr
    subprocess.run(["openssl", "genrsa", "-out", other, "1024"], check=True, capture_output=True)
    other.chmod(0o600)
    rsa = coldrise.run("attest", address, "--key", other, "-o", tmp_path / "none.json")
    assert rsa.returncode == 2 and "Ed25519" in rsa.stderr
    live = coldrise.run("attest", "live/x", "--key", key, "-o", tmp_path / "none.json")
    assert live.returncode == 2 and "seal it" in live.stderr
    assert not (tmp_path / "none.json").exists()
