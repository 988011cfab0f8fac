//! Files that are there and not listed, or the other way round.

use super::*;
use crate::rocks::SstWriter;

/// The database takes a file of chunks over that no commit names; its path.
fn hand_over(writer: &RepositoryWriter, first: ChunkId) -> PathBuf {
    let database = writer.repository().database();
    let path = database.path().join("handed-over.sst");
    let mut file = SstWriter::create(database, &path).unwrap();
    (first..first + 10).for_each(|id| file.put(&id.to_be_bytes(), b"chunk").unwrap());
    database.ingest_chunks(&file.finish().unwrap()).unwrap();
    let files = database.listed_files(Family::Chunks).unwrap();
    let is_it = |file: &&LiveFile| *file.smallest == first.to_be_bytes()[..];
    database.path_of(files.iter().find(is_it).unwrap())
}

/// The drive failed when the list of the files was synced: RocksDB deletes what it has listed.
#[test]
fn a_file_that_is_missing_and_was_never_committed_stops_nobody() {
    let fixture = Fixture::new();
    let a = content(1, 1000);
    let writer = fixture.open().unwrap();
    let root = write(&writer, &a);
    let next = writer.repository().next_chunk().unwrap();
    let path = hand_over(&writer, next);
    drop(writer);
    std::fs::remove_file(&path).unwrap();
    // What a compaction left that was killed has nothing new.
    let reader = fixture.open_to_read();
    let database = reader.database();
    for (number, family) in [(999_997, Family::Maps), (999_999, Family::State)] {
        let file = database.path_of(&database.listed_files(family).unwrap()[0]);
        std::fs::copy(file, path.with_file_name(format!("{number}.sst"))).unwrap();
    }
    std::fs::write(path.with_file_name("999998.sst"), b"half").unwrap();
    assert_eq!(fixture.damaged_files(), [], "nothing refers to it");
    for _ in 0..2 {
        let writer = fixture.open().unwrap();
        assert_eq!(assert_never_wrong(&writer, root, &a), 0);
        let b = content(2, 1000);
        let other = write(&writer, &b);
        assert_eq!(assert_never_wrong(&writer, other, &b), 0);
        assert!(find_damage(&writer, &[verified(root, &a), verified(other, &b)]).found.is_clean());
        drop(writer);
        assert_eq!(fixture.damaged_files(), []);
    }
}

/// Killed while the log was written to files: they are there, and the list is as before.
#[test]
fn files_that_hold_what_the_log_still_holds_stop_nobody() {
    let fixture = Fixture::new();
    let writer = fixture.open().unwrap();
    let root = write(&writer, &content(1, 300));
    let killed = fixture.copy();
    writer.repository().database().flush().unwrap();
    drop(writer);
    let new = fixture.open_to_read();
    for family in [Family::State, Family::Maps, Family::Chunks] {
        for file in new.database().listed_files(family).unwrap() {
            let path = new.database().path_of(&file);
            std::fs::copy(&path, database_path(&killed.path).join(&file.name[1..])).unwrap();
        }
    }
    assert_eq!(killed.damaged_files(), []);
    let writer = killed.open().unwrap();
    assert_eq!(assert_never_wrong(&writer, root, &content(1, 300)), 0);
}

