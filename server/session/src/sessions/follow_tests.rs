use super::*;
use crate::seal;
use crate::sessions::marks::session_marks;
use crate::sessions::marks::tests::{DISKS, filled_with, found, published};
use crate::sessions::unpublish::unpublish;

const SOURCE: &str = "libvirt:web01";

/// A session that follows the machine of the fixture's point.
fn following(repository: &Arc<Repository>, plain: &SessionDocument) -> SessionName {
    let selector = coldrise_store::PointSelector::Exact(plain.point.clone());
    let point = crate::Catalog::new(repository).point(&plain.machine, &selector).unwrap();
    let rules = MarkRules::parse("1s=366d").unwrap();
    Follower::publish(repository, &point, None, SOURCE, rules).unwrap().name
}

fn fill(follower: &Follower, disks: &[&str], byte: u8) {
    for name in disks {
        let disk = follower.disk(&DiskName::parse(name).unwrap()).unwrap();
        let byte = if *name == DISKS[0] { byte } else { byte ^ 0x80 };
        disk.write_at(&[byte; 16384], 8192).unwrap();
    }
}

fn finish(follower: &Follower, is_consistent: bool) -> Round {
    let round = follower.new_round().consistent(is_consistent);
    follower.finish_round(round, follower.now()).unwrap();
    round
}

#[test]
fn the_newest_mark_names_the_last_complete_round_after_each_opening() {
    let (_folder, writer, plain) = published();
    let repository = writer.repository();
    let name = following(repository, &plain);
    let follower = Follower::open(repository, &name, SOURCE).unwrap();
    assert_eq!(follower.last_round(), None);
    fill(&follower, &DISKS, 1);
    let first = finish(&follower, false);
    assert_eq!(follower.last_round(), Some(first));
    fill(&follower, &DISKS, 2);
    let second = finish(&follower, true);
    assert!(second.name().unwrap() > first.name().unwrap());
    // A round that did not end.
    fill(&follower, &DISKS[..1], 3);
    drop(follower);
    let follower = Follower::open(repository, &name, "qmp:/run/web01").unwrap();
    assert_eq!(follower.last_round(), Some(second));
    assert_eq!(follower.document().follows.as_deref(), Some("qmp:/run/web01"));
    assert!(follower.new_round().name().unwrap() > second.name().unwrap());
    let marks = session_marks(repository, &name).unwrap();
    let rounds: Vec<_> = marks.marks.iter().map(|mark| mark.round).collect();
    assert_eq!(rounds, [Some(first), Some(second)]);
    assert_eq!(marks.progress, Some(FollowProgress::default()));
}

#[test]
fn a_seal_is_of_the_newest_mark_and_not_of_the_mixture_after_it() {
    let (_folder, writer, plain) = published();
    let repository = writer.repository();
    let name = following(repository, &plain);
    let follower = Follower::open(repository, &name, SOURCE).unwrap();
    fill(&follower, &DISKS, 1);
    let refused = seal(repository, &name, SEAL_PATIENCE).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NotFound, "{refused}");
    finish(&follower, false);
    fill(&follower, &DISKS[..1], 2);
    let sealed = seal(repository, &name, SEAL_PATIENCE).unwrap().point;
    assert_eq!(found(repository, &sealed), 1);
    // The rest of the round goes to the next layer.
    fill(&follower, &DISKS[1..], 2);
    let last = finish(&follower, false);
    assert_eq!(follower.last_round(), Some(last));
    // A round whose writes were all sealed before its mark.
    fill(&follower, &DISKS, 3);
    seal(repository, &name, SEAL_PATIENCE).unwrap();
    finish(&follower, false);
    let again = seal(repository, &name, SEAL_PATIENCE).unwrap().point;
    assert_eq!(found(repository, &again), 3);
    let same = seal(repository, &name, SEAL_PATIENCE).unwrap().point;
    assert_eq!(same.point, again.point);
    fill(&follower, &DISKS[..1], 4);
    drop(follower);
    let ended = unpublish(repository, &name, false).unwrap().unwrap().point;
    assert_eq!(found(repository, &ended), 3);
}

#[test]
fn nothing_else_writes_a_session_that_follows_a_machine() {
    let (_folder, writer, plain) = published();
    let repository = writer.repository();
    let name = following(repository, &plain);
    let served = Session::open(repository, &name).err().unwrap();
    assert_eq!(served.kind(), ErrorKind::Busy);
    let follower = Follower::open(repository, &name, SOURCE).unwrap();
    assert_eq!(Follower::open(repository, &name, SOURCE).err().unwrap().kind(), ErrorKind::Busy);
    // Writes alone make no mark.
    fill(&follower, &DISKS, 1);
    follower.session.mark_turn_now();
    assert!(session_marks(repository, &name).unwrap().marks.is_empty());
    let disk = follower.disk(&DiskName::parse(DISKS[0]).unwrap()).unwrap();
    assert_eq!(filled_with(&*disk), 1);
    drop(disk);
    drop(follower);
    let found = |name: Option<&SessionName>| Follower::find(repository, &plain.machine, name);
    assert_eq!(found(None).unwrap().unwrap().name, name);
    assert_eq!(found(Some(&plain.name)).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert!(found(Some(&SessionName::parse("other").unwrap())).unwrap().is_none());
    let discarded = unpublish(repository, &name, true).unwrap();
    assert!(discarded.is_none() && found(None).unwrap().is_none());
}
