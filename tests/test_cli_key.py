"""coldrise key: passphrases are added, changed and removed, and the data stays."""

import pytest

from support.cli import Coldrise
from support.nbdserver import read_all

pytestmark = pytest.mark.encrypted


def with_passphrase(coldrise, path, text):
    path.write_text(text + "\n", encoding="utf-8")
    return Coldrise(coldrise.repository, path)


def names(answer):
    return [entry["label"] for entry in answer["passphrases"]]


def test_a_passphrase_is_changed_while_a_machine_runs(coldrise, live, image, nbdkit, tmp_path):
    night = with_passphrase(coldrise, tmp_path / "night", "a new one")
    server = nbdkit()
    with server.connect(live) as handle:
        added = coldrise.json("key", "add", "night", "--new-passphrase-file", tmp_path / "night")
        assert names(added) == [None, "night"]
        removed = night.json("key", "remove", "initial")
        assert names(removed) == ["night"] and removed["passphrases"][0]["is_given"]
        # Open sessions continue; new ones need the new passphrase.
        handle.pwrite(b"goes on", 0)
        handle.flush()
        image.write(0, b"goes on")
        sealed = night.json("seal", "trial")["address"]
    assert coldrise.run("list").returncode == 12
    server.stop()
    coldrise.passphrase_file = tmp_path / "night"
    with nbdkit().connect(f"{sealed}/vda") as handle:
        assert read_all(handle) == image.content

    (tmp_path / "third").write_text("a third one", encoding="utf-8")
    rotated = night.json("key", "rotate", "--new-passphrase-file", tmp_path / "third")
    assert names(rotated) == ["night"]
    assert night.run("list").returncode == 12
    third = Coldrise(coldrise.repository, tmp_path / "third")
    assert third.run("verify").returncode == 0
    assert "night" in third.run("key", "list").stdout


def test_bad_requests_are_refused_and_change_nothing(coldrise, tmp_path):
    description = coldrise.repository / "repository.json"
    before = description.read_bytes()
    (tmp_path / "new").write_text("new", encoding="utf-8")
    (tmp_path / "empty").write_text("", encoding="utf-8")
    new = ("--new-passphrase-file", tmp_path / "new")
    for arguments, code, word in [
        (("add", "vault"), 2, "--new-passphrase-file"),
        (("add", "Vault", *new), 2, "a-z 0-9"),
        (("add", "initial", *new), 2, "another one"),
        (("add", "vault", "--new-passphrase-file", tmp_path / "none"), 1, "none"),
        (("add", "vault", "--new-passphrase-file", tmp_path / "empty"), 2, "empty"),
        (("add", "vault", "--new-passphrase-file", coldrise.passphrase_file), 1, "already"),
        (("remove", "initial"), 2, "only passphrase"),
        (("remove", "vault"), 1, "there is no passphrase vault, only initial"),
    ]:
        done = coldrise.run("key", *arguments)
        assert done.returncode == code, (arguments, done.stderr)
        assert word in done.stderr, (arguments, done.stderr)
    wrong = with_passphrase(coldrise, tmp_path / "wrong", "wrong")
    assert wrong.run("key", "add", "vault", *new).returncode == 12
    assert description.read_bytes() == before
    assert [path.name for path in coldrise.repository.glob("repository.json*")] == [
        "repository.json"
    ]


def test_rotating_and_adding_keep_the_cost_of_a_guess(tmp_path):
    passphrase = tmp_path / "first"
    passphrase.write_text("first\n", encoding="utf-8")
    refused = Coldrise(tmp_path / "costly", passphrase).run("init", "--no-encryption", "--guess-ms", 400)
    assert refused.returncode == 2 and "--guess-ms" in refused.stderr

    def costs(answer):
        return [(entry["memory_kib"], entry["passes"]) for entry in answer["passphrases"]]

    # It is measured: on a busy machine the cheapest guess may take as long.
    for number in range(10):
        first = Coldrise(tmp_path / f"costly{number}", passphrase)
        first.init("--guess-ms", 400)
        (cost,) = costs(first.json("key", "list"))
        if cost[0] > 19456:
            break
    assert cost[0] > 19456
    second = with_passphrase(first, tmp_path / "second", "second")
    rotated = first.json("key", "rotate", "--new-passphrase-file", second.passphrase_file)
    assert costs(rotated) == [cost]
    third = with_passphrase(first, tmp_path / "third", "third")
    added = second.json("key", "add", "vault", "--new-passphrase-file", third.passphrase_file)
    assert costs(added) == [cost, cost]
    # Lower only by a choice that is made.
    lowered = third.json(
        "key", "rotate", "--new-passphrase-file", third.passphrase_file, "--guess-ms", 25
    )
    assert costs(lowered)[1] < cost
