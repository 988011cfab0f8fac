//! Measures the cost of listing many points. The test runs alone in its process, because it
//! counts the trace events of the repository.

mod common;

use coldrise_block::ErrorKind;
use coldrise_export::NodeType;
use common::{at, folders, repository};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts the documents that the repository opens.
struct Documents(Arc<AtomicUsize>);

impl tracing::Subscriber for Documents {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == "coldrise_store::repository"
    }
    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

fn opened_documents(work: impl FnOnce()) -> usize {
    let count = Arc::new(AtomicUsize::new(0));
    tracing::subscriber::with_default(Documents(Arc::clone(&count)), work);
    count.load(Ordering::Relaxed)
}

#[test]
fn a_list_with_attributes_opens_each_document_once() {
    const POINTS: usize = 100;
    let folder = tempfile::tempdir().unwrap();
    let repository = repository(&folder, POINTS as i64);
    let tree = folders(&repository);
    let machine = at(&tree, "web01");
    let lease = || {
        let files = std::fs::read_dir(repository.leases_dir()).unwrap();
        let seen = files.map(|file| file.unwrap().metadata().unwrap());
        seen.map(|seen| (seen.ino(), seen.ctime(), seen.ctime_nsec())).collect::<Vec<_>>()
    };
    let before = lease();
    let mut ids = Vec::new();
    let opened = opened_documents(|| {
        for point in tree.entries(&machine).unwrap() {
            tree.attributes(&point.node).unwrap();
            if point.node_type == NodeType::Folder {
                let files = tree.entries(&point.node).unwrap();
                for file in &files {
                    tree.attributes(&file.node).unwrap();
                }
                ids.extend(files.iter().map(|file| (point.file_id, file.file_id)));
            }
        }
    });
    assert_eq!(ids.len(), 13 * POINTS);
    // The link's target is looked up by itself.
    assert!((POINTS..=POINTS + 5).contains(&opened), "{opened} documents were opened");
    assert_eq!(lease(), before, "a look takes no lease");

    // By number: the machine is listed once, then each point is found by its name.
    let opened = opened_documents(|| {
        for (point, file) in &ids {
            let point = tree.find_id(&machine, *point).unwrap();
            assert_eq!(tree.find_id(&point, *file).unwrap().file_id(), *file);
        }
        assert_eq!(tree.find_id(&machine, 5).unwrap_err().kind(), ErrorKind::NotFound);
    });
    assert!(opened <= ids.len() + 3 * POINTS, "{opened} documents were opened");
}
