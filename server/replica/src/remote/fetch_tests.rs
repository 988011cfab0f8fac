//! Fetches whose other side does not keep to the protocol, and rights.

use std::path::Path;
use std::sync::Arc;

use coldrise_block::NoProgress;
use coldrise_inventory::MachinePattern;
use coldrise_line::{PairedLine, pair};
use coldrise_session::RepositoryAccess;
use coldrise_store::{
    Compression, DiskDocument, InitOptions, MadeIn, OpenOptions, PassphraseSource, PointDocument,
    PointOrigin, Quarantine,
};

use coldrise_session::Catalog;
use coldrise_store::Repository;

use super::*;
use crate::remote::LineRemote;
use crate::remote::content::{Coding, encode_head};
use crate::remote::messages::{APPLIED, CONTENT, NAMES, Names, WANTED};
use crate::serve_fetch::serve_fetch;

const CHUNK: u64 = 16384;
const LIMIT: Duration = Duration::from_secs(20);

fn init(path: &Path) {
    let options = InitOptions {
        chunk_size_bytes: CHUNK as u32,
        compression: Compression::None,
        passphrase: None,
    };
    Repository::init(path, &options).unwrap();
}

fn open(path: &Path) -> Arc<Repository> {
    Repository::open(path, &PassphraseSource::None, &OpenOptions { cache_bytes: 0 }).unwrap()
}

/// Joins the writer of a repository for `work`.
fn writing<T>(path: &Path, work: impl FnOnce(&SharedWriter<'_>) -> T) -> T {
    let access = RepositoryAccess::new(path, PassphraseSource::None);
    let cancel = AtomicBool::new(false);
    work(&SharedWriter::join(&access, &cancel).unwrap())
}

fn next_frame(line: &PairedLine) -> Frame {
    match line.receive(&[Class::Control], LIMIT).unwrap() {
        Received::Frame { frame, .. } => frame,
        other => panic!("{other:?}"),
    }
}

fn next_message<T: serde::de::DeserializeOwned>(line: &PairedLine) -> T {
    let frame = next_frame(line);
    Parts::default().take(frame.kind, &frame.body).unwrap().unwrap().0
}

fn ask(line: &PairedLine, ask: &Ask) -> Answer {
    send(line, ask, &[]).unwrap();
    next_message(line)
}

fn machine(name: &str) -> MachineName {
    name.parse().unwrap()
}

fn other_repository() -> RepositoryId {
    serde_json::from_str(&format!("\"{}\"", "07".repeat(16))).unwrap()
}

/// Fetches `request` into a fresh repository, while `source` is the other side.
fn fetched(request: &FetchRequest, source: impl FnOnce(&PairedLine) + Send) -> Fetched {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("here");
    init(&path);
    let (near, remote) = pair();
    let cancel = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let source = scope.spawn(move || {
            assert!(matches!(next_message(&remote), Ask::Fetch { version: VERSION, .. }));
            source(&remote);
            remote.close();
        });
        let fetched =
            writing(&path, |here| fetch(&near, here, request, "north-", &NoProgress, &cancel));
        source.join().unwrap();
        fetched
    })
}

fn is_refused(answer: &Answer, word: &str) -> bool {
    matches!(answer, Answer::Failed(failure) if failure.message.contains(word))
}

fn hello(line: &PairedLine) {
    let welcome = ask(line, &Ask::Hello { version: VERSION, repository: other_repository() });
    assert!(matches!(welcome, Answer::Welcome { .. }), "{welcome:?}");
}

#[test]
fn a_source_adds_nothing_that_was_not_asked_for() {
    let request = FetchRequest { machines: vec![machine("web01")], ..FetchRequest::default() };
    let end = fetched(&request, |line| {
        hello(line);
        let answer = ask(line, &Ask::Claim { machine: machine("web01") });
        assert!(matches!(answer, Answer::Claimed), "{answer:?}");
        assert!(is_refused(
            &ask(line, &Ask::Claim { machine: machine("db01") }),
            "was not requested"
        ));
    });
    assert_eq!(end.copied.unwrap_err().kind(), ErrorKind::Corrupt);
    // Its points are not reported, either.
    fetched(&request, |line| {
        hello(line);
        assert!(is_refused(
            &ask(line, &Ask::Points { machine: machine("db01") }),
            "was not requested"
        ));
    });
}

