//! Files beside the database with invented or changed content.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, LazyLock};

use coldrise_block::ErrorKind;
use coldrise_store::{
    Compression, DiskDocument, DiskName, InitOptions, MachineName, MapRoot, OpenOptions,
    PassphraseSource, PointDocument, PointName, PointOrigin, Repository, RepositoryWriter,
    SessionName,
};
use proptest::prelude::*;

use crate::client_files::{CarriedFile, CarriedFiles, FileTree};
use crate::live_disk::open_live_disk;
use crate::paths::{SessionPaths, layer_path};
use crate::points::inventory::Inventory;
use crate::session_folder::document::SessionDocument;
use crate::sessions::listed::sessions;
use crate::sessions::session::Session;
use crate::{publish, seal};

const DISK_BYTES: u64 = 1 << 20;

struct Fixture {
    _folder: tempfile::TempDir,
    repository: Arc<Repository>,
    document: SessionDocument,
    point: PointDocument,
    /// The content of the session's disk.
    content: Vec<u8>,
}

fn name() -> SessionName {
    SessionName::parse("trial").unwrap()
}

fn disk() -> DiskName {
    DiskName::parse("vda").unwrap()
}

/// A session with writes and zeroes over a sealed layer.
static FIXTURE: LazyLock<parking_lot::Mutex<Fixture>> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("repo");
    let options =
        InitOptions { chunk_size_bytes: 16384, compression: Compression::None, passphrase: None };
    Repository::init(&path, &options).unwrap();
    let options = OpenOptions::default();
    let writer = RepositoryWriter::open(&path, &PassphraseSource::None, &options).unwrap();
    let point = PointDocument {
        machine: MachineName::parse("web01").unwrap(),
        point: PointName::parse("20261120T100000Z").unwrap(),
        created_at_ms: 1,
        origin: PointOrigin::Backup { sources: Vec::new() },
        disks: vec![DiskDocument {
            name: disk(),
            size_bytes: DISK_BYTES,
            root: MapRoot::EMPTY,
            layers: Vec::new(),
        }],
        configuration: None,
        parts: Vec::new(),
        is_protected: false,
        quarantine: None,
        made_in: None,
        display_name: None,
        came_by: Vec::new(),
        files: None,
    };
    writer.put_point(&point).unwrap();
    drop(writer);
    let repository = Repository::open(&path, &PassphraseSource::None, &options).unwrap();
    publish(&repository, &point, Some(name())).unwrap();
    let mut content = vec![0; DISK_BYTES as usize];
    for round in 1..3u8 {
        let session = Session::open(&repository, &name()).unwrap();
        let view = session.disk(&disk()).unwrap();
        for block in 0..20usize {
            let at = (block * 7 + usize::from(round) * 3) * 4096;
            content[at..at + 4096].fill(round * 16 + block as u8);
            view.write_at(&content[at..at + 4096], at as u64).unwrap();
        }
        view.write_zeroes(3 * 4096, 10 * 4096).unwrap();
        content[3 * 4096..13 * 4096].fill(0);
        view.flush().unwrap();
        drop((view, session));
        if round == 1 {
            seal(&repository, &name(), std::time::Duration::ZERO).unwrap();
        }
    }
    let document = SessionDocument::of(&repository, &name()).unwrap();
    parking_lot::Mutex::new(Fixture { _folder: folder, repository, document, point, content })
});

impl Fixture {
    /// Runs `look` while a file has another content.
    fn with<T>(&self, path: &PathBuf, content: &[u8], look: impl FnOnce() -> T) -> T {
        let before = std::fs::read(path).unwrap();
        std::fs::write(path, content).unwrap();
        let seen = look();
        std::fs::write(path, before).unwrap();
        seen
    }

    /// Reads the session's disk block by block. Each block must be right or damaged.
    fn assert_right_or_damaged(&self) -> Result<(), TestCaseError> {
        let view = match open_live_disk(&self.repository, &name(), &disk()) {
            Ok(view) => view,
            Err(error) => {
                prop_assert!(matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported));
                return Ok(());
            }
        };
        let mut block = [0; 4096];
        for (number, right) in self.content.chunks(4096).enumerate() {
            match view.read_at(&mut block, number as u64 * 4096) {
                Ok(()) => prop_assert!(block[..] == *right, "block {} reads wrong", number),
                Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Corrupt),
            }
        }
        Ok(())
    }
}

/// Changed bytes, and an optional truncation.
type Changes = (Vec<(prop::sample::Index, u8)>, Option<prop::sample::Index>);

fn changes() -> impl Strategy<Value = Changes> {
    let changed = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6);
    (changed, prop::option::weighted(0.2, any::<prop::sample::Index>()))
}

fn change(content: &mut Vec<u8>, (changed, cut): &Changes, among: impl Fn(usize) -> usize) {
    for (at, byte) in changed {
        let at = among(at.index(content.len()));
        content[at] = *byte;
    }
    if let Some(cut) = cut {
        content.truncate(among(cut.index(content.len())));
    }
}

