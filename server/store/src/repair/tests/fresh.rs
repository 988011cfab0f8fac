//! A new database is made from the readable parts of a damaged one.

use super::*;
use crate::repair_flag::FRESH_NAME;

/// The drive failed while the manifest was synced: RocksDB deletes a file that it has listed.
#[test]
fn a_missing_file_that_was_never_committed_is_harmless() {
    let fixture = Fixture::new();
    let a = content(1, 600);
    let writer = fixture.open().unwrap();
    let root = write(&writer, &a);
    writer.repository().database().flush().unwrap();
    let next = writer.repository().next_chunk().unwrap();
    let path = hand_over(&writer, next);
    drop(writer);
    std::fs::remove_file(&path).unwrap();
    // A killed compaction leaves a file without new entries.
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
        let b = content(2, 600);
        let other = write(&writer, &b);
        assert_eq!(assert_never_wrong(&writer, other, &b), 0);
        assert!(find_damage(&writer, &[verified(root, &a), verified(other, &b)]).found.is_clean());
        drop(writer);
        assert_eq!(fixture.damaged_files(), []);
    }
}

/// Killed while the log was flushed to files: they exist, and the manifest is unchanged.
#[test]
fn files_with_data_that_the_log_still_holds_are_harmless() {
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

/// Killed after a compaction was listed, before its inputs were deleted. The output of a compaction
/// may have no sequence numbers any more, so its inputs look newer.
#[test]
fn inputs_of_a_killed_compaction_are_deleted() {
    let families = [Family::State, Family::Catalog, Family::Chunks, Family::Maps];
    let fixture = Fixture::new();
    let writer = fixture.open().unwrap();
    let database = writer.repository().database();
    let mut contents = Vec::new();
    for (seed, chunks) in [(1, 100), (2, 200), (3, 100)] {
        let content = content(seed, chunks);
        contents.push((write(&writer, &content), content));
        put_document(&writer, 1, &seed.to_string());
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
    // The second time, the manifest never listed them.
    for round in 0..3 {
        inputs.put_back();
        assert_eq!(fixture.damaged_files(), [], "round {round}");
        let writer = match round {
            2 => {
                let source = PassphraseSource::None;
                let opened = RepositoryWriter::open_for_repair(&fixture.path, &source, &NO_CACHE);
                let (writer, reopened) = opened.unwrap();
                assert_eq!(reopened, ReopenReport::default());
                writer
            }
            _ => fixture.open().unwrap(),
        };
        assert!(is_whole(&writer, &contents, &[(1, "3")]));
        drop(writer);
        assert!(inputs.paths.iter().all(|path| !path.exists()));
    }
}

/// The next writer deletes the remains of a killed backup. It may be killed while the database
/// compacts them.
#[test]
fn a_compaction_of_uncommitted_data_is_harmless() {
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
        let root = write(&writer, &content(1, 600));
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
        find_damage(&writer, &[verified(root, &content(1, 600))]);
    }
}

/// The passphrase may come from a pipe or a prompt.
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

/// The database is older than the last commit, as after a rollback of the drive to a snapshot.
#[test]
fn a_database_of_before_is_refused_and_no_id_is_given_twice() {
    let fixture = Fixture::new();
    let (a, b) = (content(1, 600), content(2, 600));
    let writer = fixture.open().unwrap();
    let first = write(&writer, &a);
    writer.put_point(&point_of(1, first, a.len() as u64, "first")).unwrap();
    drop(writer);
    let before = fixture.copy();
    let writer = fixture.open().unwrap();
    let second = write(&writer, &b);
    writer.put_point(&point_of(2, second, b.len() as u64, "second")).unwrap();
    let next = StoreState::read(writer.repository()).unwrap();
    drop(writer);
    let folder = database_path(&fixture.path);
    std::fs::remove_dir_all(&folder).unwrap();
    std::fs::rename(database_path(&before.path), &folder).unwrap();

    let files = || crate::rocks::table_files(&folder).unwrap();
    let there = files();
    assert!(!fixture.damaged_files().is_empty());
    for _ in 0..2 {
        let refused = fixture.open().err().expect("it is older than the last commit");
        assert_eq!(refused.kind(), ErrorKind::Corrupt);
        assert!(refused.full_message().contains("run coldrise repair"), "{refused:?}");
    }
    assert_eq!(files(), there, "nothing was changed");
    let writer = fixture.open_for_repair();
    let disks = [verified(first, &a), verified(second, &b)];
    let found = find_damage(&writer, &disks);
    assert_eq!(found.lost.len(), 1, "the pages of the second are nowhere: {found:?}");
    assert_eq!(document(&writer, 2).as_deref(), Some("second"), "its marker has it");
    let state = StoreState::read(writer.repository()).unwrap();
    assert!(state.next_chunk >= next.next_chunk && state.next_page >= next.next_page);
    let third = write(&writer, &content(3, 50));
    assert_eq!(assert_never_wrong(&writer, third, &content(3, 50)), 0);
    assert_eq!(assert_never_wrong(&writer, first, &a), 0);
    assert_eq!(assert_never_wrong(&writer, second, &b), 600);
    drop(writer);
    assert_eq!(fixture.damaged_files(), []);
    fixture.open().unwrap();
}

/// Killed before and after both databases are exchanged.
#[test]
fn an_interrupted_repair_leaves_the_old_database_or_the_new_one() {
    let fixture = Fixture::new();
    let a = content(1, 600);
    let writer = fixture.open().unwrap();
    let root = write(&writer, &a);
    writer.put_point(&point_of(1, root, a.len() as u64, "sealed")).unwrap();
    let file = first_file(&writer);
    drop(writer);
    damage(&file, &a, [300].into_iter());
    for is_exchanged in [false, true] {
        let copy = fixture.copy();
        let (fresh, folder) = (copy.path.join(FRESH_NAME), database_path(&copy.path));
        if is_exchanged {
            drop(copy.open_for_repair());
            let old = fixture.copy();
            std::fs::rename(database_path(&old.path), &fresh).unwrap();
        } else {
            std::fs::create_dir(&fresh).unwrap();
            std::fs::copy(folder.join("CURRENT"), fresh.join("CURRENT")).unwrap();
            std::fs::File::create(copy.path.join("repair-unfinished")).unwrap();
        }
        let refused = copy.open().err().expect("a repair was interrupted");
        assert!(refused.full_message().contains("run coldrise repair again"), "{refused:?}");
        let writer = copy.open_for_repair();
        assert_eq!(find_damage(&writer, &[verified(root, &a)]).healable_chunks, 1);
        drop(writer);
        assert!(!fresh.exists());
        let writer = copy.open().unwrap();
        write(&writer, &a);
        assert_eq!(assert_never_wrong(&writer, root, &a), 0);
    }
}

/// The reader has the files of the old database open.
#[test]
fn a_reader_follows_a_new_database() {
    let fixture = Fixture::new();
    let (a, b) = (content(1, 600), content(2, 300));
    let writer = fixture.open().unwrap();
    let root = write(&writer, &a);
    writer.put_point(&point_of(1, root, a.len() as u64, "first")).unwrap();
    drop(writer);
    let reader = fixture.open_to_read();
    let read = |root, wanted: &[u8]| {
        let mut bytes = vec![0; wanted.len()];
        reader.disk(root, wanted.len() as u64).read_at(&mut bytes, 0).unwrap();
        assert!(bytes == wanted);
    };
    read(root, &a);
    std::fs::write(fixture.manifest(), b"garbage").unwrap();
    let writer = fixture.open_for_repair();
    find_damage(&writer, &[verified(root, &a)]);
    for round in 0..3 {
        read(root, &a);
        let content = content(10 + round, 300);
        let new = write(&writer, &content);
        writer.put_point(&point_of(2 + round as u8, new, b.len() as u64, "new")).unwrap();
        reader.catch_up().unwrap();
        read(new, &content);
        assert_eq!(reader.points(&web01()).unwrap().len(), 2 + round as usize);
    }
}

/// A point's files are lost from the catalog and still in its marker.
#[test]
fn a_point_that_the_catalog_has_lost_is_put_back_with_its_files() {
    let fixture = Fixture::new();
    let writer = fixture.open().unwrap();
    let mut point = point_of(1, MapRoot::EMPTY, CHUNK as u64, "sealed");
    let hash = "0".repeat(64);
    point.files = Some(PointFiles { count: 1, size_bytes: 5, hash });
    writer.put_point_with_files(&point, Some(b"files")).unwrap();
    writer.put_point(&point_of(2, MapRoot::EMPTY, CHUNK as u64, "forgotten")).unwrap();
    writer.set_protected(&[(web01(), point_name(1))], true).unwrap();
    writer.remove_points(&[(web01(), point_name(2))]).unwrap();
    fixture.lose(writer, &[Family::Catalog], |_| true);
    let writer = fixture.open_for_repair();
    find_damage(&writer, &[]);
    let repository = writer.repository();
    let points = repository.points(&web01()).unwrap();
    assert_eq!(points, [PointDocument { is_protected: true, ..point }]);
    assert_eq!(repository.point_files(&web01(), &point_name(1)).unwrap().unwrap(), b"files");
    assert_eq!(repository.machines().unwrap(), [web01()]);
}
