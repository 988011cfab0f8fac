//! The list of the files has lost its end: a writer deletes nothing that it does not name.

use super::*;

/// Where the list of the files ends too early RocksDB deletes what comes after: a writer goes
/// on where that is of no use, and leaves all else to a repair. How often it did the one and the
/// other, of a list cut behind each of its edits; `disks` and `documents`
/// are all there is.
fn cut_list_everywhere(
    fixture: &Fixture,
    disks: &[(MapRoot, Vec<u8>)],
    documents: &[(&str, &str)],
) -> [u32; 2] {
    let is_whole = |writer: &RepositoryWriter| is_whole(writer, disks, documents);
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

#[test]
fn a_writer_deletes_nothing_that_a_list_cut_short_does_not_name() {
    let fixture = Fixture::new();
    let writer = fixture.open().unwrap();
    let mut contents = Vec::new();
    // Small ones go through the log, a large one is handed over.
    for (seed, chunks) in [(1, 300), (2, 3000), (3, 10), (4, 200)] {
        let content = content(seed, chunks);
        contents.push((write(&writer, &content), content));
        put_document(&writer, &format!("point {seed}"), "sealed");
        let database = writer.repository().database();
        match seed {
            2 => {}
            4 => database.compact(Family::Chunks, None).unwrap(),
            _ => database.flush().unwrap(),
        }
    }
    drop(writer);
    let documents = ["point 1", "point 2", "point 3", "point 4"].map(|name| (name, "sealed"));
    let [opened, refused] = cut_list_everywhere(&fixture, &contents, &documents);
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
    let [opened, refused] = cut_list_everywhere(&fixture, &contents, &[("point", "3")]);
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
    let [opened, refused] = cut_list_everywhere(&fixture, &contents, &[("point", "6")]);
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
    truncate(&fixture.manifest(), end);
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
