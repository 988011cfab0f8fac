//! A source that does not keep to the protocol, or whose messages were damaged.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use coldrise_block::now_ms;
use coldrise_line::{PairedLine, pair};
use coldrise_session::{SessionMark, publish, session_marks};
use coldrise_store::{
    Compression, DiskDocument, InitOptions, MapRoot, OpenOptions, PassphraseSource, PointDocument,
    PointOrigin, RepositoryWriter, SessionName,
};

use super::*;
use crate::remote::fetch::Opening;
use crate::remote::messages::{Ask, VERSION};

const SIZE: u64 = 1 << 20;
const BLOCK: u64 = 4096;
const DISKS: [&str; 2] = ["vda", "vdb"];
const POINT: &str = "20261120T100000Z";
const DAY_S: u64 = 86_400;
const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(300);

/// A repository with a session that has two marks: empty disks, and blocks of `first`.
struct Far {
    _folder: tempfile::TempDir,
    path: PathBuf,
    writer: RepositoryWriter,
    opening: LiveOpening,
    name: SessionName,
    /// The times of its marks, in seconds since 1970.
    times_s: [u64; 2],
}

fn point(machine: &str) -> PointDocument {
    let disk = |name| DiskDocument {
        name: DiskName::parse(name).unwrap(),
        size_bytes: SIZE,
        root: MapRoot::EMPTY,
        layers: Vec::new(),
    };
    PointDocument {
        machine: MachineName::parse(machine).unwrap(),
        point: POINT.parse().unwrap(),
        created_at_ms: 1,
        origin: PointOrigin::Backup { sources: Vec::new() },
        disks: DISKS.map(disk).to_vec(),
        configuration: None,
        parts: Vec::new(),
        is_protected: false,
        files: None,
        quarantine: None,
        made_in: None,
        display_name: None,
        came_by: Vec::new(),
    }
}

fn mark(time_s: u64) -> LiveMark {
    LiveMark { time_ns: time_s * 1_000_000_000, round: None }
}

/// Two blocks of one byte on a disk.
fn first(disk: u16) -> Changed {
    let mut changed = Changed::of(disk, true);
    for at in [3, 9] {
        changed.push(at * BLOCK, BLOCK, &[7 + disk as u8; BLOCK as usize]);
    }
    changed
}

fn content_of_first(disk: u16) -> Vec<u8> {
    let mut content = vec![0; SIZE as usize];
    for at in [3, 9] {
        content[at * BLOCK as usize..][..BLOCK as usize].fill(7 + disk as u8);
    }
    content
}

fn of_message(ask: &LiveAsk) -> Frame {
    of_json(&serde_json::to_string(ask).unwrap())
}

fn of_json(json: &str) -> Frame {
    let mut body = (json.len() as u32).to_le_bytes().to_vec();
    body.extend_from_slice(json.as_bytes());
    Frame { stream: 0, kind: MESSAGE, body }
}

fn of_changes(body: Vec<u8>) -> Frame {
    Frame { stream: 0, kind: CHANGES, body }
}

fn changes(changed: &Changed) -> Frame {
    of_changes(changed.encode().unwrap())
}

/// Changes of the first disk, made byte by byte.
fn raw(disk: u16, kind: u8, count: u32, ranges: &[(u64, u64)], content: &[u8]) -> Frame {
    let mut body = disk.to_le_bytes().to_vec();
    body.push(kind);
    body.extend(count.to_le_bytes());
    for (offset, length) in ranges {
        body.extend(offset.to_le_bytes());
        body.extend(length.to_le_bytes());
    }
    body.extend(content);
    of_changes(body)
}

fn back(time_s: u64) -> Frame {
    of_message(&LiveAsk::Back { time_ns: mark(time_s).time_ns })
}

fn finish(time_s: u64, changes: u64) -> Frame {
    of_message(&LiveAsk::Mark { mark: mark(time_s), changes, current_ms: 0 })
}

/// The next message of the receiver; `None` at the end of the line.
fn answer(line: &PairedLine) -> Option<LiveAnswer> {
    answer_within(line, LONG).expect("an answer")
}

/// `None` if none comes; an answer is `None` at the end of the line.
fn answer_within(line: &PairedLine, limit: Duration) -> Option<Option<LiveAnswer>> {
    match line.receive(&[Class::Control], limit) {
        Ok(Received::Frame { frame, .. }) => {
            Some(Some(Parts::default().take(frame.kind, &frame.body).unwrap().unwrap().0))
        }
        Ok(Received::Nothing) => None,
        Ok(Received::Closed) | Err(_) => Some(None),
    }
}

