//! The catalog: points appear completely, once, in order, and also to readers.

use coldrise_block::ErrorKind;
use coldrise_store::*;

use crate::common::*;

#[test]
fn a_reader_sees_new_points_after_catching_up_and_reads_their_disks() {
    let store = Store::new();
    let reader = store.reader();
    let machine = MachineName::parse("web01").unwrap();
    assert!(reader.machines().unwrap().is_empty());
    assert!(reader.points(&machine).unwrap().is_empty());

    let writer = store.writer();
    // One commit through the log, one through a file of chunks.
    for (name, length) in [("20261120T100000Z", 40 * CHUNK), ("20261121T100000Z", 10 << 20)] {
        let content = noise(length as u64, length);
        let (root, _) = write_all(&writer, None, &content);
        let document = point("web01", name, root, length as u64);
        writer.put_point(&document).unwrap();
        let name = PointName::parse(name).unwrap();
        assert_eq!(reader.point(&machine, &name).unwrap_err().kind(), ErrorKind::NotFound);
        // A root from elsewhere is readable without catching up first.
        assert_eq!(read_all(&reader.disk(root, length as u64)), content);
        reader.catch_up().unwrap();
        assert_eq!(reader.point(&machine, &name).unwrap(), document);
        assert_eq!(read_all(&reader.disk(root, length as u64)), content);
    }
    assert_eq!(reader.machines().unwrap(), std::slice::from_ref(&machine));
    assert_eq!(reader.points(&machine).unwrap().len(), 2);
    let stats = reader.stats().unwrap();
    assert_eq!((stats.machines, stats.points), (1, 2));
    assert_eq!(stats.recoverable_bytes, (40 * CHUNK + (10 << 20)) as u64);
    assert_eq!(stats.unique_bytes, stats.chunks * CHUNK as u64);
    assert!(stats.stored_bytes >= stats.unique_bytes, "noise does not shrink");
}

#[test]
fn a_name_is_taken_once_and_bounds_are_kept() {
    let store = Store::new();
    let writer = store.writer();
    let document = point("web01", "20261120T100000Z", MapRoot::EMPTY, 4096);
    writer.put_point(&document).unwrap();
    let again = PointDocument { created_at_ms: 5, ..document.clone() };
    assert_eq!(writer.put_point(&again).unwrap_err().kind(), ErrorKind::AlreadyExists);

    let other = PointName::parse("20261120T100000Z+1").unwrap();
    let part = MachinePart::new(TPM_STATE, SWTPM_PERMALL, b"keys").unwrap();
    let refused = [
        PointDocument { parts: vec![part.clone(), part], ..document.clone() },
        PointDocument { disks: vec![], ..document.clone() },
        PointDocument { disks: vec![document.disks[0].clone(); 2], ..document.clone() },
        PointDocument {
            configuration: Some(Configuration {
                format: "vmx".into(),
                text: "x".repeat(MAX_CONFIGURATION_BYTES + 1),
            }),
            ..document.clone()
        },
    ];
    for document in refused {
        let document = PointDocument { point: other.clone(), ..document };
        assert_eq!(writer.put_point(&document).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
    drop(writer);
    let machine = MachineName::parse("web01").unwrap();
    assert_eq!(store.reader().points(&machine).unwrap(), [document]);
}

#[test]
fn many_points_are_listed_in_order() {
    let store = Store::new();
    let writer = store.writer();
    for machine in ["web01", "web02"] {
        for number in (0..100).rev() {
            let time = jiff::Timestamp::from_second(1_795_000_000 + number / 2 * 3600).unwrap();
            let mut name = PointName::from_time(time).unwrap();
            if number % 2 == 1 {
                name = name.synthetic(1).unwrap();
            }
            let document = point(machine, name.as_str(), MapRoot::EMPTY, 4096);
            writer.put_point(&document).unwrap();
        }
    }
    drop(writer);
    let reader = store.reader();
    let mut listed = 0;
    for machine in reader.machines().unwrap() {
        let points = reader.points(&machine).unwrap();
        assert!(points.windows(2).all(|pair| pair[0].point < pair[1].point));
        assert!(points.iter().all(|point| point.machine == machine));
        let newest = reader.newest_points(&machine, 3).unwrap();
        assert_eq!(newest, points[points.len() - 3..]);
        assert_eq!(reader.newest_points(&machine, 200).unwrap(), points);
        listed += points.len();
    }
    assert_eq!(listed, 200);
}

#[test]
fn names_do_not_show_in_the_store() {
    let store = Store::encrypted();
    let writer = store.writer();
    let document = point("payroll-server", "20261120T100000Z", MapRoot::EMPTY, 4096);
    writer.put_point(&document).unwrap();
    drop(writer);
    for entry in std::fs::read_dir(store.path().join("db")).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        for word in [&b"payroll"[..], b"vda", b"/images/disk"] {
            assert!(!bytes.windows(word.len()).any(|window| window == word));
        }
    }
}

#[test]
fn points_are_removed_together_and_their_machine_with_the_last() {
    let store = Store::new();
    let writer = store.writer();
    let reader = store.reader();
    let names = ["20261120T100000Z", "20261120T100000Z+1", "20261121T100000Z"];
    for name in names {
        writer.put_point(&point("web01", name, MapRoot::EMPTY, 4096)).unwrap();
    }
    writer.put_point(&point("web02", names[0], MapRoot::EMPTY, 4096)).unwrap();
    let of = |machine: &str, name: &str| {
        (MachineName::parse(machine).unwrap(), PointName::parse(name).unwrap())
    };
    let left = |machine: &str| -> Vec<String> {
        reader.catch_up().unwrap();
        let points = reader.points(&MachineName::parse(machine).unwrap()).unwrap();
        points.iter().map(|point| point.point.to_string()).collect()
    };

    let absent = [of("web01", names[0]), of("web02", names[1])];
    assert_eq!(writer.remove_points(&absent).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(left("web01"), names, "all or none");

    writer.remove_points(&[of("web01", names[2]), of("web01", names[0])]).unwrap();
    assert_eq!(left("web01"), [names[1]]);
    assert_eq!(left("web02"), [names[0]]);
    writer.remove_points(&[of("web01", names[1]), of("web01", names[1])]).unwrap();
    assert_eq!(left("web01"), Vec::<String>::new());
    assert_eq!(reader.machines().unwrap(), [MachineName::parse("web02").unwrap()]);
    // The name is free again.
    writer.put_point(&point("web01", names[1], MapRoot::EMPTY, 4096)).unwrap();
    assert_eq!(left("web01"), [names[1]]);
}