#[test]
fn a_file_that_may_have_been_committed_is_left_to_a_repair() {
    type Harm = fn(&Fixture, RepositoryWriter);
    let cases: [(&str, Harm); 3] = [
        ("a committed chunk was in it", |_, _| {}),
        ("another file is missing", |fixture, writer| {
            fixture.lose(writer, &[Family::Maps], |_| true);
        }),
        ("the list has lost its end", |fixture, writer| {
            let manifest = fixture.manifest();
            let end = manifest.metadata().unwrap().len();
            write(&writer, &content(2, 10));
            writer.repository().database().flush().unwrap();
            drop(writer);
            let manifest = std::fs::File::options().write(true).open(&manifest).unwrap();
            manifest.set_len(end).unwrap();
        }),
    ];
    for (number, (why, harm)) in cases.into_iter().enumerate() {
        let fixture = Fixture::new();
        let writer = fixture.open().unwrap();
        let root = write(&writer, &content(1, 1000));
        writer.repository().database().flush().unwrap();
        let next = writer.repository().next_chunk().unwrap();
        let path = hand_over(&writer, if number == 0 { next - 1 } else { next });
        harm(&fixture, writer);
        std::fs::remove_file(&path).unwrap();
        let damage = fixture.damaged_files();
        assert!(!damage.is_empty(), "{why}");
        for _ in 0..2 {
            let refused = fixture.open().err().expect(why);
            assert_eq!(refused.kind(), ErrorKind::Corrupt);
            assert!(refused.full_message().contains("run coldrise repair"), "{why}: {refused:?}");
        }
        assert_eq!(fixture.damaged_files(), damage, "{why}");
        let writer = fixture.open_for_repair();
        find_damage(&writer, &[verified(root, &content(1, 1000))]);
    }
}

/// Where the list of the files ends too early RocksDB deletes what comes after: a writer goes
/// on where that is of no use, and leaves all else to a repair. How often it did the one and the
/// other, of a list cut behind each of its edits; `is_whole` tells whether all is there.
fn cut_list_everywhere(
    fixture: &Fixture,
    is_whole: impl Fn(&RepositoryWriter) -> bool,
) -> [u32; 2] {
    let manifest = std::fs::read(fixture.manifest()).unwrap();
    let (mut cuts, mut opened, mut refused) = (Vec::new(), 0, 0);
    while cuts.last() != Some(&manifest.len()) {
        let at = *cuts.last().unwrap_or(&0);
        let length = u16::from_le_bytes([manifest[at + 4], manifest[at + 5]]);
        cuts.push(at + 7 + usize::from(length));
    }
    for cut in cuts {
        let copy = fixture.copy();
        truncate(&copy.manifest(), cut as u64);
        let damage = match Repository::open(&copy.path, &PassphraseSource::None, &NO_CACHE) {
            Ok(reader) => reader.damaged_files(&NO_CANCEL).unwrap(),
            Err(error) => vec![CatalogDamage { what: String::new(), reason: error.full_message() }],
        };
        match copy.open() {
            Ok(writer) => {
                opened += 1;
                assert!(is_whole(&writer), "cut at {cut}");
                assert_eq!(damage, [], "cut at {cut}");
            }
            Err(error) => {
                refused += 1;
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:?}");
                assert!(error.full_message().contains("run coldrise repair"), "{error:?}");
                assert!(!damage.is_empty(), "cut at {cut}: {error:?}");
                let writer = copy.open_for_repair();
                find_damage(&writer, &[]);
                assert!(is_whole(&writer), "cut at {cut}");
                drop(writer);
                assert!(is_whole(&copy.open().unwrap()), "cut at {cut}");
            }
        }
    }
    [opened, refused]
}

fn truncate(path: &Path, end: u64) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.set_len(end).unwrap();
}

fn put_document(writer: &RepositoryWriter, name: &str, content: &str) {
    let document = writer.repository().seal_document("test", content.as_bytes()).unwrap();
    let database = writer.repository().database();
    let mut batch = database.batch();
    batch.put(Family::Catalog, name.as_bytes(), &document).unwrap();
    database.write(batch, true).unwrap();
}

fn document(writer: &RepositoryWriter, name: &str) -> Option<String> {
    let database = writer.repository().database();
    let stored = database.get(Family::Catalog, name.as_bytes(), ReadMode::Cached).unwrap()?;
    let content = writer.repository().open_document("test", &stored).unwrap();
    Some(String::from_utf8(content.to_vec()).unwrap())
}

