use super::*;
use crate::rocks::table::varint;
use crate::rocks::{give_up_lost, Database, Family, ReadMode, SstWriter};

const FAMILIES: [Family; 4] = [Family::Chunks, Family::Maps, Family::Catalog, Family::Dedup];

struct Fixture {
    folder: tempfile::TempDir,
}

fn value(number: u64) -> Vec<u8> {
    (0..number * 37 % 1900).map(|at| (at * 7 + number) as u8).collect()
}

impl Fixture {
    fn new() -> Fixture {
        let fixture = Fixture { folder: tempfile::tempdir().unwrap() };
        let database = fixture.open(true).unwrap();
        let staging = fixture.folder.path().join("staging.sst");
        let mut file = SstWriter::create(&database, &staging).unwrap();
        for number in 1..500u64 {
            file.put(&number.to_be_bytes(), &value(number)).unwrap();
        }
        database.ingest_chunks(&file.finish().unwrap()).unwrap();
        let mut batch = database.batch();
        for family in [Family::Maps, Family::Catalog, Family::Dedup] {
            for number in 1..300u64 {
                batch.put(family, &number.to_be_bytes(), &value(number)).unwrap();
            }
        }
        database.write(batch, true).unwrap();
        database.flush().unwrap();
        fixture
    }

    fn open(&self, create: bool) -> Result<Database> {
        Database::open_primary(&self.folder.path().join("db"), self.folder.path(), create)
    }
}

/// How many entries there are; each is what was stored.
fn count(database: &Database, family: Family) -> usize {
    let mut cursor = database.cursor(family, ReadMode::Scan).unwrap();
    cursor.seek(&[]).unwrap();
    let mut count = 0;
    while let Some((key, found)) = cursor.entry() {
        assert!(found == value(u64::from_be_bytes(key.try_into().unwrap())));
        cursor.next().unwrap();
        count += 1;
    }
    count
}

#[test]
fn one_flipped_bit_is_put_right_wherever_it_is() {
    let fixture = Fixture::new();
    for path in table_files(&fixture.folder.path().join("db")).unwrap() {
        let sound = std::fs::read(&path).unwrap();
        assert!(is_sound(&path).unwrap());
        let end = sound.len() - FOOTER_BYTES;
        let stride = sound.len() / 50 + 1;
        let tail = (end - 1200..sound.len()).step_by(3);
        for at in (0..end).step_by(stride).chain(tail) {
            let mut flipped = sound.clone();
            flipped[at] ^= 1 << (at % 8);
            std::fs::write(&path, &flipped).unwrap();
            let was_sound = is_sound(&path).unwrap();
            let done = mend(&path, Extent::Everything, || panic!("nothing is lost")).unwrap();
            assert_eq!(was_sound, done.is_sound(), "{at} of {}", sound.len());
            match was_sound {
                // Between the footer's handles and its end nothing is looked at.
                true => assert!(at > end, "{at} of {}", sound.len()),
                false => {
                    assert_eq!(done, Mended { corrected: 1, lost: 0 });
                    assert!(std::fs::read(&path).unwrap() == sound, "{at}");
                }
            }
        }
        std::fs::write(&path, &sound).unwrap();
    }
    let database = fixture.open(false).unwrap();
    assert_eq!(FAMILIES.map(|family| count(&database, family)), [499, 299, 299, 299]);
}

#[test]
fn what_cannot_be_put_right_is_left_out_and_the_database_goes_on() {
    let fixture = Fixture::new();
    for path in table_files(&fixture.folder.path().join("db")).unwrap() {
        let sound = std::fs::read(&path).unwrap();
        let (mut mended, mut refused) = (0, 0);
        for part in 0..40 {
            let at = sound.len() / 40 * part;
            let mut damaged = sound.clone();
            damaged[at..at + 20].iter_mut().for_each(|byte| *byte ^= 0x5a);
            std::fs::write(&path, &damaged).unwrap();
            let mut is_told = false;
            let done = mend(&path, Extent::Everything, || {
                is_told = true;
                Ok(())
            });
            let done = match done {
                Ok(done) => done,
                Err(error) => {
                    // Its properties are at its end.
                    assert_eq!(error.kind(), ErrorKind::Corrupt);
                    assert!(at + 3000 > sound.len());
                    assert!(std::fs::read(&path).unwrap() == damaged);
                    refused += 1;
                    continue;
                }
            };
            assert!(!done.is_sound() && is_sound(&path).unwrap(), "{at}: {done:?}");
            assert_eq!(is_told, done.lost > 0);
            assert_eq!(std::fs::metadata(&path).unwrap().len(), sound.len() as u64);
            mended += 1;
            if mended % 8 != 1 {
                continue;
            }
            let database = fixture.open(false).unwrap();
            let left: usize = FAMILIES.iter().map(|family| count(&database, *family)).sum();
            assert_eq!(left < 499 + 3 * 299, done.lost > 0, "{left}");
            // What it could not do with the damage inside.
            let copy = tempfile::tempdir().unwrap();
            drop(database);
            for file in std::fs::read_dir(fixture.folder.path().join("db")).unwrap() {
                let file = file.unwrap();
                std::fs::copy(file.path(), copy.path().join(file.file_name())).unwrap();
            }
            let database =
                Database::open_primary(copy.path(), fixture.folder.path(), false).unwrap();
            for family in FAMILIES {
                database.compact(family, None).unwrap();
            }
            let after: usize = FAMILIES.iter().map(|family| count(&database, *family)).sum();
            assert_eq!(after, left);
        }
        assert!(mended >= 25 && refused <= 5, "{mended} mended, {refused} refused");
        std::fs::write(&path, &sound).unwrap();
    }
}

