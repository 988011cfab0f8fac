//! Files that are there and not listed, or the other way round, and what a writer does then.

use super::*;

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
        put_document(&writer, "point", &seed.to_string());
        database.flush().unwrap();
    }
    let paths = || -> Vec<_> {
        let files = families.iter().flat_map(|family| database.listed_files(*family).unwrap());
        files.map(|file| database.path_of(&file)).collect()
    };
    let mut inputs = Aside::keep(paths());
    families.iter().for_each(|family| database.compact(*family, None).unwrap());
    let left = paths();
    drop(writer);
    inputs.paths.retain(|path| !left.contains(path));
    assert!(inputs.paths.len() >= 6, "{:?}", inputs.paths);
    // The second time the list is one that never knew them.
    for round in 0..3 {
        inputs.put_back();
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
        assert!(is_whole(&writer, &contents, &[("point", "3")]));
        drop(writer);
        assert!(inputs.paths.iter().all(|path| !path.exists()));
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
            truncate(&manifest, end);
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

/// It may come from a pipe, or from somebody who is asked.
#[test]
fn a_passphrase_is_read_once_also_where_files_are_looked_at_first() {
    let secret = Passphrase::new(b"correct horse".to_vec()).unwrap();
    let fixture = Fixture::with(Some(&secret));
    let asked = fixture.path.with_file_name("asked");
    let command = format!("echo >> {}; printf 'correct horse'", asked.display());
    std::fs::write(database_path(&fixture.path).join("999998.sst"), b"half").unwrap();
    let source = PassphraseSource::Command(command);
    drop(RepositoryWriter::open(&fixture.path, &source, &NO_CACHE).unwrap());
    assert_eq!(std::fs::read_to_string(&asked).unwrap(), "\n");
}