#[test]
fn a_writer_deletes_nothing_that_a_list_cut_short_does_not_name() {
    let fixture = Fixture::new();
    let writer = fixture.open().unwrap();
    let mut contents = Vec::new();
    // Small ones go through the log, a large one is handed over.
    for (seed, chunks) in [(1, 300), (2, 3000), (3, 10), (4, 200)] {
        let content = content(seed, chunks);
        contents.push((write(&writer, &content), content));
        put_document(&writer, &format!("point {seed}"), "");
        let database = writer.repository().database();
        match seed {
            2 => {}
            4 => database.compact(Family::Chunks, None).unwrap(),
            _ => database.flush().unwrap(),
        }
    }
    drop(writer);
    let is_whole = |writer: &RepositoryWriter| {
        let mut roots = contents.iter();
        (1..=4).all(|seed| document(writer, &format!("point {seed}")).is_some())
            && roots.all(|(root, content)| assert_never_wrong(writer, *root, content) == 0)
    };
    let [opened, refused] = cut_list_everywhere(&fixture, is_whole);
    assert!(opened >= 1 && refused >= 8, "{opened} opened, {refused} refused");
}

/// The list was begun anew with each opening, and what the log held became files meanwhile,
/// which have lower numbers than the list.
#[test]
fn nor_one_of_a_database_that_was_opened_again() {
    let fixture = Fixture::new();
    let mut contents = Vec::new();
    for (seed, chunks) in [(1, 300), (2, 3000), (3, 200)] {
        let writer = fixture.open().unwrap();
        let content = content(seed, chunks);
        contents.push((write(&writer, &content), content));
        put_document(&writer, "point", &seed.to_string());
    }
    drop(fixture.open().unwrap());
    let is_whole = |writer: &RepositoryWriter| {
        let mut roots = contents.iter();
        document(writer, "point").as_deref() == Some("3")
            && roots.all(|(root, content)| assert_never_wrong(writer, *root, content) == 0)
    };
    let [opened, refused] = cut_list_everywhere(&fixture, is_whole);
    assert!(opened >= 1 && refused >= 5, "{opened} opened, {refused} refused");
}

/// What a compaction writes has no sequence numbers.
#[test]
fn nor_counters_and_documents_that_were_compacted() {
    let fixture = Fixture::new();
    let writer = fixture.open().unwrap();
    let mut contents = Vec::new();
    for seed in 1..=6 {
        let content = content(seed, if seed == 2 { 3000 } else { 300 });
        contents.push((write(&writer, &content), content));
        put_document(&writer, "point", &seed.to_string());
        writer.repository().database().flush().unwrap();
    }
    for family in [Family::State, Family::Catalog] {
        writer.repository().database().compact(family, None).unwrap();
    }
    drop(writer);
    let is_whole = |writer: &RepositoryWriter| {
        let mut roots = contents.iter();
        document(writer, "point").as_deref() == Some("6")
            && roots.all(|(root, content)| assert_never_wrong(writer, *root, content) == 0)
    };
    let [opened, refused] = cut_list_everywhere(&fixture, is_whole);
    assert!(opened >= 1 && refused >= 8, "{opened} opened, {refused} refused");
}

/// Chunks are handed over past the log, which tells that they were committed.
#[test]
fn a_file_of_chunks_that_the_list_has_lost_is_not_deleted() {
    let fixture = Fixture::new();
    let writer = fixture.open().unwrap();
    let before = fixture.manifest().metadata().unwrap().len();
    let a = content(1, 3000);
    let root = write(&writer, &a);
    let cut = fixture.copy();
    drop(writer);
    let manifest = std::fs::File::options().write(true).open(cut.manifest()).unwrap();
    assert!(manifest.metadata().unwrap().len() > before);
    manifest.set_len(before).unwrap();
    let damage = cut.damaged_files();
    assert!(damage.iter().any(|damage| damage.reason.contains("has lost its end")), "{damage:?}");
    for _ in 0..2 {
        let refused = cut.open().err().expect("the list has lost its end");
        assert_eq!(refused.kind(), ErrorKind::Corrupt);
        assert!(refused.full_message().contains("has lost its end"), "{refused:?}");
    }
    drop(cut.open_for_repair());
    let writer = cut.open_for_repair();
    assert!(find_damage(&writer, &[verified(root, &a)]).found.is_clean());
    assert_eq!(assert_never_wrong(&writer, root, &a), 0);
}

