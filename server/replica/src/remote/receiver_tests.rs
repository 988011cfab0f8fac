//! A source that does not keep to the protocol.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use coldrise_block::{ErrorKind, Result};
use coldrise_line::{Class, Frame, Line, PairedLine, Received, pair};
use coldrise_session::{RepositoryAccess, SharedWriter};
use coldrise_store::{
    Compression, InitOptions, MapRoot, PassphraseSource, Repository, RepositoryId,
};

use super::*;
use crate::remote::content::{Coding, encode_head};
use crate::remote::messages::{APPLIED, Details, Names, WANTED, WHOLE};

const CHUNK: u64 = 16384;

/// An empty repository.
fn repository(folder: &Path) -> PathBuf {
    let path = folder.join("far");
    let options = InitOptions {
        chunk_size_bytes: CHUNK as u32,
        compression: Compression::None,
        passphrase: None,
    };
    Repository::init(&path, &options).unwrap();
    path
}

/// Runs `source` against a receiver of an empty repository. Returns the receiver's end.
fn end_of(prefix: &str, source: impl FnOnce(&PairedLine) + Send) -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    end_at(&repository(folder.path()), prefix, source)
}

fn end_at(path: &Path, prefix: &str, source: impl FnOnce(&PairedLine) + Send) -> Result<()> {
    let (near, far_line) = pair();
    let cancel = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let received = scope.spawn(|| receive_into(path, &far_line, prefix, &cancel));
        source(&near);
        near.close();
        received.join().unwrap()
    })
}

fn receive_into(path: &Path, line: &PairedLine, prefix: &str, cancel: &AtomicBool) -> Result<()> {
    let access = RepositoryAccess::new(path, PassphraseSource::None);
    let remote = SharedWriter::join(&access, cancel)?;
    let received = receive(line, &remote, Terms { prefix, only: &[] }, None, None, cancel);
    line.close();
    received
}

fn ask(line: &PairedLine, ask: &Ask) -> Answer {
    send(line, ask, &[]).unwrap();
    answer(line)
}

fn next(line: &PairedLine) -> Frame {
    match line.receive(&[Class::Control], Duration::from_secs(20)).unwrap() {
        Received::Frame { frame, .. } => frame,
        other => panic!("{other:?}"),
    }
}

fn answer(line: &PairedLine) -> Answer {
    let frame = next(line);
    Parts::default().take(frame.kind, &frame.body).unwrap().unwrap().0
}

fn hello(line: &PairedLine) {
    let repository =
        serde_json::from_str::<RepositoryId>(&format!("\"{}\"", "07".repeat(16))).unwrap();
    let welcome = ask(line, &Ask::Hello { version: VERSION, repository });
    assert!(
        matches!(welcome, Answer::Welcome { chunk_size_bytes, .. } if u64::from(chunk_size_bytes) == CHUNK)
    );
}

fn start(line: &PairedLine) {
    hello(line);
    let started = ask(line, &Ask::Start { base: None, size_bytes: 4 * CHUNK });
    assert!(matches!(started, Answer::Started), "{started:?}");
}

fn offer(line: &PairedLine, offset: u64, content: &[u8]) -> Frame {
    let name = *blake3::hash(content).as_bytes();
    let names = Names { number: 1, offsets: vec![offset], names: vec![name] };
    let body = names.encode(CHUNK);
    line.send(Class::Control, Frame { stream: 0, kind: NAMES, body }).unwrap();
    next(line)
}

fn bring(line: &PairedLine, content: &[u8]) {
    let mut body = encode_head(1, &[0], Coding::Stream { sequence: 0 });
    body.extend_from_slice(&zstd::bulk::compress(content, 1).unwrap());
    line.send(Class::Bulk, Frame { stream: 0, kind: CONTENT, body }).unwrap();
}

fn is_refused(answer: &Answer, word: &str) -> bool {
    matches!(answer, Answer::Failed(failure) if failure.message.contains(word))
}

#[test]
fn content_is_believed_only_if_it_has_its_name() {
    let content = vec![5; CHUNK as usize];
    let whole = end_of("", |line| {
        start(line);
        assert_eq!(offer(line, CHUNK, &content).kind, WANTED);
        bring(line, &content);
        assert_eq!(next(line).kind, APPLIED);
        assert!(matches!(ask(line, &Ask::Finish), Answer::Finished { .. }));
    });
    whole.unwrap();
    for wrong in [vec![6; CHUNK as usize], vec![5; 100], vec![5; 1 << 20]] {
        let end = end_of("", |line| {
            start(line);
            assert_eq!(offer(line, CHUNK, &content).kind, WANTED);
            bring(line, &wrong);
            assert!(is_refused(&answer(line), "broke the protocol"));
        });
        assert_eq!(end.unwrap_err().kind(), ErrorKind::Corrupt);
    }
}