/// Whether an answer comes to it at once.
fn is_begin(frame: &Frame) -> bool {
    let text = String::from_utf8_lossy(&frame.body);
    frame.kind == MESSAGE && ["{\"begin\":", "{\"back\":"].iter().any(|word| text.contains(word))
}

impl Far {
    fn new() -> Far {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("far");
        let options = InitOptions {
            chunk_size_bytes: 16384,
            compression: Compression::None,
            passphrase: None,
        };
        Repository::init(&path, &options).unwrap();
        let options = OpenOptions::default();
        let writer = RepositoryWriter::open(&path, &PassphraseSource::None, &options).unwrap();
        for machine in ["web01", "db01"] {
            writer.put_point(&point(machine)).unwrap();
        }
        let other = SessionName::parse("other").unwrap();
        publish(writer.repository(), &point("db01"), Some(other)).unwrap();
        let opening = LiveOpening {
            machine: MachineName::parse("web01").unwrap(),
            repository: *writer.repository().id(),
            session: SessionName::parse("trial").unwrap(),
            created_at_ms: 1,
            disks: DISKS.map(|name| (DiskName::parse(name).unwrap(), SIZE)).to_vec(),
        };
        // In different minutes: the rule keeps both for a day.
        let now_s = now_ms() / 1000;
        let times_s = [now_s - 120, now_s - 60];
        let name = SessionName::parse("web01-1").unwrap();
        let far = Far { _folder: folder, path, writer, opening, name, times_s };
        let begin = LiveAsk::Begin { point: POINT.parse().unwrap(), mark: mark(times_s[0]) };
        let frames =
            [of_message(&begin), changes(&first(0)), changes(&first(1)), finish(times_s[1], 2)];
        far.send(&frames).unwrap();
        far.check();
        far
    }

    fn marks(&self) -> Vec<SessionMark> {
        session_marks(self.writer.repository(), &self.name).unwrap().marks
    }

    /// What a receiver does with a line whose other end is given to `source`.
    fn receive(
        &self,
        opening: &LiveOpening,
        link: &str,
        prefix: &str,
        source: impl FnOnce(&PairedLine),
    ) -> Result<()> {
        let (near, far_line) = pair();
        let link = MachineName::parse(link).unwrap();
        let receivers = LiveReceivers::default();
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| {
                let terms = LiveTerms { link: &link, prefix, is_valid: &|| true };
                let never = AtomicBool::new(false);
                let repository = self.writer.repository();
                let received = receivers.receive(&far_line, repository, opening, &terms, &never);
                far_line.close();
                received
            });
            source(&near);
            near.close();
            receiver.join().expect("the receiver panicked")
        })
    }

    /// Sends frames after the opening. Returns the end of the receiver.
    fn send(&self, frames: &[Frame]) -> Result<()> {
        self.receive(&self.opening, "site", "", |line| {
            let Some(State { session, .. }) = state(line) else { return };
            assert!(session.is_none_or(|session| session == self.name));
            for frame in frames {
                let class = if frame.kind == CHANGES { Class::Bulk } else { Class::Control };
                // It may have ended the line already.
                let _ = line.send(class, frame.clone());
                if is_begin(frame) && !matches!(answer(line), Some(LiveAnswer::Ready { .. })) {
                    return;
                }
            }
            // Until it has ended the line, or has nothing more to say.
            while answer_within(line, SHORT).is_some_and(|answer| answer.is_some()) {}
        })
    }

    /// Sends frames that are refused with `word`: no mark is made, and nothing else in the repository changes.
    fn refused(&self, frames: &[Frame], word: &str) {
        let before = self.others();
        let error = self.send(frames).expect_err(word);
        assert!(error.full_message().contains(word), "{word}: {}", error.full_message());
        assert_eq!(self.marks().len(), 2, "{word}");
        assert_eq!(self.others(), before, "{word}");
    }

    /// Both marks show what they are of.
    fn check(&self) {
        let received = ReceivedSession::open(self.writer.repository(), &self.name).unwrap();
        for (time_s, is_empty) in self.times_s.into_iter().zip([true, false]) {
            received.go_back(mark(time_s).time_ns).unwrap();
            for (number, disk) in (0..).zip(received.disks().unwrap()) {
                let mut bytes = vec![0; SIZE as usize];
                disk.read_at(&mut bytes, 0).unwrap();
                let is_right = match is_empty {
                    true => bytes.iter().all(|byte| *byte == 0),
                    false => bytes == content_of_first(number),
                };
                assert!(is_right, "disk {number} at {time_s}");
            }
        }
    }

    /// The files of the repository but those of the session, with their lengths and times of change.
    fn others(&self) -> BTreeMap<PathBuf, (u64, std::time::SystemTime)> {
        let document =
            ReceivedSession::find(self.writer.repository(), &self.from()).unwrap().unwrap();
        let layers: Vec<String> = document.disks.iter().map(|disk| disk.top.to_string()).collect();
        let mut found = BTreeMap::new();
        gather(&self.path, &mut found);
        let own = found.iter().filter(|(path, _)| path.ends_with("session.json"));
        let newest = own.max_by_key(|(_, (_, changed))| *changed).unwrap().0;
        let folder = newest.parent().unwrap().to_owned();
        found.retain(|path, _| {
            let name = path.file_name().unwrap().to_string_lossy();
            !path.starts_with(&folder) && !layers.iter().any(|layer| name.contains(layer))
        });
        found
    }

    fn from(&self) -> ReceivedFrom {
        ReceivedFrom {
            link: MachineName::parse("site").unwrap(),
            repository: self.opening.repository,
            session: self.opening.session.clone(),
            created_at_ms: self.opening.created_at_ms,
        }
    }
}