/// Killed after a compaction was listed, before its inputs were deleted. What a compaction
/// writes may have no sequence numbers any more: its inputs look newer.
#[test]
fn what_a_killed_compaction_has_read_is_of_no_use() {
    let families = [Family::State, Family::Catalog, Family::Chunks, Family::Maps];
    let fixture = Fixture::new();
    let writer = fixture.open().unwrap();
    let database = writer.repository().database();
    let mut contents = Vec::new();
    for (seed, chunks) in [(1, 100), (2, 200), (3, 100)] {
        let content = content(seed, chunks);
        contents.push((write(&writer, &content), content));
        let document = writer.repository().seal_document("test", b"document").unwrap();
        let mut batch = database.batch();
        batch.put(Family::Catalog, b"document", &document).unwrap();
        database.write(batch, true).unwrap();
        database.flush().unwrap();
    }
    let paths = || -> Vec<_> {
        let files = families.iter().flat_map(|family| database.listed_files(*family).unwrap());
        files.map(|file| database.path_of(&file)).collect()
    };
    let aside = tempfile::tempdir().unwrap();
    let inputs = paths();
    for path in &inputs {
        std::fs::copy(path, aside.path().join(path.file_name().unwrap())).unwrap();
    }
    families.iter().for_each(|family| database.compact(*family, None).unwrap());
    let left = paths();
    drop(writer);
    let put_back: Vec<_> = inputs.iter().filter(|path| !left.contains(path)).collect();
    assert!(put_back.len() >= 6, "{put_back:?}");
    // The second time the list is one that never knew them.
    for round in 0..3 {
        for path in &put_back {
            std::fs::copy(aside.path().join(path.file_name().unwrap()), path).unwrap();
        }
        assert_eq!(fixture.damaged_files(), [], "round {round}");
        let writer = match round {
            2 => {
                let source = PassphraseSource::None;
                let opened = RepositoryWriter::open_for_repair(&fixture.path, &source, &NO_CACHE);
                let (writer, reopened) = opened.unwrap();
                assert_eq!(reopened, Reopened::default());
                writer
            }
            _ => fixture.open().unwrap(),
        };
        for (root, content) in &contents {
            assert_eq!(assert_never_wrong(&writer, *root, content), 0);
        }
        drop(writer);
        assert!(put_back.iter().all(|path| !path.exists()));
    }
}

/// The counters are in none that is left: the file that holds them is not deleted.
#[test]
fn a_list_that_has_lost_its_end_and_the_counters_is_left_to_a_repair() {
    let fixture = Fixture::new();
    let writer = fixture.open().unwrap();
    write(&writer, &content(2, 300));
    writer.repository().database().flush().unwrap();
    let end = fixture.manifest().metadata().unwrap().len();
    let a = content(1, 300);
    let root = write(&writer, &a);
    writer.repository().database().flush().unwrap();
    let database = writer.repository().database();
    let counters: Vec<_> = database.listed_files(Family::State).unwrap();
    let oldest = counters.iter().map(|file| database.path_of(file)).min().unwrap();
    assert!(counters.len() > 1);
    drop(writer);
    let manifest = std::fs::File::options().write(true).open(fixture.manifest()).unwrap();
    manifest.set_len(end).unwrap();
    std::fs::remove_file(oldest).unwrap();
    for _ in 0..2 {
        let refused = fixture.open().err().expect("the list has lost its end");
        assert_eq!(refused.kind(), ErrorKind::Corrupt);
        assert!(refused.full_message().contains("run coldrise repair"), "{refused:?}");
    }
    let writer = fixture.open_for_repair();
    assert!(find_damage(&writer, &[verified(root, &a)]).found.is_clean());
    assert_eq!(assert_never_wrong(&writer, root, &a), 0);
}

