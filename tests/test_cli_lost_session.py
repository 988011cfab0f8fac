"""A session's document is lost: the points that were sealed from it are restored, the rest is dropped."""

import json

import pytest

from support.nbdserver import wait_until

BLOCK = 4096


@pytest.fixture
def sealed(coldrise, live, nbdkit):
    """Two points that no writer has entered into the catalog, and unsealed writes."""
    points = []
    with nbdkit() as server, server.connect(live) as handle:
        for round_number in (1, 2):
            handle.pwrite(bytes([round_number]) * BLOCK, BLOCK)
            handle.flush()
            points.append(coldrise.json("seal", "trial")["address"])
        handle.pwrite(bytes([3]) * BLOCK, BLOCK)
        handle.flush()
    wait_until(lambda: not coldrise.json("sessions")["sessions"][0]["is_served"], "the close")
    return points


def flip(path):
    kept = bytearray(path.read_bytes())
    kept[len(kept) // 2] ^= 1
    path.write_bytes(kept)


def session_file(coldrise):
    (path,) = (coldrise.repository / "live").glob("*/session.json")
    return path


def damage_document(coldrise):
    flip(session_file(coldrise))


def remove_document(coldrise):
    session_file(coldrise).unlink()


def damage_progress(coldrise):
    notes = list((coldrise.repository / "live").glob("*/progress*"))
    assert len(notes) == 2
    for note in notes:
        flip(note)


LOSSES = {
    "damaged": damage_document,
    "missing": remove_document,
    "progress": damage_progress,
}


def answer(coldrise, *arguments, code):
    done = coldrise.run("--json", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("loss", LOSSES)
def test_sealed_points_are_restored_and_the_session_is_dropped(
    coldrise, sealed, image, loss, tmp_path
):
    LOSSES[loss](coldrise)
    # Every command names the lost data and the next step.
    assert answer(coldrise, "list", code=0)["lost"] == sealed
    listed = coldrise.run("list").stderr
    assert "coldrise repair" in listed and "forget" not in listed, listed
    verified = coldrise.run("verify")
    assert verified.returncode == 1 and "coldrise unpublish trial --discard" in verified.stdout
    examined = coldrise.run("doctor")
    assert examined.returncode == 1, examined.stdout
    assert all(name in examined.stdout for name in (*sealed, "live/trial")), examined.stdout
    assert "nothing is lost" not in examined.stdout
    refused = coldrise.run("gc")
    assert refused.returncode == 1 and "coldrise repair" in refused.stderr, refused.stderr
    # Points that only markers hold are not dropped with the session.
    early = coldrise.run("unpublish", "trial", "--discard")
    assert early.returncode == 1 and "coldrise repair" in early.stderr, early.stderr

    repaired = answer(coldrise, "repair", code=1)
    assert repaired["restored_points"] == 2
    assert [damage["what"] for damage in repaired["damaged_documents"]] == ["live/trial"]
    assert answer(coldrise, "list", code=0)["lost"] == []
    for round_number, point in enumerate(sealed, 1):
        target = tmp_path / f"{round_number}.raw"
        coldrise.json("restore", f"{point}/vda", target)
        content = bytearray(image.content)
        content[BLOCK : 2 * BLOCK] = bytes([round_number]) * BLOCK
        assert target.read_bytes() == bytes(content)

    coldrise.json("unpublish", "trial", "--discard")
    assert answer(coldrise, "verify", code=0)["is_clean"]
    assert answer(coldrise, "repair", code=0)["restored_points"] == 0
    coldrise.json("forget", sealed[0])
    coldrise.json("gc")
    # Those of the second point: the layer with the unsealed writes is gone.
    assert len(list((coldrise.repository / "layers").iterdir())) == 2
    assert coldrise.run("doctor").returncode == 0
    coldrise.publish(sealed[1], "trial")


def test_a_damaged_session_does_not_block_seals_of_others(coldrise, sealed, point):
    damage_document(coldrise)
    coldrise.publish(point, "other")
    made = coldrise.json("seal", "other")["address"]
    assert made not in sealed and made.endswith("+3")


def test_sealed_points_are_not_reported_as_restored(coldrise, sealed):
    repaired = answer(coldrise, "repair", code=0)
    assert repaired["restored_points"] == 0 and repaired["is_clean"]


@pytest.mark.parametrize("loss", LOSSES)
def test_the_name_of_a_lost_session_is_taken(coldrise, sealed, point, loss):
    LOSSES[loss](coldrise)
    for command in (["publish", point], ["publish", "--force", point], ["boot", point]):
        refused = coldrise.run(*command, "--name", "trial")
        assert refused.returncode == 1, (command, refused.stdout)
        for part in ("live/trial", "coldrise repair", "coldrise unpublish trial --discard"):
            assert part in refused.stderr, refused.stderr
        assert "another name" in refused.stderr, refused.stderr
    repaired = coldrise.run("repair")
    assert "2 restore points restored from their markers" in repaired.stdout, repaired.stdout
    coldrise.json("unpublish", "trial", "--discard")
    coldrise.publish(sealed[1], "trial")
    assert coldrise.json("seal", "trial")["address"].endswith("+3")


@pytest.mark.parametrize("loss", LOSSES)
def test_a_publish_without_a_name_skips_the_name_of_a_lost_session(coldrise, point, loss):
    assert coldrise.json("publish", point)["session"] == "web01-1"
    LOSSES[loss](coldrise)
    assert coldrise.json("publish", point)["session"] == "web01-2"


def test_repair_restores_one_point_from_its_marker(coldrise, live):
    assert live
    coldrise.json("seal", "trial")
    remove_document(coldrise)
    assert "1 restore point restored from its marker\n" in coldrise.run("repair").stdout


def test_repair_names_a_disk_with_two_lost_layers_once(coldrise, live, nbdkit):
    with nbdkit() as server, server.connect(live) as handle:
        for byte in (1, 2):
            handle.pwrite(bytes([byte]) * BLOCK, BLOCK)
            layers = list((coldrise.repository / "layers").iterdir())
            coldrise.json("seal", "trial")
    wait_until(lambda: not coldrise.json("sessions")["sessions"][0]["is_served"], "the close")
    assert len(layers) == 2
    for layer in layers:
        layer.unlink()
    lines = coldrise.run("repair").stdout.splitlines()
    lost = [line for line in lines if line.startswith("lost: live/trial/vda: ")]
    assert len(lost) == 1, lines


def test_a_damaged_session_is_reported_once(coldrise, sealed):
    damage_document(coldrise)
    said = coldrise.run("list").stderr
    assert said.count("session.json") == 1, said
