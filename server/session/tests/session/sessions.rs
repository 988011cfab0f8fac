//! Sessions in a real repository: publish, capture, seal, unpublish.

use std::path::PathBuf;
use std::sync::Arc;

use coldrise_block::{Disk, ErrorKind, Extent, ExtentKind, ReadContext};
use coldrise_session::{
    Catalog, SealReport, Session, enter_sealed_points, open_live_disk, open_live_side_file,
    publish, seal, session, sessions, unpublish,
};
use coldrise_store::{MachineName, PointSelector};

use crate::support::{
    PATIENCE, content, disk_name, encrypted_place, name, place, point_bytes, read_all, writer,
};

#[test]
fn a_sealed_session_is_a_point_and_the_original_never_changes() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    let open = Session::open(&repository, &name("trial")).unwrap();
    let vda = open.disk(&disk_name("vda")).unwrap();
    let mut expected = content(1);
    assert_eq!(read_all(&*vda), expected);
    vda.write_at(&[7; 10_000], 5_000).unwrap();
    expected[5_000..15_000].fill(7);
    vda.write_zeroes(1 << 20, 1 << 20).unwrap();
    expected[1 << 20..2 << 20].fill(0);

    // Seal while the session is in use, and continue to write.
    let first = open.seal().unwrap().point;
    assert_eq!(first.point.as_str(), "20261120T100000Z+1");
    vda.write_at(&[8; 4096], 0).unwrap();
    assert_eq!(point_bytes(&repository, &first, "vda"), expected);
    assert_eq!(point_bytes(&repository, &first, "vdb"), content(2));
    expected[..4096].fill(8);
    assert_eq!(read_all(&*vda), expected);
    drop(vda);
    drop(open);

    // Seal while no process uses the session.
    let second = seal(&repository, &name("trial"), PATIENCE).unwrap().point;
    assert_eq!(second.point.as_str(), "20261120T100000Z+2");
    assert_eq!(point_bytes(&repository, &second, "vda"), expected);
    assert_eq!(point_bytes(&repository, &place.point, "vda"), content(1));

    // A disk without writes gets no layer.
    assert!(second.disk(&disk_name("vdb")).unwrap().layers.is_empty());
    assert_eq!(second.disk(&disk_name("vda")).unwrap().layers.len(), 2);
}

#[test]
fn captured_writes_are_read_without_waiting() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    let open = Session::open(&repository, &name("trial")).unwrap();
    let vda = open.disk(&disk_name("vda")).unwrap();
    let reader = open_live_disk(&repository, &name("trial"), &disk_name("vda")).unwrap();
    vda.write_at(&[7; 8192], 4096).unwrap();
    vda.write_zeroes(64 << 10, 4096).unwrap();
    for disk in [&vda, &reader] {
        let mut part = vec![0; 6000];
        disk.read_in_memory(&mut part, 5000).unwrap();
        assert_eq!(part, [7; 6000]);
        disk.read_in_memory(&mut part[..4096], 64 << 10).unwrap();
        assert_eq!(part[..4096], [0; 4096]);
        // Half of this range is in the base, and was never decoded.
        let failed = disk.read_in_memory(&mut part, 10_000).unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::WouldWait);
    }
}

#[test]
fn a_sealed_point_can_be_published_and_sealed_again() {
    let place = place();
    let repository = place.open();
    let mut point = place.point.clone();
    let mut expected = content(2);
    for round in 1..=5u8 {
        let session = publish(&repository, &point, None).unwrap();
        assert_eq!(session.name.as_str(), "web01-1");
        let open = Session::open(&repository, &session.name).unwrap();
        let offset = u64::from(round) * 8192;
        open.disk(&disk_name("vdb")).unwrap().write_at(&[round; 4096], offset).unwrap();
        expected[offset as usize..offset as usize + 4096].fill(round);
        drop(open);
        point = unpublish(&repository, &session.name, false).unwrap().unwrap().point;
        assert_eq!(point.point.lineage(), ("20261120T100000Z", u32::from(round)));
        // Ended sessions wait for a writer, which enters their points into the catalog.
        assert_eq!(enter_sealed_points(&writer(&place.path)).unwrap().points, 1);
        assert!(sessions(&repository).unwrap().is_empty());
    }
    assert_eq!(point_bytes(&repository, &point, "vdb"), expected);
}