#[test]
fn contradictory_reports_of_a_source_are_refused() {
    let ended = |tell: &[FetchReport]| {
        let request = FetchRequest::default();
        let tells: Vec<_> = tell.iter().map(|report| serde_json::to_vec(report).unwrap()).collect();
        fetched(&request, |line| {
            hello(line);
            for report in tells {
                let report = serde_json::from_slice(&report).unwrap();
                // Who was refused finds the line closed.
                let _ = send(line, &Ask::FetchProgress { report }, &[]);
            }
            let result = Ok(Traffic { content_bytes: 7, ..Traffic::default() });
            let _ = send(line, &Ask::Ended { result }, &[]);
        })
    };
    let machines = || FetchReport::Machines(vec![(machine("web01"), machine("web01"))]);
    let point = || {
        let point = CopiedPoint {
            point: "20261101T100000Z".parse().unwrap(),
            base: None,
            size_bytes: 1,
            read_bytes: 1,
            stored_bytes: 1,
            elapsed_ms: 1,
        };
        FetchReport::Point { machine: machine("web01"), point, traffic: Traffic::default() }
    };
    let copy = |name: &str| Box::new(MachineCopy::new(machine(name), machine(name)));
    let progress = |disk: &str| FetchReport::Progress {
        disk: disk.to_owned(),
        is_finishing: false,
        done_bytes: 1,
        total_bytes: 2,
        read_bytes: 1,
        stored_bytes: 0,
        traffic: Traffic::default(),
    };
    let good =
        ended(&[machines(), progress("web01/latest/vda"), FetchReport::Machine(copy("web01"))]);
    assert_eq!((good.traffic.content_bytes, good.copied.unwrap().machines.len()), (7, 1));
    for bad in [
        vec![machines()],
        vec![machines(), point()],
        vec![machines(), machines()],
        vec![machines(), FetchReport::Machine(copy("db01"))],
        vec![FetchReport::Machine(copy("web01"))],
        vec![progress("\u{1b}[2J")],
        vec![progress(&"x".repeat(500))],
    ] {
        let end = ended(&bad);
        assert_eq!(end.copied.unwrap_err().kind(), ErrorKind::Corrupt, "{bad:?}");
    }
}

#[test]
fn a_lost_line_keeps_the_reported_progress() {
    let request = FetchRequest::default();
    let end = fetched(&request, |line| {
        hello(line);
        let both = ["db01", "web01"].map(|name| (machine(name), machine(name))).to_vec();
        send(line, &Ask::FetchProgress { report: FetchReport::Machines(both) }, &[]).unwrap();
        let done = Box::new(MachineCopy::new(machine("db01"), machine("db01")));
        send(line, &Ask::FetchProgress { report: FetchReport::Machine(done) }, &[]).unwrap();
    });
    assert_eq!(end.loss.unwrap().kind(), ErrorKind::Io);
    let machines = end.copied.unwrap().machines;
    let facts: Vec<_> = machines
        .iter()
        .map(|machine| (machine.far_machine.as_str(), machine.error.is_some()))
        .collect();
    assert_eq!(facts, [("north-db01", false), ("north-web01", true)]);
}

/// What a site says that asks for `request` and may have the machines of `allowed`.
fn served(request: &FetchRequest, allowed: &[&str]) -> (Failure, ErrorKind) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("there");
    init(&path);
    store_point(&path, "db01");
    let source = open(&path);
    let (near, remote) = pair();
    let allowed: Vec<MachinePattern> = allowed.iter().map(|one| one.parse().unwrap()).collect();
    let cancel = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let serving = scope
            .spawn(|| serve_fetch(Arc::new(remote), &source, request, &allowed, None, &cancel));
        assert!(matches!(next_message(&near), Ask::Hello { .. }));
        let welcome =
            Answer::Welcome { repository: other_repository(), chunk_size_bytes: CHUNK as u32 };
        send(&near, &welcome, &[]).unwrap();
        let Ask::Ended { result: Err(failure) } = next_message(&near) else { panic!("no end") };
        near.close();
        (failure, serving.join().unwrap().unwrap_err().kind())
    })
}

#[test]
fn the_existence_of_a_machine_is_hidden_without_permission() {
    let request =
        |name: &str| FetchRequest { machines: vec![machine(name)], ..FetchRequest::default() };
    let (there, kind) = served(&request("north-db01"), &["north-web*"]);
    assert_eq!((there.kind.as_str(), kind), ("forbidden", ErrorKind::Forbidden));
    let (not_there, _) = served(&request("north-db02"), &["north-web*"]);
    assert_eq!(there.message.replace("db01", "db02"), not_there.message);
    let (missing, _) = served(&request("north-web01"), &["north-web*"]);
    assert!(!missing.message.contains("db01"), "{}", missing.message);
}

#[test]
fn unexpected_first_messages_are_refused() {
    let opened = |first: &dyn Fn(&PairedLine)| {
        let (near, remote) = pair();
        first(&near);
        let opened = Opening::of(&remote, &AtomicBool::new(false));
        (opened.map(|_| ()).map_err(|error| error.kind()), near)
    };
    let (other, near) = opened(&|line| {
        let ask = Ask::Fetch { version: VERSION + 1, request: FetchRequest::default() };
        send(line, &ask, &[]).unwrap();
    });
    assert_eq!(other, Err(ErrorKind::Unsupported));
    assert!(matches!(next_message(&near), Ask::Ended { result: Err(_) }));
    let (asked, _near) = opened(&|line| send(line, &Ask::Finish, &[]).unwrap());
    assert_eq!(asked, Err(ErrorKind::Corrupt));
    let (named, _near) = opened(&|line| {
        line.send(Class::Control, Frame { stream: 0, kind: NAMES, body: vec![0; 9] }).unwrap();
    });
    assert_eq!(named, Err(ErrorKind::Corrupt));
}

