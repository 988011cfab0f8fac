//! A file in the place of another one.

use super::*;
use crate::rocks::FAMILIES;

/// Every pair of files of a family, and of others: the one in the place of the other.
#[test]
fn a_file_in_the_place_of_another_is_named_and_repaired() {
    let fixture = Fixture::new();
    let mut disks = Vec::new();
    for seed in 1..=3 {
        let writer = fixture.open().unwrap();
        let content = content(seed, if seed == 2 { 2500 } else { 100 });
        let root = write(&writer, &content);
        writer.put_point(&point_of(seed as u8, root, content.len() as u64, "sealed")).unwrap();
        writer.repository().database().flush().unwrap();
        disks.push((root, content));
    }
    let whole = fixture.open_to_read();
    let families =
        FAMILIES.map(|(family, _)| whole.database().listed_files(family).unwrap_or_default());
    let mut pairs = Vec::new();
    for files in &families {
        // One in the place of its neighbour, and the other way round.
        for pair in files.windows(2).take(1) {
            pairs.push((pair[0].name.clone(), pair[1].name.clone()));
            pairs.push((pair[1].name.clone(), pair[0].name.clone()));
        }
    }
    for pair in families.windows(2).filter(|pair| !pair[1].is_empty()) {
        pairs.push((pair[0][0].name.clone(), pair[1][0].name.clone()));
    }
    assert!(pairs.len() >= 12, "{pairs:?}");
    for (from, to) in pairs {
        let copy = fixture.copy();
        let folder = database_path(&copy.path);
        std::fs::copy(folder.join(&from[1..]), folder.join(&to[1..])).unwrap();
        let what = format!("{from} in the place of {to}");
        assert!(!copy.damaged_files().is_empty(), "{what}: verify says nothing");
        let refused = copy.open().err().expect(&what);
        assert_eq!(refused.kind(), ErrorKind::Corrupt, "{what}: {refused:?}");
        assert!(refused.full_message().contains("run coldrise repair"), "{what}: {refused:?}");
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
            // A backup brings back what is lost.
            write(&writer, content);
            assert_eq!(assert_never_wrong(&writer, *root, content), 0, "{what}");
        }
        assert_eq!(lost > 0, !found.found.is_clean(), "{what}: what is lost is named");
    }
}