fn gather(folder: &Path, found: &mut BTreeMap<PathBuf, (u64, std::time::SystemTime)>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let metadata = entry.metadata().unwrap();
        match metadata.is_dir() {
            true => gather(&entry.path(), found),
            false => {
                found.insert(entry.path(), (metadata.len(), metadata.modified().unwrap()));
            }
        }
    }
}

/// What a receiver says first.
struct State {
    session: Option<SessionName>,
    times_ns: Vec<u64>,
}

fn state(line: &PairedLine) -> Option<State> {
    match answer(line)? {
        LiveAnswer::State { session, times_ns } => Some(State { session, times_ns }),
        _ => None,
    }
}

#[test]
fn changes_that_cannot_be_are_refused_and_make_no_mark() {
    let far = Far::new();
    let [_, newest] = far.times_s;
    let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 3).unwrap();
    let full = [5; BLOCK as usize];
    for (frame, word) in [
        (raw(0, 0, 1, &[(SIZE, BLOCK)], &[]), "outside of its disk"),
        (raw(0, 0, 1, &[(SIZE - BLOCK, BLOCK + 1)], &[]), "outside of its disk"),
        (raw(0, 0, 1, &[(u64::MAX - 10, BLOCK)], &[]), "outside of its disk"),
        (raw(0, 1, 1, &[(BLOCK, u64::MAX)], &full), "outside of its disk"),
        (raw(0, 0, 1, &[(0, 0)], &[]), "outside of its disk"),
        (raw(2, 0, 1, &[(0, BLOCK)], &[]), "unknown disk"),
        (raw(u16::MAX, 0, 1, &[(0, BLOCK)], &[]), "unknown disk"),
        (raw(0, 1, 1000, &[(0, BLOCK)], &[]), "too short"),
        (raw(0, 0, u32::MAX, &[(0, BLOCK)], &[]), "too many ranges"),
        (raw(0, 0, 4096, &[(0, BLOCK)], &[]), "too short"),
        (raw(0, 1, 2, &[(0, BLOCK), (BLOCK, BLOCK)], &full), "another length"),
        (raw(0, 1, 1, &[(0, SIZE)], &[0; 1 << 19]), "another length"),
        (raw(0, 1, 0, &[], &full), "another length"),
        (raw(0, 0, 1, &[(0, BLOCK)], &full), "unknown kind of changes"),
        (raw(0, 9, 1, &[(0, BLOCK)], &full), "unknown kind of changes"),
        (raw(0, 2, 1, &[(0, SIZE)], &bomb), "cannot be decompressed"),
        (raw(0, 2, 1, &[(0, BLOCK)], &full), "cannot be decompressed"),
        (of_changes(Vec::new()), "too short"),
        (Frame { stream: 0, kind: 200, body: vec![1; 100] }, "unknown frame"),
        (Frame { stream: 0, kind: MESSAGE, body: vec![1] }, "no length"),
        (of_json("{\"mark\":{}}"), "unknown message"),
        (
            of_json(
                "{\"mark\":{\"mark\":{\"time_ns\":-1,\"round\":null},\"changes\":0,\"current_ms\":0}}",
            ),
            "unknown message",
        ),
        (
            of_json(
                "{\"begin\":{\"point\":\"../../live\",\"mark\":{\"time_ns\":1,\"round\":null}}}",
            ),
            "unknown message",
        ),
    ] {
        far.refused(&[back(newest), frame, finish(newest + 1, 1)], word);
    }
    far.check();
    // Then one that keeps to the protocol is served.
    far.send(&[back(newest), changes(&first(1)), finish(newest + 1, 1)]).unwrap();
    assert_eq!(far.marks().len(), 3);
    far.check();
}

