//! A file in the place of another one.

use super::*;
use crate::rocks::FAMILIES;

/// Pairs of files of one family and of different families: one replaces the other.
#[test]
fn a_file_in_the_place_of_another_is_named_and_repaired() {
    let fixture = Fixture::new();
    let mut disks = Vec::new();
    for seed in 1..=3 {
        let writer = fixture.open().unwrap();
        let content = content(seed, if seed == 2 { 600 } else { 100 });
        let root = write(&writer, &content);
        writer.put_point(&point_of(seed as u8, root, content.len() as u64, "sealed")).unwrap();
        writer.repository().database().flush().unwrap();
        disks.push((root, content));
    }
    let whole = fixture.open_to_read();
    let families =
        FAMILIES.map(|(family, _)| whole.database().listed_files(family).unwrap_or_default());
    let mut pairs = Vec::new();
    for (number, files) in families.iter().enumerate() {
        // Neighbours: the older one in the place of the newer, in the next family the other way.
        if let [first, second, ..] = &files[..] {
            let (from, to) = if number % 2 == 0 { (first, second) } else { (second, first) };
            pairs.push((from.name.clone(), to.name.clone()));
        }
    }
    for pair in families.windows(2).filter(|pair| !pair[1].is_empty()) {
        pairs.push((pair[0][0].name.clone(), pair[1][0].name.clone()));
    }
    // Files of all families in the place of one.
    let mut all = families.iter().flatten().map(|file| file.name.clone());
    let first = all.next().unwrap();
    pairs.extend(all.step_by(4).map(|from| (from, first.clone())));
    assert!(pairs.len() >= 12, "{pairs:?}");
    for (from, to) in pairs {
        let copy = fixture.copy();
        let folder = database_path(&copy.path);
        std::fs::copy(folder.join(&from[1..]), folder.join(&to[1..])).unwrap();
        let what = format!("{from} in the place of {to}");
        let named = copy.damaged_files();
        assert!(!named.is_empty(), "{what}: verify says nothing");
        let unwritable = copy.open_to_read().check_writable();
        let refused = copy.open().err().expect(&what);
        assert_eq!(refused.kind(), ErrorKind::Corrupt, "{what}: {refused:?}");
        assert_eq!(unwritable.unwrap_err().full_message(), refused.full_message(), "{what}");
        let message = refused.full_message();
        assert!(
            message.contains("run coldrise repair") && message.contains(&to),
            "{what}: {message}"
        );
        assert!(!message.contains("MANIFEST"), "{what}: {message}");
        let disks_now: Vec<_> = disks.iter().map(|(root, bytes)| verified(*root, bytes)).collect();
        let writer = copy.open_for_repair();
        let found = find_damage(&writer, &disks_now);
        drop(writer);
        assert_eq!(copy.damaged_files(), [], "{what}");
        let writer = copy.open().expect(&what);
        let mut lost = 0;
        for (number, (root, content)) in (1..).zip(&disks) {
            lost += assert_never_wrong(&writer, *root, content);
            assert_eq!(document(&writer, number).as_deref(), Some("sealed"), "{what}");
            // A backup restores the lost chunks.
            write(&writer, content);
            assert_eq!(assert_never_wrong(&writer, *root, content), 0, "{what}");
        }
        assert_eq!(lost > 0, !found.found.is_clean(), "{what}: what is lost is named");
    }
}

/// Files of the log in the place of others, copies of them, and moved blocks: replaying them would
/// end the process, or fail for good.
#[test]
fn a_log_that_cannot_be_replayed_is_refused_and_repaired() {
    let fixture = Fixture::new();
    let older = fixture.path.join("older-log");
    for seed in 1..=2 {
        let writer = fixture.open().unwrap();
        let content = content(seed, 50);
        let root = write(&writer, &content);
        writer.put_point(&point_of(seed as u8, root, content.len() as u64, "sealed")).unwrap();
        if seed == 2 {
            // More than a block of the log.
            for number in 3..=20 {
                let comment = "x".repeat(8 << 10);
                writer.put_point(&point_of(number, root, content.len() as u64, &comment)).unwrap();
            }
        }
        drop(writer);
        if seed == 1 {
            std::fs::copy(newest_log(&fixture.path), &older).unwrap();
        }
    }
    let older = std::fs::read(older).unwrap();
    type Damage<'a> = (&'a str, Box<dyn Fn(&Path, &Path) + 'a>);
    let damages: [Damage<'_>; 4] = [
        (
            "an older log behind the newer",
            Box::new(|_, next| std::fs::write(next, &older).unwrap()),
        ),
        (
            "a copy behind the log",
            Box::new(|log, next| assert!(std::fs::copy(log, next).unwrap() > 0)),
        ),
        (
            "an older log at the end of the newer",
            Box::new(|log, _| {
                let mut bytes = std::fs::read(log).unwrap();
                bytes.resize(bytes.len().next_multiple_of(32 << 10), 0);
                bytes.extend_from_slice(&older);
                std::fs::write(log, bytes).unwrap();
            }),
        ),
        (
            "a block in the place of another",
            Box::new(|log, _| {
                let mut bytes = std::fs::read(log).unwrap();
                assert!(bytes.len() > 3 * (32 << 10), "{}", bytes.len());
                bytes.copy_within(32 << 10..64 << 10, 0);
                std::fs::write(log, bytes).unwrap();
            }),
        ),
    ];
    for (what, damage) in damages {
        let copy = fixture.copy();
        let log = newest_log(&copy.path);
        let number: u64 = log.file_stem().unwrap().to_str().unwrap().parse().unwrap();
        damage(&log, &log.with_file_name(format!("{:06}.log", number + 1)));

        let refused = copy.open().err().expect(what);
        assert_eq!(refused.kind(), ErrorKind::Corrupt, "{what}: {refused:?}");
        let message = refused.full_message();
        assert!(message.contains(".log ") && message.contains("run coldrise repair"), "{message}");
        let writer = copy.open_for_repair();
        find_damage(&writer, &[]);
        drop(writer);
        let writer = copy.open().expect(what);
        for number in 1..=2 {
            assert_eq!(document(&writer, number).as_deref(), Some("sealed"), "{what}");
        }
    }
}

fn newest_log(repository: &Path) -> std::path::PathBuf {
    let entries = std::fs::read_dir(database_path(repository)).unwrap();
    let mut logs: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    logs.retain(|path| path.extension().is_some_and(|ending| ending == "log"));
    logs.sort();
    logs.pop().unwrap()
}
