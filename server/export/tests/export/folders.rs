//! The tree as folders, on a real repository.

use coldrise_block::ErrorKind;
use coldrise_export::{NodeType, read_leases};
use coldrise_session::{Catalog, publish, unpublish};
use coldrise_store::{MachineName, SessionName};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{at, folders, repository};

#[test]
fn many_points_are_listed_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let repository = repository(&folder, 1000);
    let tree = folders(&repository);
    let started = Instant::now();
    let machine = at(&tree, "web01");
    let points = tree.entries(&machine).unwrap();
    assert_eq!(points.len(), 1001);
    let mut ids = HashSet::new();
    for entry in &points {
        assert!(ids.insert(entry.file_id), "{} has another one's number", entry.name);
        let node = tree.find(&machine, &entry.name).unwrap();
        assert_eq!((node.file_id(), node.node_type()), (entry.file_id, entry.node_type));
        if entry.node_type == NodeType::Link {
            assert_eq!(tree.target(&node).unwrap(), points[points.len() - 2].name);
            continue;
        }
        let files = tree.entries(&node).unwrap();
        assert_eq!(files.len(), 13, "{files:?}");
        ids.extend(files.iter().map(|file| file.file_id));
    }
    assert_eq!(ids.len(), 1001 + 13 * 1000);
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    // Listing opens nothing.
    assert!(read_leases(&repository).unwrap()[0].served.is_empty());
}

#[test]
fn opens_of_the_same_file_share_one_export() {
    let folder = tempfile::tempdir().unwrap();
    let repository = repository(&folder, 2);
    let tree = folders(&repository);
    let name = tree.target(&at(&tree, "web01/latest")).unwrap();
    let path = format!("web01/{name}/vda.vhdx");
    let served = || read_leases(&repository).unwrap()[0].served.len();

    let first = tree.open(&at(&tree, &path), false).unwrap();
    let second = tree.open(&at(&tree, &path), false).unwrap();
    let other = tree.open(&at(&tree, &path.replace("vhdx", "raw")), false).unwrap();
    assert!(Arc::ptr_eq(&first, &second));
    assert_eq!((served(), tree.open_paths().len()), (2, 2));
    drop((first, other));
    assert_eq!(served(), 1, "one reader is left");
    drop(second);
    assert_eq!((served(), tree.open_paths().len()), (0, 0));
    let refused = tree.open(&at(&tree, &path), true).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::ReadOnly);
}

#[test]
fn a_session_of_the_same_name_is_another_one() {
    let folder = tempfile::tempdir().unwrap();
    let repository = repository(&folder, 1);
    let tree = folders(&repository);
    let name = SessionName::parse("trial").unwrap();
    let machine = MachineName::parse("web01").unwrap();
    let point = Catalog::new(&repository).points(&machine).unwrap().remove(0);

    publish(&repository, &point, Some(name.clone())).unwrap();
    let first = at(&tree, "live/trial/vda.raw");
    let again = at(&tree, "live/trial/vda.raw");
    assert!(first.is_same(&again) && first.file_id() == again.file_id());
    assert!(tree.attributes(&first).unwrap().is_writable);
    unpublish(&repository, &name, true).unwrap();
    assert_eq!(tree.attributes(&first).unwrap_err().kind(), ErrorKind::NotFound);

    publish(&repository, &point, Some(name)).unwrap();
    let other = at(&tree, "live/trial/vda.raw");
    assert!(!first.is_same(&other) && first.file_id() != other.file_id());
    // A holder of the old node does not get the new one by mistake.
    assert_eq!(tree.open(&first, true).err().unwrap().kind(), ErrorKind::NotFound);
    let file = tree.open(&other, true).unwrap();
    file.write(b"new", 0).unwrap();
    assert!(tree.attributes(&other).unwrap().stored_bytes > 0);
}

#[test]
fn a_text_is_read_to_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let repository = repository(&folder, 1);
    let tree = folders(&repository);
    let name = tree.target(&at(&tree, "web01/latest")).unwrap();
    let node = at(&tree, &format!("web01/{name}/web01.vmx"));
    let file = tree.open(&node, false).unwrap();
    let mut buffer = [0; 100];
    assert_eq!(file.read(&mut buffer, 0).unwrap(), 8);
    assert_eq!(&buffer[..8], b"a = \"b\"\n");
    assert_eq!(file.read(&mut buffer, 6).unwrap(), 2);
    assert_eq!(file.read(&mut buffer, 1000).unwrap(), 0);
    let attributes = tree.attributes(&node).unwrap();
    assert_eq!((attributes.size_bytes, attributes.stored_bytes), (8, 8));
}