#[test]
fn marks_out_of_turn_are_refused() {
    let far = Far::new();
    let [oldest, newest] = far.times_s;
    let now_s = now_ms() / 1000;
    let begin =
        |time_s| of_message(&LiveAsk::Begin { point: POINT.parse().unwrap(), mark: mark(time_s) });
    let unknown = of_message(&LiveAsk::Begin {
        point: "20201120T100000Z".parse().unwrap(),
        mark: mark(newest + 1),
    });
    let change = || changes(&first(0));
    let then = newest + 1;
    for (frames, word) in [
        (vec![finish(then, 0)], "before its changes"),
        (vec![change()], "changes of no mark"),
        (vec![back(newest + 1), finish(then + 1, 0)], "no mark of that time"),
        (vec![back(newest), back(oldest), finish(then, 0)], "begins twice"),
        (vec![back(newest), begin(then), finish(then + 1, 0)], "begins twice"),
        (vec![back(newest), finish(then, 1), back(oldest), change()], "begins twice"),
        (vec![unknown], "20201120T100000Z"),
        (vec![back(newest), finish(then, 2), finish(then + 1, 0), change()], "before its changes"),
        // Going back, and again.
        (vec![back(newest), finish(newest, 0)], "not later"),
        (vec![back(newest), finish(oldest, 0)], "not later"),
        (vec![back(newest), finish(0, 0)], "not later"),
        (vec![begin(0)], "not later"),
        (vec![back(newest), finish(now_s + 400 * DAY_S, 0)], "ahead of the clock"),
        (vec![back(newest), finish(u64::MAX / 1_000_000_000, 0)], "ahead of the clock"),
        (vec![begin(u64::MAX / 1_000_000_000)], "ahead of the clock"),
    ] {
        far.refused(&frames, word);
    }
    // Fewer changes than the mark has.
    for count in [2, 5, u64::MAX] {
        far.send(&[back(newest), change(), finish(then, count)]).unwrap();
    }
    assert_eq!(far.marks().len(), 2);
    far.check();
}

#[test]
fn the_same_mark_twice_and_many_marks_of_one_second_make_one() {
    let far = Far::new();
    let [_, newest] = far.times_s;
    let again = [back(newest), finish(newest + 1, 0), finish(newest + 1, 0)];
    let error = far.send(&again).unwrap_err();
    assert!(error.full_message().contains("not later"), "{}", error.full_message());
    assert_eq!(far.marks().len(), 3);
    let of_second = |n: u64| {
        let mark = LiveMark { time_ns: mark(newest + 2).time_ns + n, round: None };
        of_message(&LiveAsk::Mark { mark, changes: 0, current_ms: u64::MAX })
    };
    let mut frames = vec![back(newest + 1)];
    frames.extend((0..20_000).map(of_second));
    let error = far.send(&frames).unwrap_err();
    assert!(error.full_message().contains("not later"), "{}", error.full_message());
    assert_eq!(far.marks().len(), 4);
    far.check();
}