/// Where the blocks of data end: they lie at the beginning.
fn data_end(sound: &[u8]) -> usize {
    let block = |(offset, bytes): Handle| &sound[offset as usize..(offset + bytes) as usize];
    let find = |block: &[u8], wanted: &[u8]| -> Vec<u8> {
        let found = entries(block).unwrap();
        found.into_iter().find(|(name, _)| name == wanted).unwrap().1.to_vec()
    };
    let footer = Footer::parse(&sound[sound.len() - FOOTER_BYTES..]).unwrap();
    let properties = next_handle(&mut &find(block(footer.metaindex), PROPERTIES)[..]).unwrap();
    varint(&mut &find(block(properties), b"rocksdb.data.size")[..]).unwrap() as usize
}

/// As a repair does it.
fn repair(folder: &Path) -> (u64, u64) {
    let database = folder.join("db");
    let (mut lost, mut unreadable) = (0, std::collections::HashSet::new());
    for path in table_files(&database).unwrap() {
        match mend(&path, Extent::NoChunks, || Ok(())) {
            Ok(done) => lost += done.lost,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Corrupt);
                unreadable.insert(path);
            }
        }
    }
    let given_up = give_up_lost(&database, folder, &unreadable, || Ok(())).unwrap();
    (lost + given_up.lost_blocks, given_up.files)
}

#[test]
fn what_lies_before_a_lost_end_is_there_again() {
    let fixture = Fixture::new();
    let all = [499, 299, 299, 299];
    for path in table_files(&fixture.folder.path().join("db")).unwrap() {
        let sound = std::fs::read(&path).unwrap();
        let (end, length) = (data_end(&sound), sound.len());
        assert!(end > length / 2 && end < length, "{end} of {length}");
        // A bad sector, zeroes, files that are cut short, damage anywhere behind the data.
        let steps = (0..7).map(|step| end + (length - end - 64) / 7 * step);
        let harms = steps
            .flat_map(|at| [(at, at + 64, false), (at, length, false), (at, length, true)])
            .chain([(end - 1, length, true), (end / 2, length, true), (end / 2, length, false)])
            .chain([(0, length, true), (1, length, true)]);
        for (number, (from, to, is_cut)) in harms.enumerate() {
            let mut damaged = sound.clone();
            let noise =
                (from..to).map(|at| if number % 2 == 0 { 0 } else { (at * 37 % 253) as u8 });
            damaged.splice(from..to, noise);
            damaged.truncate(if is_cut { from } else { length });
            let copy = Fixture { folder: tempfile::tempdir().unwrap() };
            let database = copy.folder.path().join("db");
            let folder = fixture.folder.path().join("db");
            let mut copying = std::process::Command::new("cp");
            assert!(copying.arg("-r").args([&folder, &database]).status().unwrap().success());
            std::fs::write(database.join(path.file_name().unwrap()), &damaged).unwrap();
            let what = format!("{} {from}..{to} of {length}, data to {end}", path.display());

            let (lost, files) = repair(copy.folder.path());
            assert_eq!(files, u64::from(from < 2), "{what}");
            assert_eq!(lost > 0, from < end && files == 0, "{what}: {lost}");
            for path in table_files(&database).unwrap() {
                assert!(is_sound(&path).unwrap(), "{what}");
            }
            let opened = copy.open(false).unwrap();
            let left = FAMILIES.map(|family| count(&opened, family));
            assert_eq!(left == all, from >= end, "{what}: {left:?}");
            if from > end / 3 {
                let missing: usize = all.iter().zip(left).map(|(all, left)| all - left).sum();
                assert!(missing < 499 * 2 / 3, "{what}: {left:?}");
            }
            for family in FAMILIES {
                opened.compact(family, None).unwrap();
            }
            assert_eq!(FAMILIES.map(|family| count(&opened, family)), left, "{what}");
        }
    }
}