#[test]
fn only_the_requester_of_a_copy_can_limit_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("there");
    init(&path);
    let repository = open(&path);
    let (near, remote) = pair();
    let cancel = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let source = scope.spawn(|| {
            LineRemote::new(Arc::new(near), Repository::id(&repository), cancel).map(drop)
        });
        assert!(matches!(next_message(&remote), Ask::Hello { .. }));
        limit_fetch(&remote, Some(1)).unwrap();
        assert_eq!(source.join().unwrap().unwrap_err().kind(), ErrorKind::Corrupt);
    });
}

/// Sends one point of one disk as no source of ours does, with `change` made to its document.
fn put(
    line: &PairedLine,
    name: &str,
    content: u8,
    change: impl FnOnce(&mut PointDocument),
) -> Answer {
    let content = vec![content; CHUNK as usize];
    assert!(matches!(ask(line, &Ask::Claim { machine: machine(name) }), Answer::Claimed));
    let started = ask(line, &Ask::Start { base: None, size_bytes: CHUNK });
    assert!(matches!(started, Answer::Started), "{started:?}");
    let names = [*blake3::hash(&content).as_bytes()].to_vec();
    let body = Names { number: 1, offsets: vec![0], names }.encode(CHUNK);
    line.send(Class::Control, Frame { stream: 0, kind: NAMES, body }).unwrap();
    if next_frame(line).kind == WANTED {
        let mut body = encode_head(1, &[0], Coding::Stream { sequence: 0 });
        body.extend_from_slice(&zstd::bulk::compress(&content, 1).unwrap());
        line.send(Class::Bulk, Frame { stream: 0, kind: CONTENT, body }).unwrap();
        assert_eq!(next_frame(line).kind, APPLIED);
    }
    let Answer::Finished { root, .. } = ask(line, &Ask::Finish) else { panic!("not finished") };
    let disk =
        DiskDocument { name: "vda".parse().unwrap(), size_bytes: CHUNK, root, layers: Vec::new() };
    let mut document = PointDocument {
        machine: machine(name),
        point: "20261101T100000Z".parse().unwrap(),
        created_at_ms: 1_793_527_200_000,
        origin: PointOrigin::Backup { sources: Vec::new() },
        disks: vec![disk],
        configuration: None,
        parts: Vec::new(),
        is_protected: false,
        files: None,
        quarantine: None,
        made_in: Some(MadeIn { repository: other_repository(), machine: machine(name) }),
        display_name: None,
        came_by: Vec::new(),
    };
    change(&mut document);
    ask(line, &Ask::Put { document: Box::new(document) })
}

/// Lets `source` send into a repository.
fn sent_into<T: Send>(path: &Path, source: impl FnOnce(&PairedLine) -> T + Send) -> T {
    let (near, remote) = pair();
    let cancel = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            let Ok(Some(Opening::Copies(greeting))) = Opening::of(&remote, &cancel) else {
                panic!("no greeting")
            };
            let received = writing(path, |here| greeting.receive(&remote, here, "north-", &cancel));
            remote.close();
            received
        });
        hello(&near);
        let result = source(&near);
        near.close();
        let _ = receiving.join().unwrap();
        result
    })
}

fn store_point(path: &Path, name: &str) {
    let added = sent_into(path, |line| put(line, name, 1, |_| {}));
    assert!(matches!(added, Answer::Added), "{added:?}");
}

#[test]
fn a_source_cannot_replace_protect_or_hide_a_point_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("there");
    init(&path);
    let added = sent_into(&path, |line| {
        put(line, "web01", 1, |document| {
            document.is_protected = true;
            document.quarantine = Some(Quarantine::Chosen);
        })
    });
    assert!(matches!(added, Answer::Added), "{added:?}");
    let stored = || {
        let repository = open(&path);
        repository.point(&machine("north-web01"), &"20261101T100000Z".parse().unwrap()).unwrap()
    };
    let first = stored();
    // Retention there decides about it, and it is seen.
    assert_eq!((first.is_protected, first.quarantine), (false, None));
    let refused = sent_into(&path, |line| put(line, "web01", 2, |_| {}));
    assert!(is_refused(&refused, "is there already"), "{refused:?}");
    assert_eq!(stored(), first);
    let foreign = sent_into(&path, |line| {
        put(line, "web02", 2, |document| document.machine = machine("web01"))
    });
    assert!(is_refused(&foreign, "was not claimed"), "{foreign:?}");
    let unnamed =
        sent_into(&path, |line| put(line, "web02", 2, |document| document.made_in = None));
    assert!(is_refused(&unnamed, "where it was made"), "{unnamed:?}");
    assert_eq!(Catalog::new(&open(&path)).machines().unwrap(), [machine("north-web01")]);
}