#[test]
fn a_seal_needs_no_writer_and_the_next_writer_enters_the_point() {
    let place = place();
    let busy = writer(&place.path);
    let repository = place.open();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    let open = Session::open(&repository, &name("trial")).unwrap();
    open.disk(&disk_name("vda")).unwrap().write_at(&[1; 512], 512).unwrap();
    drop(open);
    let sealed = seal(&repository, &name("trial"), PATIENCE).unwrap().point;

    let catalog = Catalog::new(&repository);
    let selector = PointSelector::Latest(0);
    assert_eq!(catalog.point(&place.point.machine, &selector).unwrap(), sealed);
    assert_eq!(catalog.points(&place.point.machine).unwrap().len(), 2);
    assert_eq!(enter_sealed_points(&busy).unwrap().points, 1);
    assert_eq!(enter_sealed_points(&busy).unwrap().points, 0);
    assert_eq!(catalog.points(&place.point.machine).unwrap().len(), 2);
    repository.catch_up().unwrap();
    assert_eq!(repository.point(&sealed.machine, &sealed.point).unwrap(), sealed);
}

/// The document takes 16 MiB: a seal must show how much of it the layers of waiting points take.
#[test]
fn waiting_points_count_with_their_layers() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    let open = Session::open(&repository, &name("trial")).unwrap();
    let vda = open.disk(&disk_name("vda")).unwrap();
    let mut layer_bytes = 0;
    for round in 1..=3 {
        vda.write_at(&[round; 4096], 0).unwrap();
        let point = open.seal().unwrap().point;
        assert_eq!(point.disks[0].layers.len(), usize::from(round));
        layer_bytes += serde_json::to_vec(&point.disks[0].layers).unwrap().len();
        let document = session(&repository, &name("trial")).unwrap().document;
        let waiting = document.waiting_bytes();
        assert!((layer_bytes..2 * layer_bytes).contains(&waiting), "{waiting} of {layer_bytes}");
    }
}

#[test]
fn one_process_writes_a_session_and_others_read_it() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    let idle = open_live_disk(&repository, &name("trial"), &disk_name("vda")).unwrap();
    assert_eq!(read_all(&*idle), content(1));

    let open = Session::open(&repository, &name("trial")).unwrap();
    assert!(session(&repository, &name("trial")).unwrap().is_served);
    let second = Session::open(&place.open(), &name("trial")).err().unwrap();
    assert_eq!(second.kind(), ErrorKind::Busy);
    assert_eq!(unpublish(&repository, &name("trial"), true).unwrap_err().kind(), ErrorKind::Busy);

    let vda = open.disk(&disk_name("vda")).unwrap();
    let mut expected = content(1);
    for round in 0..4u64 {
        vda.write_at(&[round as u8; 4096], round * 4096).unwrap();
        expected[round as usize * 4096..][..4096].fill(round as u8);
        assert_eq!(read_all(&*idle), expected, "before the flush, round {round}");
        if round == 1 {
            open.seal().unwrap();
        }
    }
    drop(vda);
    drop(open);
    assert_eq!(read_all(&*idle), expected);
    assert!(!session(&repository, &name("trial")).unwrap().is_served);
}

#[test]
fn a_session_is_opened_again_as_soon_as_its_last_disk_was_dropped() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    let mut expected = content(1);
    for round in 0..20u8 {
        let open = Session::open(&repository, &name("trial")).unwrap();
        let vda = open.disk(&disk_name("vda")).unwrap();
        for block in 0..8u64 {
            vda.write_at(&[round; 4096], block * 4096).unwrap();
        }
        expected[..8 * 4096].fill(round);
        // Only the drop of the disk closes the layer and truncates its file.
        drop(open);
        drop(vda);
    }
    let open = Session::open(&repository, &name("trial")).unwrap();
    assert_eq!(read_all(&*open.disk(&disk_name("vda")).unwrap()), expected);
}

#[test]
fn the_serving_process_seals_when_it_is_asked() {
    let place = place();
    let serving = place.open();
    publish(&serving, &place.point, Some(name("trial"))).unwrap();
    let open = Session::open(&serving, &name("trial")).unwrap();
    let vda = open.disk(&disk_name("vda")).unwrap();
    vda.write_at(&[3; 4096], 0).unwrap();

    let asking = place.open();
    let point = seal(&asking, &name("trial"), PATIENCE).unwrap().point;
    vda.write_at(&[4; 4096], 0).unwrap();
    let mut expected = content(1);
    expected[..4096].fill(3);
    assert_eq!(point_bytes(&asking, &point, "vda"), expected);
}