/// Two damages at once: what is left of a file counts when its list is made anew.
#[test]
fn a_file_cut_short_in_a_list_cut_short_is_mended() {
    let fixture = Fixture::new();
    let writer = fixture.open().unwrap();
    let a = content(1, 3000);
    let first = write(&writer, &a);
    let files = writer.repository().database().listed_files(Family::Chunks).unwrap();
    let cut = writer.repository().database().path_of(&files[0]);
    let end = fixture.manifest().metadata().unwrap().len();
    let b = content(2, 3000);
    let second = write(&writer, &b);
    drop(writer);
    truncate(&fixture.manifest(), end);
    // All that leads to the blocks, and no more.
    truncate(&cut, cut.metadata().unwrap().len() - 60);
    let source = PassphraseSource::None;
    let opened = RepositoryWriter::open_for_repair(&fixture.path, &source, &NO_CACHE);
    let (writer, reopened) = opened.unwrap();
    assert!(reopened.is_list_new, "{reopened:?}");
    assert_eq!((reopened.mended_files, reopened.lost_blocks, reopened.dropped_files), (1, 0, 0));
    let disks = [verified(first, &a), verified(second, &b)];
    assert!(find_damage(&writer, &disks).found.is_clean());
    assert_eq!(assert_never_wrong(&writer, first, &a), 0);
    assert_eq!(assert_never_wrong(&writer, second, &b), 0);
}

fn chunk_files(writer: &RepositoryWriter) -> Vec<PathBuf> {
    let database = writer.repository().database();
    let files = database.listed_files(Family::Chunks).unwrap();
    files.iter().map(|file| database.path_of(file)).collect()
}

/// A chunk is damaged and the list of the files has to be made anew, for whatever reason: the
/// one must not keep the other from being repaired.
#[test]
fn damaged_chunks_do_not_keep_a_list_from_being_made_anew() {
    type Harm = fn(&Fixture, RepositoryWriter) -> PathBuf;
    let unreadable: Harm = |fixture, writer| {
        let file = first_file(&writer);
        drop(writer);
        std::fs::write(fixture.manifest(), b"garbage").unwrap();
        file
    };
    let cases: [(&str, usize, Harm); 5] = [
        ("the first chunk", 0, unreadable),
        ("one in the midst", 1500, unreadable),
        ("the last chunk", 2999, unreadable),
        ("the list has lost its end", 2999, |fixture, writer| {
            let end = fixture.manifest().metadata().unwrap().len();
            let file = first_file(&writer);
            write(&writer, &content(2, 3000));
            drop(writer);
            truncate(&fixture.manifest(), end);
            file
        }),
        ("a backup was killed that had handed a file over", 2999, |fixture, writer| {
            let next = writer.repository().next_chunk().unwrap();
            let file = first_file(&writer);
            writer.repository().database().flush().unwrap();
            let manifest = std::fs::read(fixture.manifest()).unwrap();
            let name = fixture.manifest();
            let (path, aside) = (hand_over(&writer, next), tempfile::tempdir().unwrap());
            std::fs::copy(&path, aside.path().join("handed-over")).unwrap();
            drop(writer);
            std::fs::write(name, manifest).unwrap();
            std::fs::copy(aside.path().join("handed-over"), path).unwrap();
            file
        }),
    ];
    for (what, number, harm) in cases {
        let fixture = Fixture::new();
        let writer = fixture.open().unwrap();
        let a = content(1, 3000);
        let root = write(&writer, &a);
        let file = harm(&fixture, writer);
        damage(&file, &a, [number].into_iter());
        for _ in 0..2 {
            let writer = fixture.open_for_repair();
            let report = find_damage(&writer, &[verified(root, &a)]);
            assert_eq!(report.healable_chunks, 1, "{what}");
            assert_eq!(assert_never_wrong(&writer, root, &a), 1, "{what}");
        }
        let writer = fixture.open().expect(what);
        assert_eq!(writer.heal(&a).unwrap(), 1, "{what}");
        assert_eq!(assert_never_wrong(&writer, root, &a), 0, "{what}");
    }
}

