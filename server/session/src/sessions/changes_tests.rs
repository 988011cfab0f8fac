use coldrise_block::Disk;
use coldrise_store::DiskName;

use super::*;
use crate::sessions::marks::tests::{DISKS, published};
use crate::sessions::received::ReceivedSession;
use crate::sessions::session::Session;
use crate::{Catalog, ReceivedFrom};

const SIZE: usize = 1 << 20;
const BLOCK: usize = BLOCK_SIZE_BYTES as usize;

/// Numbers that look random and come again with the same seed.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

type Disks = [Vec<u8>; 2];

fn disks(session: &Session) -> [Arc<dyn Disk>; 2] {
    DISKS.map(|name| session.disk(&DiskName::parse(name).unwrap()).unwrap())
}

/// Writes to a session, and to what it should be.
fn change(session: &Session, content: &mut Disks, numbers: &mut Numbers) {
    let disks = disks(session);
    for _ in 0..numbers.below(20) {
        let at = numbers.below(2) as usize;
        let offset = numbers.below(SIZE as u64 - 70_000) as usize;
        let length = 1 + numbers.below(70_000) as usize;
        match numbers.below(5) {
            0 => {
                let offset = offset / BLOCK * BLOCK;
                disks[at].write_zeroes(offset as u64, length as u64).unwrap();
                content[at][offset..offset + length].fill(0);
            }
            1 => disks[at].flush().unwrap(),
            _ => {
                let byte = numbers.below(255) as u8 + 1;
                disks[at].write_at(&vec![byte; length], offset as u64).unwrap();
                content[at][offset..offset + length].fill(byte);
            }
        }
    }
}

/// Applies changes to the content of the disks at another place.
fn apply(reader: &SessionChanges, changes: &[Vec<Change>], content: &mut Disks) {
    for (changes, content) in changes.iter().zip(content) {
        let mut touched = vec![false; SIZE / BLOCK];
        for change in changes {
            let (offset, length) = match *change {
                Change::Zeroes { offset_bytes, length_bytes } => {
                    content[offset_bytes as usize..][..length_bytes as usize].fill(0);
                    (offset_bytes as usize, length_bytes as usize)
                }
                Change::Block { offset_bytes, place } => {
                    let out = &mut content[offset_bytes as usize..][..BLOCK];
                    reader.read(place, offset_bytes, out).unwrap();
                    assert!(!touched[offset_bytes as usize / BLOCK], "a block is in two changes");
                    (offset_bytes as usize, BLOCK)
                }
            };
            touched[offset / BLOCK..(offset + length) / BLOCK].fill(true);
        }
    }
}

#[test]
fn the_changes_between_two_marks_turn_one_state_into_the_other() {
    for seed in 1..=24 {
        let (_folder, writer, document) = published();
        let (repository, name) = (writer.repository(), &document.name);
        let mut numbers = Numbers(u64::wrapping_mul(seed, 0x9e37_79b9_7f4a_7c15));
        let mut session = Session::open(repository, name).unwrap();
        let mut reader = SessionChanges::of(repository, name).unwrap();
        let mut content: Disks = [vec![0; SIZE], vec![0; SIZE]];
        let mut far = content.clone();
        change(&session, &mut content, &mut numbers);
        session.mark_round(None, None).unwrap();
        let mut from = reader.hold(&[]).unwrap().newest.unwrap();
        far.clone_from(&content);
        for _ in 0..12 {
            change(&session, &mut content, &mut numbers);
            match numbers.below(6) {
                0 => drop(session.seal().unwrap()),
                1 => {
                    drop(session);
                    session = Session::open(repository, name).unwrap();
                }
                _ => {}
            }
            change(&session, &mut content, &mut numbers);
            session.mark_round(None, None).unwrap();
            let marked = content.clone();
            // Writes after the mark are not in it.
            let held = reader.hold(&[from.time_ns]).unwrap();
            change(&session, &mut content, &mut numbers);
            let to = held.newest.unwrap();
            let changes = reader.between(&from, &to).unwrap();
            apply(&reader, &changes, &mut far);
            assert!(far == marked, "seed {seed}");
            from = to;
        }
    }
}

#[test]
fn the_last_writes_of_an_idle_session_get_a_mark() {
    last_writes_get_a_mark(false);
}

#[test]
fn the_last_writes_before_a_seal_get_a_mark() {
    last_writes_get_a_mark(true);
}