fn is_damage<T>(result: coldrise_block::Result<T>) -> bool {
    matches!(result, Err(error) if error.kind() == ErrorKind::Corrupt)
}

/// Maps an offset to the used parts of a layer: the superblock, the marks, records and slots.
fn in_use(at: usize) -> usize {
    const RECORDS: usize = 64 << 10;
    match at % 8 {
        1 => at % 1100,
        2 => 4096 + at % 64,
        3 => 8192 + at % 64,
        0 | 4 => RECORDS + at % (64 * 24),
        _ => 2 * RECORDS + at % (4096 * 24),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_changed_layer_reads_right_or_is_damaged(
        changed in changes(), is_sealed: bool,
    ) {
        let fixture = FIXTURE.lock();
        let described = &fixture.document.disks[0];
        let id = if is_sealed { described.layers[0].id } else { described.top };
        let path = layer_path(&fixture.repository, &id);
        let mut content = std::fs::read(&path).unwrap();
        change(&mut content, &changed, in_use);
        fixture.with(&path, &content, || fixture.assert_right_or_damaged())?;
        fixture.assert_right_or_damaged()?;
    }

    #[test]
    fn made_up_session_documents_are_damage(
        text in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..200),
            Just("[".repeat(4000).into_bytes()),
            r#"\{"(name|disks|sealed)":[0-9\[\]{}",a-z]{0,40}\}"#.prop_map(String::into_bytes),
        ],
        is_sealed: bool,
    ) {
        let fixture = FIXTURE.lock();
        let place = SessionPaths::of(&fixture.repository, &name());
        let stored = if is_sealed { fixture.repository.encrypt_document(&place.purpose(), &text).unwrap() } else { text.clone() };
        let (read, listed, inventory) = fixture.with(&place.document(), &stored, || (
            SessionDocument::read(&fixture.repository, &place),
            sessions(&fixture.repository),
            Inventory::take(&fixture.repository, &AtomicBool::new(false)),
        ));
        prop_assert!(is_damage(read));
        prop_assert!(listed.unwrap().is_empty());
        let damaged = inventory.unwrap().damaged;
        let sealed = format!("{}/{}+1", fixture.point.machine, fixture.point.point);
        for lost in ["live/trial", &sealed] {
            prop_assert!(damaged.iter().any(|damage| damage.what == lost), "{:?}", damaged);
        }
        // One copy of the progress may have any content. Damage to both is damage to the session.
        let [first, second] = place.progress();
        fixture.with(&first, &text, || fixture.assert_right_or_damaged())?;
        let read = || SessionDocument::read(&fixture.repository, &place);
        let one = fixture.with(&first, &text, read);
        prop_assert!(one.is_ok_and(|document| document.is_some_and(|d| d.disks[0].least_sequence > 0)));
        prop_assert!(is_damage(fixture.with(&first, &text, || fixture.with(&second, &text, read))));
    }

    #[test]
    fn a_changed_list_of_files_is_a_list_or_damage(changed in changes()) {
        let text = br#"{"changed_ns":5,"files":[
            {"id":"11111111111111111111111111111111","parent":"00000000000000000000000000000000",
             "name":"inner","kind":"folder","mode":493,"changed_ns":1},
            {"id":"22222222222222222222222222222222","parent":"11111111111111111111111111111111",
             "name":"a","kind":"small","mode":420,"changed_ns":2},
            {"id":"44444444444444444444444444444444","parent":"11111111111111111111111111111111",
             "name":"c","kind":{"listed":{"modified_ns":4}},"mode":420,"changed_ns":4,"content":"00ff"},
            {"id":"33333333333333333333333333333333","parent":"11111111111111111111111111111111",
             "name":"b","kind":{"large":{"capacity_bytes":4096}},"mode":420,"changed_ns":3}]}"#;
        prop_assert_eq!(FileTree::decode(text).unwrap().len(), 4);
        let mut text = text.to_vec();
        change(&mut text, &changed, |at| at);
        match FileTree::decode(&text) {
            Ok(tree) => prop_assert!(tree.len() <= 4),
            Err(error) => prop_assert!(
                matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::InvalidInput | ErrorKind::NameTooLong)
            ),
        }
    }

    #[test]
    fn changed_carried_files_are_files_or_damage(changed in changes(), random: Vec<u8>) {
        let file = |path: &str, content: Option<&[u8]>| CarriedFile {
            path: path.to_owned(),
            content: content.map(<[u8]>::to_vec),
            mode: 0o644,
            modified_ms: 1,
        };
        let files = vec![file("inner", None), file("inner/a", Some(b"abc")), file("b", Some(b""))];
        let mut bytes = CarriedFiles { files }.encode().unwrap();
        change(&mut bytes, &changed, |at| at);
        for bytes in [bytes, random] {
            match CarriedFiles::decode(&bytes) {
                Ok(files) => prop_assert!(files.files.len() <= bytes.len()),
                Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Corrupt),
            }
        }
    }
}