/// Of files that overlap all is read.
#[test]
fn nor_does_one_in_a_file_that_overlaps_another() {
    let fixture = Fixture::new();
    let writer = fixture.open().unwrap();
    let a = content(1, 300);
    let root = write(&writer, &a);
    writer.repository().database().flush().unwrap();
    let before = chunk_files(&writer);
    store_again(&writer, &(100..150).collect::<Vec<_>>());
    let mut files = chunk_files(&writer);
    files.retain(|path| !before.contains(path));
    drop(writer);
    damage(&files[0], &a, [120].into_iter());
    std::fs::write(fixture.manifest(), b"garbage").unwrap();
    let writer = fixture.open_for_repair();
    // The same chunk is in the other file, too.
    assert!(find_damage(&writer, &[verified(root, &a)]).found.is_clean());
    assert_eq!(assert_never_wrong(&writer, root, &a), 0);
    drop(writer);
    assert_eq!(assert_never_wrong(&fixture.open().unwrap(), root, &a), 0);
}

/// Two damages at once: RocksDB would delete the file, and backups would go on to refer to what
/// was in there.
#[test]
fn a_damaged_file_that_the_list_has_lost_is_not_deleted() {
    type Harm = fn(&Path, &[u8]);
    let harms: [(&str, Harm); 2] = [
        ("its end is lost", |file, _| truncate(file, file.metadata().unwrap().len() - 60)),
        ("its last chunk is damaged", |file, b| damage(file, b, [2999].into_iter())),
    ];
    for (what, harm) in harms {
        let fixture = Fixture::new();
        let writer = fixture.open().unwrap();
        let a = content(1, 3000);
        let first = write(&writer, &a);
        let (before, end) = (chunk_files(&writer), fixture.manifest().metadata().unwrap().len());
        let b = content(2, 3000);
        let second = write(&writer, &b);
        let new = chunk_files(&writer).into_iter().find(|path| !before.contains(path)).unwrap();
        drop(writer);
        truncate(&fixture.manifest(), end);
        harm(&new, &b);
        assert!(!fixture.damaged_files().is_empty(), "{what}");
        for _ in 0..2 {
            let refused = fixture.open().err().expect(what);
            assert!(refused.full_message().contains("has lost its end"), "{what}: {refused:?}");
        }
        let writer = fixture.open_for_repair();
        let lost = assert_never_wrong(&writer, second, &b);
        assert!(lost == 1 || lost == 3000 && new.with_extension("lost").exists(), "{what}: {lost}");
        let disks = [verified(first, &a), verified(second, &b)];
        assert!(!find_damage(&writer, &disks).found.is_clean(), "{what}");
        drop(writer);
        let writer = fixture.open().unwrap();
        let again = write(&writer, &b);
        assert_eq!(assert_never_wrong(&writer, again, &b), 0, "{what}: a backup refers to it");
        assert_eq!(assert_never_wrong(&writer, first, &a), 0, "{what}");
    }
}

/// What a killed backup left is deleted by the next writer, which may be killed while the
/// database compacts it.
#[test]
fn a_compaction_of_what_was_never_committed_stops_nobody() {
    let fixture = Fixture::new();
    let writer = fixture.open().unwrap();
    let root = write(&writer, &content(1, 300));
    let state = StoreState::read(writer.repository()).unwrap();
    let database = writer.repository().database();
    let mut batch = database.batch();
    for page in state.next_page..state.next_page + 3 {
        batch.put(Family::Maps, &page.to_be_bytes(), b"page").unwrap();
    }
    database.write(batch, true).unwrap();
    drop(writer);
    let writer = fixture.open().unwrap();
    let files = writer.repository().database().listed_files(Family::Maps).unwrap();
    let newest = files.iter().max_by_key(|file| file.largest.clone()).unwrap();
    assert!(newest.largest[..] >= state.next_page.to_be_bytes()[..]);
    let copy = fixture.copy();
    let output = database_path(&copy.path).join("999990.sst");
    std::fs::copy(database_path(&copy.path).join(&newest.name[1..]), output).unwrap();
    assert_eq!(copy.damaged_files(), []);
    let writer = copy.open().unwrap();
    assert_eq!(assert_never_wrong(&writer, root, &content(1, 300)), 0);
}