fn last_writes_get_a_mark(is_sealed: bool) {
    let (_folder, writer, document) = published();
    let (repository, name) = (writer.repository(), &document.name);
    let session = Session::open(repository, name).unwrap();
    disks(&session)[0].write_at(&[1; 4096], 0).unwrap();
    session.mark_round(None, None).unwrap();
    let mut reader = SessionChanges::of(repository, name).unwrap();
    let first = reader.hold(&[]).unwrap().newest.unwrap();
    disks(&session)[1].write_at(&[2; 4096], 8192).unwrap();
    session.stop_listening();
    drop(session);
    if is_sealed {
        crate::seal(repository, name, Duration::from_secs(60)).unwrap();
    }
    // Until then it is not up to date.
    let held = reader.hold(&[first.time_ns, 5]).unwrap();
    assert_eq!((held.newest.as_ref(), &held.held_ns[..]), (Some(&first), &[first.time_ns][..]));
    assert_eq!(held.current_ms, first.time_ns / 1_000_000);
    let began = Instant::now();
    let last = loop {
        let newest = reader.hold(&[first.time_ns]).unwrap().newest.unwrap();
        if newest != first {
            break newest;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "no mark");
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(last.time_ns > first.time_ns && last.time_ns / 1_000_000 <= now_ms());
    assert!(reader.hold(&[]).unwrap().current_ms > last.time_ns / 1_000_000);
    let mut content: Disks = [vec![0; SIZE], vec![0; SIZE]];
    let changes = reader.between(&first, &last).unwrap();
    assert!(changes[0].is_empty());
    apply(&reader, &changes, &mut content);
    assert_eq!(content[1][8192..12288], [2; 4096]);
    // Others open it as before.
    drop(Session::open(repository, name).unwrap());
}

#[test]
fn a_held_mark_outlives_its_rule() {
    let (_folder, writer, document) = published();
    let (repository, name) = (writer.repository(), &document.name);
    let rules = coldrise_store::MarkRules::parse("1h=1h").unwrap();
    crate::set_mark_rules(repository, name, rules).unwrap();
    let session = Session::open(repository, name).unwrap();
    let mut marks = Vec::new();
    for byte in 1..=4 {
        disks(&session)[0].write_at(&[byte; 4096], 0).unwrap();
        session.mark_round(None, None).unwrap();
        marks.push(session.marks().marks.last().unwrap().time_ns);
    }
    // The rule keeps the first mark of the hour, and the newest one.
    let mut reader = SessionChanges::of(repository, name).unwrap();
    let held = reader.hold(&marks).unwrap();
    assert_eq!(held.held_ns, marks);
    session.mark_turns_now(20);
    assert_eq!(reader.hold(&marks[..2]).unwrap().held_ns, marks[..2]);
    session.mark_turns_now(20);
    // The third one is not held any more; the newest always is.
    assert_eq!(reader.hold(&marks).unwrap().held_ns, [marks[0], marks[1], marks[3]]);
}

#[test]
fn damage_to_a_record_is_an_error_and_not_an_absent_write() {
    let (_folder, writer, document) = published();
    let (repository, name) = (writer.repository(), &document.name);
    let session = Session::open(repository, name).unwrap();
    let mut reader = SessionChanges::of(repository, name).unwrap();
    disks(&session)[0].write_at(&[1; 4096], 0).unwrap();
    session.mark_round(None, None).unwrap();
    let first = reader.hold(&[]).unwrap().newest.unwrap();
    disks(&session)[0].write_at(&[2; 8192], 65536).unwrap();
    session.mark_round(None, None).unwrap();
    let last = reader.hold(&[first.time_ns]).unwrap().newest.unwrap();
    let path = layer_path(repository, &session.document().disks[0].top);
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    use std::os::unix::fs::FileExt;
    let slot = (0..64).find(|slot| {
        let mut record = [0; 64];
        file.read_exact_at(&mut record, 65536 + slot * 64).unwrap();
        record != [0; 64]
    });
    // The number in the nonce of each record in turn is made one of long ago.
    for slot in slot.unwrap()..slot.unwrap() + 3 {
        let at = 65536 + slot * 64 + 7;
        let mut number = [0; 5];
        file.read_exact_at(&mut number, at).unwrap();
        file.write_all_at(&[0; 5], at).unwrap();
        let fresh = SessionChanges::of(repository, name).unwrap().between(&first, &last);
        assert_eq!(fresh.unwrap_err().kind(), ErrorKind::Corrupt, "slot {slot}");
        file.write_all_at(&number, at).unwrap();
    }
    assert_eq!(reader.between(&first, &last).unwrap()[0].len(), 2);
}

/// The point of a session, and the session as another site knows it.
fn origin(
    repository: &Arc<Repository>,
    document: &SessionDocument,
) -> (coldrise_store::PointDocument, ReceivedFrom) {
    let selector = coldrise_store::PointSelector::Exact(document.point.clone());
    let point = Catalog::new(repository).point(&document.machine, &selector).unwrap();
    let from = ReceivedFrom {
        link: document.machine.clone(),
        repository: *repository.id(),
        session: document.name.clone(),
        created_at_ms: document.created_at_ms,
    };
    (point, from)
}

/// Marks of one session reach another one, also after the first has lost writes.
#[test]
fn a_received_session_goes_back_to_a_common_mark() {
    for seed in 1..=12 {
        let (_folder, writer, document) = published();
        let repository = writer.repository();
        let mut numbers = Numbers(u64::wrapping_mul(seed, 0x9e37_79b9_7f4a_7c15));
        let (point, from) = origin(repository, &document);
        let received = ReceivedSession::publish(repository, &point, &from, 1000, None).unwrap();
        let far_name = received.document().name;
        let mut states: Vec<(u64, Disks)> = vec![(1000, [vec![0; SIZE], vec![0; SIZE]])];
        let mut received = Some(received);
        for step in 0..10 {
            let open = received.take().unwrap();
            let (at, (time_ns, state)) = {
                let at = numbers.below(states.len() as u64) as usize;
                (at, states[at].clone())
            };
            open.go_back(time_ns).unwrap();
            let mut content = state;
            assert!(read(&open) == content, "seed {seed}, step {step}, mark {at}");
            change(&open.session, &mut content, &mut numbers);
            let next_ns = states.last().unwrap().0 + 1000;
            if numbers.below(3) > 0 {
                open.finish(next_ns, None).unwrap();
                assert_eq!(open.times_ns().last(), Some(&next_ns));
                states.push((next_ns, content));
            }
            received = Some(match numbers.below(3) {
                0 => {
                    drop(open);
                    ReceivedSession::open(repository, &far_name).unwrap()
                }
                1 => {
                    drop(crate::seal(repository, &far_name, std::time::Duration::from_secs(60)));
                    open
                }
                _ => open,
            });
        }
        let found = ReceivedSession::find(repository, &from).unwrap().unwrap();
        assert_eq!(found.name, far_name);
        assert!(crate::Follower::all(repository, &document.machine).unwrap().is_empty());
    }
}

#[test]
fn marks_of_a_received_session_that_have_ended_stay_away_after_a_kill() {
    let (_folder, writer, document) = published();
    let repository = writer.repository();
    let (point, from) = origin(repository, &document);
    let second_ns = 1_000_000_000;
    let received = ReceivedSession::publish(repository, &point, &from, second_ns, None).unwrap();
    let far_name = received.document().name;
    // Twenty minutes of marks: of those before the last ten one of ten stays.
    for n in 2..=1200 {
        if n % 7 == 0 {
            disks(&received.session)[0].write_at(&[n as u8; 4096], 4096 * (n % 50)).unwrap();
        }
        received
            .session
            .mark_round(None, Some(crate::RoundTime { time_ns: n * second_ns, at: Instant::now() }))
            .unwrap();
    }
    received.session.flush_time_marks().unwrap();
    received.session.mark_turns_now(20);
    let listed = received.session.marks().marks.len();
    assert_eq!(received.times_ns().len(), listed);
    assert!(listed < 700, "{listed}");
    // As a kill leaves the files.
    let copy = tempfile::tempdir().unwrap();
    let top = layer_path(repository, &received.document().disks[0].top);
    let copied = copy.path().join("layer");
    std::fs::copy(&top, &copied).unwrap();
    let document = received.document();
    drop(received);
    std::fs::copy(&copied, &top).unwrap();
    let found = marks_in_layers(repository, &document).unwrap();
    let _ = far_name;
    assert_eq!(found.len(), listed);
}

#[test]
fn a_mark_that_a_kill_left_in_one_disk_is_received_again() {
    let (_folder, writer, document) = published();
    let (point, from) = origin(writer.repository(), &document);
    let second_ns = 1_000_000_000;
    let received =
        ReceivedSession::publish(writer.repository(), &point, &from, second_ns, None).unwrap();
    let name = received.document().name;
    let top = received.session.layered().next().unwrap().top().unwrap();
    top.add_time_mark(&top.pause_writes().unwrap(), 2 * second_ns, 0).unwrap();
    drop((top, received));
    let received = ReceivedSession::open(writer.repository(), &name).unwrap();
    assert_eq!(received.times_ns(), [second_ns]);
    assert!(received.finish(second_ns, None).is_err());
    received.finish(2 * second_ns, None).unwrap();
    assert_eq!(received.times_ns(), [second_ns, 2 * second_ns]);
}

#[test]
fn a_clock_that_is_set_forward_at_the_other_site_ends_no_mark() {
    let (_folder, writer, document) = published();
    let (point, from) = origin(writer.repository(), &document);
    let (second_ns, now_ns) = (1_000_000_000, coldrise_block::now_ms() * 1_000_000);
    let repository = writer.repository();
    let begun_ns = now_ns - 60 * second_ns;
    let received = ReceivedSession::publish(repository, &point, &from, begun_ns, None).unwrap();
    // Of the first ones the rule keeps one a minute when they are a day old.
    let later_ns = now_ns + 20 * 3600 * second_ns;
    let times = [begun_ns + second_ns, begun_ns + 2 * second_ns, later_ns, later_ns + second_ns];
    for time_ns in times {
        disks(&received.session)[0].write_at(&[time_ns as u8; 4096], 0).unwrap();
        received.finish(time_ns, None).unwrap();
    }
    received.session.mark_turns_now(20);
    assert_eq!(received.times_ns().len(), 5);
}

fn read(received: &ReceivedSession) -> Disks {
    let disks = received.disks().unwrap();
    [0, 1].map(|at: usize| {
        let mut bytes = vec![0; SIZE];
        disks[at].read_at(&mut bytes, 0).unwrap();
        bytes
    })
}