#[test]
fn seals_and_an_unpublish_at_the_same_moment_leave_only_whole_points() {
    let place = place();
    let repository = place.open();
    let mut expected = [content(1), content(2)];
    for round in 0..10 {
        let session = format!("trial-{round}");
        publish(&repository, &place.point, Some(name(&session))).unwrap();
        let written = [round + 1; 4096];
        let open = Session::open(&repository, &name(&session)).unwrap();
        for (disk, expected) in ["vda", "vdb"].iter().zip(&mut expected) {
            open.disk(&disk_name(disk)).unwrap().write_at(&written, 8192).unwrap();
            expected[8192..8192 + 4096].copy_from_slice(&written);
        }
        drop(open);

        let start = std::sync::Barrier::new(3);
        let sealed = std::thread::scope(|scope| {
            let run = |ends: bool| {
                let (start, repository, name) = (&start, &repository, name(&session));
                scope.spawn(move || {
                    start.wait();
                    if ends {
                        unpublish(repository, &name, false)
                    } else {
                        seal(repository, &name, PATIENCE).map(Some)
                    }
                })
            };
            let threads = [run(false), run(false), run(true)];
            threads.map(|thread| thread.join().unwrap())
        });
        let mut points = 0;
        for result in sealed {
            match result {
                Ok(Some(SealReport { point, .. })) => {
                    for (disk, expected) in ["vda", "vdb"].iter().zip(&expected) {
                        let found = point_bytes(&repository, &point, disk);
                        assert!(found == *expected, "{session}: {disk} of {}", point.point);
                    }
                    points += 1;
                }
                Ok(None) => {}
                // A seal that comes after the unpublish finds no session.
                Err(error) => {
                    let message = error.full_message();
                    assert!(message.starts_with("there is no session"), "{message}");
                }
            }
        }
        assert!(points > 0, "{session}: what was written is in no point");
    }
}

#[test]
fn discard_leaves_no_trace_and_sealed_points_stay() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    let open = Session::open(&repository, &name("trial")).unwrap();
    let vda = open.disk(&disk_name("vda")).unwrap();
    vda.write_at(&[5; 4096], 0).unwrap();
    let kept = open.seal().unwrap().point;
    vda.write_at(&[6; 4096], 4096).unwrap();
    drop(vda);
    drop(open);
    assert_eq!(unpublish(&repository, &name("trial"), true).unwrap(), None);
    assert_eq!(session(&repository, &name("trial")).unwrap_err().kind(), ErrorKind::NotFound);
    let mut expected = content(1);
    expected[..4096].fill(5);
    assert_eq!(point_bytes(&repository, &kept, "vda"), expected);
    enter_sealed_points(&writer(&place.path)).unwrap();
    let layers = std::fs::read_dir(repository.layers_dir()).unwrap().count();
    assert_eq!(layers, 1, "only the sealed layer is left");
    assert_eq!(point_bytes(&repository, &kept, "vda"), expected);
}

#[test]
fn a_session_that_wrote_nothing_leaves_no_point() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    drop(Session::open(&repository, &name("trial")).unwrap());
    assert_eq!(unpublish(&repository, &name("trial"), false).unwrap(), None);
    assert_eq!(Catalog::new(&repository).points(&place.point.machine).unwrap().len(), 1);
}

#[test]
fn the_name_of_an_ended_session_is_free_and_its_points_stay() {
    let place = place();
    let repository = place.open();
    let mut sealed = Vec::new();
    for number in 0..3 {
        publish(&repository, &place.point, Some(name("trial"))).unwrap();
        let session = Session::open(&repository, &name("trial")).unwrap();
        session.disk(&disk_name("vda")).unwrap().write_at(&[number; 512], 0).unwrap();
        drop(session);
        sealed.push(unpublish(&repository, &name("trial"), false).unwrap().unwrap().point);
    }
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    enter_sealed_points(&writer(&place.path)).unwrap();
    unpublish(&repository, &name("trial"), true).unwrap();
    enter_sealed_points(&writer(&place.path)).unwrap();
    assert_eq!(Catalog::new(&repository).points(&place.point.machine).unwrap().len(), 4);
    for (number, point) in sealed.iter().enumerate() {
        assert_eq!(point_bytes(&repository, point, "vda")[..512], [number as u8; 512]);
    }
}

/// The content of unwritten parts of a side file.
struct Ones(u64);

impl Disk for Ones {
    fn size_bytes(&self) -> u64 {
        self.0
    }

    fn read(&self, buffer: &mut [u8], _: u64, _: &mut ReadContext) -> coldrise_block::Result<()> {
        buffer.fill(1);
        Ok(())
    }

