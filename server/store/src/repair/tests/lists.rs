//! The manifest has lost its end: a writer deletes no file only because it is not listed.

use super::*;

/// If the manifest ends too early, RocksDB deletes the later files. A writer continues if those are
/// not needed, and leaves all other cases to a repair. Cuts the manifest after each of its edits
/// and returns how often each happened; `disks` and `documents` are the whole content.
fn cut_list_everywhere(
    fixture: &Fixture,
    disks: &[(MapRoot, Vec<u8>)],
    documents: &[(u8, &str)],
) -> [u32; 2] {
    let is_whole = |writer: &RepositoryWriter| is_whole(writer, disks, documents);
    let manifest = std::fs::read(fixture.manifest()).unwrap();
    let (mut cuts, mut opened, mut refused) = (Vec::new(), 0, 0);
    while cuts.last() != Some(&manifest.len()) {
        let at = *cuts.last().unwrap_or(&0);
        let length = u16::from_le_bytes([manifest[at + 4], manifest[at + 5]]);
        cuts.push(at + 7 + usize::from(length));
    }
    let step = cuts.len().div_ceil(12);
    for cut in cuts.into_iter().rev().step_by(step) {
        let copy = fixture.copy();
        truncate(&copy.manifest(), cut as u64);
        let damage = match Repository::open(&copy.path, &PassphraseSource::None, &NO_CACHE) {
            Ok(reader) => reader.damaged_files(&NO_CANCEL).unwrap(),
            Err(error) => vec![CatalogDamage::new(String::new(), error.full_message())],
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

#[test]
fn a_truncated_list_deletes_no_unlisted_files() {
    let fixture = Fixture::new();
    let writer = fixture.open().unwrap();
    let mut contents = Vec::new();
    // Small ones go through the log, a large one is ingested.
    for (seed, chunks) in [(1, 300), (2, 600), (3, 10), (4, 200)] {
        let content = content(seed, chunks);
        contents.push((write(&writer, &content), content));
        put_document(&writer, seed as u8, "sealed");
        let database = writer.repository().database();
        match seed {
            2 => {}
            4 => database.compact(Family::Chunks, None).unwrap(),
            _ => database.flush().unwrap(),
        }
    }
    drop(writer);
    let documents = [1, 2, 3, 4].map(|number| (number, "sealed"));
    let [opened, refused] = cut_list_everywhere(&fixture, &contents, &documents);
    assert!(opened >= 1 && refused >= 4, "{opened} opened, {refused} refused");
}

/// Each opening started a new manifest, and the log was flushed meanwhile to files with lower
/// numbers than the manifest.
#[test]
fn a_truncated_list_deletes_no_files_after_several_openings() {
    let fixture = Fixture::new();
    let mut contents = Vec::new();
    for (seed, chunks) in [(1, 300), (2, 600), (3, 200)] {
        let writer = fixture.open().unwrap();
        let content = content(seed, chunks);
        contents.push((write(&writer, &content), content));
        put_document(&writer, 1, &seed.to_string());
    }
    drop(fixture.open().unwrap());
    let [opened, refused] = cut_list_everywhere(&fixture, &contents, &[(1, "3")]);
    assert!(opened >= 1 && refused >= 4, "{opened} opened, {refused} refused");
}

/// The output of a compaction has no sequence numbers.
#[test]
fn a_truncated_list_deletes_no_compacted_counters_and_documents() {
    let fixture = Fixture::new();
    let writer = fixture.open().unwrap();
    let mut contents = Vec::new();
    for seed in 1..=6 {
        let content = content(seed, if seed == 2 { 600 } else { 300 });
        contents.push((write(&writer, &content), content));
        put_document(&writer, 1, &seed.to_string());
        writer.repository().database().flush().unwrap();
    }
    for family in [Family::State, Family::Catalog] {
        writer.repository().database().compact(family, None).unwrap();
    }
    drop(writer);
    let [opened, refused] = cut_list_everywhere(&fixture, &contents, &[(1, "6")]);
    assert!(opened >= 1 && refused >= 4, "{opened} opened, {refused} refused");
}

/// Chunks are ingested past the log; the log shows that they were committed.
#[test]
fn a_file_of_chunks_that_the_list_has_lost_is_not_deleted() {
    let fixture = Fixture::new();
    let writer = fixture.open().unwrap();
    let before = fixture.manifest().metadata().unwrap().len();
    let a = content(1, 600);
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

/// No remaining file holds the counters: the file that holds them is not deleted.
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
    truncate(&fixture.manifest(), end);
    std::fs::remove_file(oldest).unwrap();
    for _ in 0..2 {
        let refused = fixture.open().err().expect("the list has lost its end");
        assert_eq!(refused.kind(), ErrorKind::Corrupt);
        assert!(refused.full_message().contains("run coldrise repair"), "{refused:?}");
    }
    let writer = fixture.open_for_repair();
    let found = find_damage(&writer, &[verified(root, &a)]);
    assert!(found.found.is_clean(), "{found:?}");
    assert_eq!(assert_never_wrong(&writer, root, &a), 0);
}

/// Two faults at once: the readable part of a file counts when the manifest is rebuilt.
#[test]
fn a_file_cut_short_in_a_list_cut_short_is_mended() {
    let fixture = Fixture::new();
    let writer = fixture.open().unwrap();
    let a = content(1, 600);
    let first = write(&writer, &a);
    let files = writer.repository().database().listed_files(Family::Chunks).unwrap();
    let cut = writer.repository().database().path_of(&files[0]);
    let end = fixture.manifest().metadata().unwrap().len();
    let b = content(2, 600);
    let second = write(&writer, &b);
    drop(writer);
    truncate(&fixture.manifest(), end);
    // Cuts off only the structures that lead to the blocks.
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

/// A chunk is damaged and the manifest must be rebuilt: neither fault prevents the repair of the
/// other.
#[test]
fn damaged_chunks_do_not_prevent_the_rebuild_of_a_list() {
    type Harm = fn(&Fixture, RepositoryWriter) -> PathBuf;
    let unreadable: Harm = |fixture, writer| {
        let file = first_file(&writer);
        drop(writer);
        std::fs::write(fixture.manifest(), b"garbage").unwrap();
        file
    };
    let cases: [(&str, usize, Harm); 5] = [
        ("the first chunk", 0, unreadable),
        ("one in the midst", 300, unreadable),
        ("the last chunk", 599, unreadable),
        ("the list has lost its end", 599, |fixture, writer| {
            let end = fixture.manifest().metadata().unwrap().len();
            let file = first_file(&writer);
            write(&writer, &content(2, 600));
            drop(writer);
            truncate(&fixture.manifest(), end);
            file
        }),
        ("a backup was killed that had handed a file over", 599, |fixture, writer| {
            let next = writer.repository().next_chunk().unwrap();
            let file = first_file(&writer);
            writer.repository().database().flush().unwrap();
            let manifest = std::fs::read(fixture.manifest()).unwrap();
            let name = fixture.manifest();
            let handed_over = Aside::keep(vec![hand_over(&writer, next)]);
            drop(writer);
            std::fs::write(name, manifest).unwrap();
            handed_over.put_back();
            file
        }),
    ];
    for (what, number, harm) in cases {
        let fixture = Fixture::new();
        let writer = fixture.open().unwrap();
        let a = content(1, 600);
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

/// Overlapping files are read completely.
#[test]
fn damage_in_overlapping_files_does_not_prevent_the_rebuild_of_a_list() {
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
    // The other file also has the chunk.
    assert!(find_damage(&writer, &[verified(root, &a)]).found.is_clean());
    assert_eq!(assert_never_wrong(&writer, root, &a), 0);
    drop(writer);
    assert_eq!(assert_never_wrong(&fixture.open().unwrap(), root, &a), 0);
}

/// Two faults at once: RocksDB would delete the file, and backups would continue to refer to its
/// chunks.
#[test]
fn a_damaged_file_that_the_list_has_lost_is_not_deleted() {
    type Harm = fn(&Path, &[u8]);
    let harms: [(&str, usize, Harm); 2] = [
        ("its end is lost", 0, |file, _| truncate(file, file.metadata().unwrap().len() - 60)),
        ("its last chunk is damaged", 1, |file, b| damage(file, b, [599].into_iter())),
    ];
    for (what, wanted, harm) in harms {
        let fixture = Fixture::new();
        let writer = fixture.open().unwrap();
        let a = content(1, 600);
        let first = write(&writer, &a);
        let (before, end) = (chunk_files(&writer), fixture.manifest().metadata().unwrap().len());
        let b = content(2, 600);
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
        assert_eq!(lost, wanted, "{what}");
        let disks = [verified(first, &a), verified(second, &b)];
        assert_eq!(find_damage(&writer, &disks).found.is_clean(), wanted == 0, "{what}");
        drop(writer);
        let writer = fixture.open().unwrap();
        let again = write(&writer, &b);
        assert_eq!(assert_never_wrong(&writer, again, &b), 0, "{what}: a backup refers to it");
        assert_eq!(assert_never_wrong(&writer, first, &a), 0, "{what}");
    }
}

/// A readable manifest shows which files are to be deleted.
#[test]
fn a_rebuilt_list_brings_no_older_document_back() {
    let fixture = Fixture::new();
    let writer = fixture.open().unwrap();
    let end = |writer: &RepositoryWriter| {
        writer.repository().database().flush().unwrap();
        fixture.manifest().metadata().unwrap().len()
    };
    put_document(&writer, 1, "older");
    end(&writer);
    let database = writer.repository().database();
    let files = database.listed_files(Family::Catalog).unwrap();
    let old = Aside::keep(files.iter().map(|file| database.path_of(file)).collect());
    put_document(&writer, 1, "newer");
    end(&writer);
    writer.repository().database().compact(Family::Catalog, None).unwrap();
    let end = end(&writer);
    write(&writer, &content(1, 600));
    drop(writer);
    // The manifest has lost its end, and files exist that it had removed before.
    truncate(&fixture.manifest(), end);
    old.put_back();
    let source = PassphraseSource::None;
    let opened = RepositoryWriter::open_for_repair(&fixture.path, &source, &NO_CACHE);
    let (writer, reopened) = opened.unwrap();
    assert!(reopened.is_list_new);
    assert_eq!(document(&writer, 1).as_deref(), Some("newer"));
}

/// The output of a compaction has no sequence numbers, and a crash leaves the oldest of its inputs.
#[test]
fn a_rebuilt_list_counts_compacted_data_as_newer() {
    let harms: [fn(&Path, u64); 2] =
        [truncate, |manifest, _| std::fs::write(manifest, b"garbage").unwrap()];
    for harm in harms {
        let fixture = Fixture::new();
        let writer = fixture.open().unwrap();
        let database = writer.repository().database();
        put_document(&writer, 1, "older");
        database.flush().unwrap();
        let files = database.listed_files(Family::Catalog).unwrap();
        let old = Aside::keep(files.iter().map(|file| database.path_of(file)).collect());
        put_document(&writer, 1, "newer");
        database.flush().unwrap();
        let end = fixture.manifest().metadata().unwrap().len();
        database.compact(Family::Catalog, None).unwrap();
        drop(writer);
        harm(&fixture.manifest(), end);
        old.put_back();
        let writer = fixture.open_for_repair();
        assert_eq!(document(&writer, 1).as_deref(), Some("newer"));
    }
}

/// Killed in a compaction of chunks, and one of its input files is lost.
#[test]
fn output_of_a_killed_compaction_is_used_if_an_input_is_lost() {
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
    let found = find_damage(&writer, &[verified(root, &content(1, 300))]);
    assert!((1..300).contains(&found.healable_chunks), "{found:?}");
}
