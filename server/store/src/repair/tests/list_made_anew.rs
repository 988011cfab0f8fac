//! The list of the files is made anew.

use super::*;

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
    let old = Aside::keep(files.iter().map(|file| database.path_of(file)).collect());
    put_document(&writer, "point", "newer");
    end(&writer);
    writer.repository().database().compact(Family::Catalog, None).unwrap();
    let end = end(&writer);
    write(&writer, &content(1, 3000));
    drop(writer);
    // The list has lost its end, and files are there that it had struck off before.
    truncate(&fixture.manifest(), end);
    old.put_back();
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
        let old = Aside::keep(files.iter().map(|file| database.path_of(file)).collect());
        put_document(&writer, "point", "newer");
        database.flush().unwrap();
        let end = fixture.manifest().metadata().unwrap().len();
        database.compact(Family::Catalog, None).unwrap();
        drop(writer);
        harm(&fixture.manifest(), end);
        old.put_back();
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