    fn extents(&self, at: u64, length: u64, _: usize) -> coldrise_block::Result<Vec<Extent>> {
        Ok(vec![Extent { offset_bytes: at, length_bytes: length, kind: ExtentKind::Stored }])
    }
}

#[test]
fn side_files_stay_through_openings_and_seals_and_go_with_the_session() {
    const BYTES: u64 = 10_000;
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    let read = |disk: &dyn Disk| {
        let mut bytes = vec![0; BYTES as usize];
        disk.read_at(&mut bytes, 0).unwrap();
        bytes
    };
    let below = || Arc::new(Ones(BYTES)) as Arc<dyn Disk>;
    let reader = {
        let trial = name("trial");
        open_live_side_file(&repository, &trial, "vda.vhd", BYTES, below()).unwrap()
    };
    let mut expected = vec![1; BYTES as usize];
    for round in 2..6u8 {
        let session = Session::open(&repository, &name("trial")).unwrap();
        let file = session.side_file("vda.vhd", BYTES, below()).unwrap();
        assert_eq!(read(&*file), expected);
        assert_eq!(read(&*reader), expected);
        let at = usize::from(round) * 1999;
        file.write_at(&[round; 5], at as u64 - 5).unwrap();
        expected[at - 5..at].fill(round);
        // All callers in this process share one instance, and readers see its writes at once.
        let same = session.side_file("vda.vhd", BYTES, below()).unwrap();
        assert_eq!(read(&*same), expected);
        assert_eq!(read(&*reader), expected);
        let other = session.side_file("vda.vhdx", BYTES, below()).unwrap();
        assert_eq!(read(&*other), vec![1; BYTES as usize]);
        assert_eq!(file.write_at(&[0; 2], BYTES - 1).unwrap_err().kind(), ErrorKind::OutOfRange);
        session.seal().unwrap();
        assert_eq!(read(&*file), expected);
    }
    // A session of the same name, published later, begins empty.
    unpublish(&repository, &name("trial"), true).unwrap();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    let session = Session::open(&repository, &name("trial")).unwrap();
    let file = session.side_file("vda.vhd", BYTES, below()).unwrap();
    assert_eq!(read(&*file), vec![1; BYTES as usize]);
}

#[test]
fn names_are_taken_once_and_never_stand_on_the_disk() {
    let place = encrypted_place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("very-secret-name"))).unwrap();
    let again = publish(&repository, &place.point, Some(name("very-secret-name")));
    assert_eq!(again.unwrap_err().kind(), ErrorKind::AlreadyExists);
    let missing = session(&repository, &name("other")).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
    assert!(missing.to_string().contains("very-secret-name"), "{missing}");

    let mut folders = vec![repository.live_dir()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            assert!(!entry.path().to_string_lossy().contains("secret"));
            if entry.file_type().unwrap().is_dir() {
                folders.push(entry.path());
            } else {
                let bytes = std::fs::read(entry.path()).unwrap();
                assert!(!bytes.windows(11).any(|w| w == b"secret-name"), "{:?}", entry.path());
            }
        }
    }
}

#[test]
fn a_missing_or_foreign_layer_is_found_when_the_session_opens() {
    let place = place();
    let repository = place.open();
    publish(&repository, &place.point, Some(name("trial"))).unwrap();
    let layers: Vec<PathBuf> = std::fs::read_dir(repository.layers_dir())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert_eq!(layers.len(), 2);
    let first = std::fs::read(&layers[0]).unwrap();
    std::fs::copy(&layers[1], &layers[0]).unwrap();
    let swapped = Session::open(&repository, &name("trial")).err().unwrap();
    assert_eq!(swapped.kind(), ErrorKind::Corrupt);
    std::fs::write(&layers[0], &first[..100]).unwrap();
    let truncated = Session::open(&repository, &name("trial")).err().unwrap();
    assert_eq!(truncated.kind(), ErrorKind::Corrupt);
    std::fs::remove_file(&layers[0]).unwrap();
    assert!(Session::open(&repository, &name("trial")).is_err());
    // No content was invented, and the point is unchanged.
    assert!(!layers[0].exists());
    assert_eq!(point_bytes(&repository, &place.point, "vda"), content(1));
}

#[test]
fn a_machine_whose_first_point_another_process_stores_now_is_known() {
    let place = place();
    let reader = place.open();
    let mut point = place.point.clone();
    point.machine = MachineName::parse("new").unwrap();
    writer(&place.path).put_point(&point).unwrap();
    Catalog::new(&reader).check_machine(&point.machine).unwrap();
}