#[test]
fn a_delta_without_a_base_is_asked_for_as_a_whole_once() {
    let content = vec![5; CHUNK as usize];
    let mut body = encode_head(1, &[0], Coding::Delta);
    body.extend_from_slice(&zstd::bulk::compress(&content, 1).unwrap());
    let delta = Frame { stream: 0, kind: CONTENT, body };
    let whole = end_of("", |line| {
        start(line);
        assert_eq!(offer(line, CHUNK, &content).kind, WANTED);
        line.send(Class::Bulk, delta.clone()).unwrap();
        assert_eq!(next(line).kind, WHOLE);
        bring(line, &content);
        assert_eq!(next(line).kind, APPLIED);
        assert!(matches!(ask(line, &Ask::Finish), Answer::Finished { .. }));
    });
    whole.unwrap();
    let end = end_of("", |line| {
        start(line);
        assert_eq!(offer(line, CHUNK, &content).kind, WANTED);
        line.send(Class::Bulk, delta.clone()).unwrap();
        assert_eq!(next(line).kind, WHOLE);
        line.send(Class::Bulk, delta.clone()).unwrap();
        assert!(is_refused(&answer(line), "came again"));
    });
    assert_eq!(end.unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn places_outside_the_disk_and_foreign_bases_are_refused() {
    let end = end_of("", |line| {
        start(line);
        let refused = offer(line, 4 * CHUNK, &[1; CHUNK as usize]);
        let refused: Answer =
            Parts::default().take(refused.kind, &refused.body).unwrap().unwrap().0;
        assert!(is_refused(&refused, "behind the end"));
    });
    assert_eq!(end.unwrap_err().kind(), ErrorKind::Corrupt);
    let end = end_of("", |line| {
        hello(line);
        let base = Some(MapRoot::EMPTY);
        assert!(is_refused(&ask(line, &Ask::Start { base, size_bytes: CHUNK }), "the base"));
    });
    assert_eq!(end.unwrap_err().kind(), ErrorKind::Corrupt);
}

fn document() -> PointDocument {
    PointDocument {
        machine: "web01".parse().unwrap(),
        point: "20261101T100000Z".parse().unwrap(),
        created_at_ms: 1,
        origin: coldrise_store::PointOrigin::Backup { sources: vec!["a".into()] },
        disks: vec![coldrise_store::DiskDocument {
            name: "vda".parse().unwrap(),
            size_bytes: 4 * CHUNK,
            root: MapRoot::EMPTY,
            layers: Vec::new(),
        }],
        configuration: None,
        parts: Vec::new(),
        is_protected: false,
        files: None,
        quarantine: None,
        made_in: Some(coldrise_store::MadeIn {
            repository: serde_json::from_str(&format!("\"{}\"", "07".repeat(16))).unwrap(),
            machine: "web01".parse().unwrap(),
        }),
        display_name: None,
        came_by: Vec::new(),
    }
}

fn ranges(end: u64) -> Vec<coldrise_session::ByteRanges> {
    vec![coldrise_session::ByteRanges::union(vec![(0, end)])]
}

fn details(differences: Vec<coldrise_session::ByteRanges>) -> Vec<u8> {
    Details { differences, ..Details::default() }.encode().unwrap()
}

fn announce(line: &PairedLine, bases: Vec<Option<MapRoot>>, details: &[u8]) -> Answer {
    let document = Box::new(document());
    send(line, &Ask::Announce { number: 1, document, bases }, details).unwrap();
    answer(line)
}

fn claim(line: &PairedLine) {
    hello(line);
    let claimed = ask(line, &Ask::Claim { machine: "web01".parse().unwrap() });
    assert!(matches!(claimed, Answer::Claimed));
}

#[test]
fn received_content_survives_a_lost_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = repository(folder.path());
    let content = vec![5; CHUNK as usize];
    // Whether it ends before the answer is sent or after it.
    let _ = end_at(&path, "", |line| {
        claim(line);
        announce(line, vec![None], &details(ranges(4 * CHUNK)));
        assert_eq!(offer(line, 0, &content).kind, WANTED);
        bring(line, &content);
    });
    end_at(&path, "", |line| {
        claim(line);
        let announced = announce(line, vec![None], &details(ranges(4 * CHUNK)));
        let Answer::Announced { begun } = announced else { panic!("{announced:?}") };
        assert_eq!(begun[0].unwrap().end_bytes, CHUNK);
    })
    .unwrap();
}

#[test]
fn an_announcement_of_a_foreign_base_or_an_unclaimed_machine_is_refused() {
    let whole = end_of("", |line| {
        claim(line);
        let announced = announce(line, vec![None], &details(ranges(4 * CHUNK)));
        assert!(matches!(announced, Answer::Announced { begun } if begun == [None]));
        let started = ask(line, &Ask::Start { base: None, size_bytes: 4 * CHUNK });
        assert!(matches!(started, Answer::Started), "{started:?}");
    });
    whole.unwrap();
    let foreign = end_of("", |line| {
        claim(line);
        let refused = announce(line, vec![Some(MapRoot::EMPTY)], &details(ranges(4 * CHUNK)));
        assert!(is_refused(&refused, "the base"));
    });
    assert_eq!(foreign.unwrap_err().kind(), ErrorKind::Corrupt);
    let unclaimed = end_of("", |line| {
        hello(line);
        let refused = announce(line, vec![None], &details(ranges(4 * CHUNK)));
        assert!(is_refused(&refused, "not claimed"));
    });
    assert_eq!(unclaimed.unwrap_err().kind(), ErrorKind::Corrupt);
    for wrong in [details(ranges(5 * CHUNK)), details(Vec::new()), b"no zstd".to_vec()] {
        let end = end_of("", |line| {
            claim(line);
            assert!(is_refused(&announce(line, vec![None], &wrong), "broke the protocol"));
        });
        assert_eq!(end.unwrap_err().kind(), ErrorKind::Corrupt);
    }
}

#[test]
fn unsupported_protocol_versions_are_refused() {
    let end = end_of("north-", |line| {
        let repository =
            serde_json::from_str::<RepositoryId>(&format!("\"{}\"", "07".repeat(16))).unwrap();
        let refused = ask(line, &Ask::Hello { version: VERSION + 1, repository });
        assert!(is_refused(&refused, "versions"));
    });
    assert_eq!(end.unwrap_err().kind(), ErrorKind::Unsupported);
}