#[test]
fn of_a_damaged_filter_nothing_else_is_lost() {
    let fixture = Fixture::new();
    let mut filters = 0;
    for path in table_files(&fixture.folder.path().join("db")).unwrap() {
        let sound = std::fs::read(&path).unwrap();
        let mending = Mending::new(&path, false).unwrap();
        let footer = Footer::parse(&sound[sound.len() - FOOTER_BYTES..]).unwrap();
        let metaindex = mending.sound(footer.metaindex).unwrap().unwrap();
        let metaindex = entries(&metaindex[..metaindex.len() - TRAILER_BYTES]).unwrap();
        let filter = metaindex.iter().find(|(name, _)| name.starts_with(FILTER));
        let Some((_, mut handle)) = filter else { continue };
        let (offset, _) = next_handle(&mut handle).unwrap();
        let mut bytes = sound.clone();
        bytes[offset as usize + 3] ^= 0x5a;
        std::fs::write(&path, &bytes).unwrap();
        assert!(!is_sound(&path).unwrap());
        let done = mend(&path, Extent::Everything, || panic!("nothing is lost")).unwrap();
        assert_eq!(done, Mended { corrected: 1, lost: 0 });
        assert!(is_sound(&path).unwrap());
        filters += 1;
    }
    assert!(filters > 0);
    let database = fixture.open(false).unwrap();
    assert_eq!(FAMILIES.map(|family| count(&database, family)), [499, 299, 299, 299]);
    let key = b"no such key".as_slice();
    assert!(database.get(Family::Dedup, key, ReadMode::Cached).unwrap().is_none());
    for family in FAMILIES {
        database.compact(family, None).unwrap();
    }
}

#[test]
fn a_footer_that_leads_anywhere_is_refused() {
    let fixture = Fixture::new();
    for path in table_files(&fixture.folder.path().join("db")).unwrap() {
        let sound = std::fs::read(&path).unwrap();
        let end = sound.len() - FOOTER_BYTES;
        let footer = Footer::parse(&sound[end..]).unwrap();
        let (metaindex, length) = (footer.metaindex, sound.len() as u64);
        let made_up = [
            (footer.index.0, 1 << 49),
            (u64::MAX, 8),
            (length - 100, 95),
            (metaindex.0 - 20, 40),
            (0, MAX_BLOCK_BYTES),
        ];
        for index in made_up {
            let bytes = [&sound[..end], &Footer { index, ..footer }.bytes()].concat();
            std::fs::write(&path, &bytes).unwrap();
            let error = mend(&path, Extent::Everything, || Ok(())).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{index:?}");
            assert!(std::fs::read(&path).unwrap() == bytes);
            assert!(fixture.open(false).is_err(), "{index:?}");
        }
        std::fs::write(&path, &sound).unwrap();
    }
}

proptest::proptest! {
    // A case is five files.
    #![proptest_config(proptest::prelude::ProptestConfig {
        cases: proptest::prelude::ProptestConfig::default().cases / 8,
        ..Default::default()
    })]
    #[test]
    fn fuzzed_files_are_mended_or_refused(
        changes in proptest::collection::vec((0.0..1.0f64, proptest::prelude::any::<[u8; 3]>()), 1..12),
        is_at_the_end in proptest::prelude::any::<bool>(),
        cut in proptest::option::weighted(0.1, 0.0..1.0f64),
    ) {
        static SOUND: std::sync::OnceLock<Vec<Vec<u8>>> = std::sync::OnceLock::new();
        let files = SOUND.get_or_init(|| {
            let fixture = Fixture::new();
            let files = table_files(&fixture.folder.path().join("db")).unwrap();
            files.iter().map(|path| std::fs::read(path).unwrap()).collect()
        });
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("000001.sst");
        for sound in files {
            let mut bytes = sound.clone();
            let from = if is_at_the_end { bytes.len() - 2000 } else { 0 };
            for (place, new) in &changes {
                let at = from + ((bytes.len() - from - 3) as f64 * place) as usize;
                bytes[at..at + 3].copy_from_slice(new);
            }
            bytes.truncate(cut.map_or(bytes.len(), |cut| (bytes.len() as f64 * cut) as usize));
            std::fs::write(&path, &bytes).unwrap();
            let was_sound = is_sound(&path).unwrap();
            match mend(&path, Extent::Everything, || Ok(())) {
                Ok(done) => {
                    proptest::prop_assert_eq!(done.is_sound(), was_sound);
                    proptest::prop_assert!(is_sound(&path).unwrap());
                }
                Err(error) => {
                    proptest::prop_assert_eq!(error.kind(), ErrorKind::Corrupt);
                    proptest::prop_assert!(!was_sound && std::fs::read(&path).unwrap() == bytes);
                }
            }
        }
    }
}