#[test]
fn nothing_of_others_is_opened() {
    let far = Far::new();
    let there = |opening: &LiveOpening, link: &str, prefix: &str| {
        let mut found = None;
        let received = far.receive(opening, link, prefix, |line| found = state(line));
        (received, found)
    };
    let mine = there(&far.opening, "site", "").1.unwrap();
    assert_eq!((mine.session.as_ref(), mine.times_ns.len()), (Some(&far.name), 2));
    // Of another link, another repository, another publish, and a session that no site sends.
    let other = LiveOpening { created_at_ms: 2, ..far.opening.clone() };
    let names = ["other", "web01-1"].map(|name| LiveOpening {
        session: SessionName::parse(name).unwrap(),
        ..far.opening.clone()
    });
    assert!(there(&far.opening, "another", "").1.unwrap().session.is_none());
    for opening in names.iter().chain([&other]) {
        let found = there(opening, "site", "").1.unwrap();
        assert!(found.session.is_none() && found.times_ns.is_empty());
    }
    // Disks that the session does not have.
    let mut large = far.opening.clone();
    large.disks[1].1 = u64::MAX;
    let mut none = far.opening.clone();
    none.disks.clear();
    let mut many = far.opening.clone();
    many.disks = vec![many.disks[0].clone(); 100_000];
    for opening in [large, none, many] {
        let error = there(&opening, "site", "").0.unwrap_err();
        assert!(error.full_message().contains("other disks"), "{}", error.full_message());
    }
    // Machines without the prefix, and disks that the point does not have.
    let before = far.others();
    let begin = LiveAsk::Begin { point: POINT.parse().unwrap(), mark: mark(far.times_s[0]) };
    let db = MachineName::parse("db01").unwrap();
    let fewer = LiveOpening { disks: other.disks[..1].to_vec(), ..other.clone() };
    for (opening, prefix) in
        [(&other, "berlin-"), (&LiveOpening { machine: db, ..other.clone() }, "web"), (&fewer, "")]
    {
        let received = far.receive(opening, "site", prefix, |line| {
            state(line).unwrap();
            line.send(Class::Control, of_message(&begin)).unwrap();
            assert!(matches!(answer(line), Some(LiveAnswer::Failed(_))));
        });
        received.unwrap_err();
    }
    assert_eq!(far.others(), before);
    // Names that are none.
    let json = serde_json::to_string(&Ask::Live { version: VERSION, opening: far.opening.clone() })
        .unwrap();
    for name in ["../other", "a/b", "..", ".", "", "a\\u0000b", "/etc"] {
        for known in ["trial", "web01", "vda"] {
            let bad = json.replace(&format!("\"{known}\""), &format!("\"{name}\""));
            assert_ne!(bad, json);
            let (near, far_line) = pair();
            near.send(Class::Control, of_json(&bad)).unwrap();
            let opened = Opening::of(&far_line, &AtomicBool::new(false));
            let error = opened.err().unwrap_or_else(|| panic!("{known} as {name:?}"));
            assert!(error.full_message().contains("unknown message"), "{}", error.full_message());
        }
    }
    far.check();
}

/// What a source sends.
fn recording(far: &Far) -> Vec<Frame> {
    let [_, newest] = far.times_s;
    let mut zeroes = Changed::of(1, false);
    zeroes.push(9 * BLOCK, BLOCK, &[]);
    vec![back(newest), changes(&first(0)), changes(&zeroes), finish(newest + 1, 2)]
}

#[test]
fn a_recording_that_ends_anywhere_makes_no_mark() {
    let far = Far::new();
    let recorded = recording(&far);
    for (number, frame) in recorded.iter().enumerate() {
        for length in 0..frame.body.len() {
            let mut frames = recorded.clone();
            frames[number].body.truncate(length);
            // The frames after it come, too.
            assert!(far.send(&frames).is_err(), "{length} bytes of frame {number}");
        }
        far.send(&recorded[..number]).unwrap();
        assert_eq!(far.marks().len(), 2, "frame {number}");
    }
    far.check();
    far.send(&recorded).unwrap();
    assert_eq!(far.marks().len(), 3);
    far.check();
}

#[test]
fn bits_that_flip_in_a_recording_change_no_mark_of_before() {
    let far = Far::new();
    let recorded = recording(&far);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut below = |limit: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % limit as u64) as usize
    };
    let mut refused = 0;
    for flip in 0..300 {
        let mut frames = recorded.clone();
        let number = below(frames.len());
        let at = below(frames[number].body.len());
        frames[number].body[at] ^= 1 << below(8);
        refused += usize::from(far.send(&frames).is_err());
        if flip % 40 == 0 {
            far.check();
        }
    }
    far.check();
    let latest_s = now_ms() / 1000 + 367 * DAY_S;
    let times: Vec<u64> = far.marks().iter().map(SessionMark::unix_seconds).collect();
    assert_eq!(times[..2], far.times_s);
    assert!(times.iter().all(|time_s| *time_s <= latest_s), "{times:?}");
    assert!(refused > 150, "{refused}");
}