/// The list says which files are to be deleted, if it can be read.
#[test]
fn a_list_made_anew_brings_no_older_document_back() {
    let fixture = Fixture::new();
    let writer = fixture.open().unwrap();
    let end = |writer: &RepositoryWriter| {
        writer.repository().database().flush().unwrap();
        fixture.manifest().metadata().unwrap().len()
    };
    put_document(&writer, "point", "older");
    end(&writer);
    let database = writer.repository().database();
    let files = database.listed_files(Family::Catalog).unwrap();
    let old: Vec<_> = files.iter().map(|file| database.path_of(file)).collect();
    let aside = tempfile::tempdir().unwrap();
    let kept = |path: &Path| aside.path().join(path.file_name().unwrap());
    old.iter().for_each(|path| std::fs::copy(path, kept(path)).map(drop).unwrap());
    put_document(&writer, "point", "newer");
    end(&writer);
    writer.repository().database().compact(Family::Catalog, None).unwrap();
    let end = end(&writer);
    write(&writer, &content(1, 3000));
    drop(writer);
    // The list has lost its end, and files are there that it had struck off before.
    truncate(&fixture.manifest(), end);
    old.iter().for_each(|path| std::fs::copy(kept(path), path).map(drop).unwrap());
    let source = PassphraseSource::None;
    let opened = RepositoryWriter::open_for_repair(&fixture.path, &source, &NO_CACHE);
    let (writer, reopened) = opened.unwrap();
    assert!(reopened.is_list_new);
    assert_eq!(document(&writer, "point").as_deref(), Some("newer"));
}

/// What a compaction writes has no sequence numbers, and of what it has read a crash leaves the
/// oldest.
#[test]
fn a_list_made_anew_takes_what_was_compacted_for_newer() {
    let harms: [fn(&Path, u64); 2] =
        [truncate, |manifest, _| std::fs::write(manifest, b"garbage").unwrap()];
    for harm in harms {
        let fixture = Fixture::new();
        let writer = fixture.open().unwrap();
        let database = writer.repository().database();
        put_document(&writer, "point", "older");
        database.flush().unwrap();
        let files = database.listed_files(Family::Catalog).unwrap();
        let old: Vec<_> = files.iter().map(|file| database.path_of(file)).collect();
        let aside = tempfile::tempdir().unwrap();
        let kept = |path: &Path| aside.path().join(path.file_name().unwrap());
        old.iter().for_each(|path| std::fs::copy(path, kept(path)).map(drop).unwrap());
        put_document(&writer, "point", "newer");
        database.flush().unwrap();
        let end = fixture.manifest().metadata().unwrap().len();
        database.compact(Family::Catalog, None).unwrap();
        drop(writer);
        harm(&fixture.manifest(), end);
        old.iter().for_each(|path| std::fs::copy(kept(path), path).map(drop).unwrap());
        let writer = fixture.open_for_repair();
        assert_eq!(document(&writer, "point").as_deref(), Some("newer"));
    }
}

/// Killed in a compaction of chunks, and a file that it read is lost.
#[test]
fn what_a_killed_compaction_has_written_is_kept_where_its_source_is_lost() {
    let fixture = Fixture::new();
    let writer = fixture.open().unwrap();
    let root = write(&writer, &content(1, 300));
    let database = writer.repository().database();
    database.flush().unwrap();
    let source = chunk_files(&writer).pop().unwrap();
    drop(writer);
    let half = source.with_file_name("999990.sst");
    std::fs::rename(&source, &half).unwrap();
    truncate(&half, half.metadata().unwrap().len() / 2);
    let writer = fixture.open_for_repair();
    assert!(!find_damage(&writer, &[verified(root, &content(1, 300))]).found.is_clean());
    assert!(half.with_extension("lost").exists());
}
