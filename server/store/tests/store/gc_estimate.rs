//! Writers and readers can estimate the space that a gc would free.

use std::sync::atomic::AtomicBool;

use coldrise_block::ErrorKind;
use coldrise_store::*;

use crate::common::*;

static NEVER: AtomicBool = AtomicBool::new(false);

#[test]
fn reachable_chunks_are_counted_once_and_the_rest_is_reclaimable() {
    let store = Store::new();
    let writer = store.writer();
    // Chunks 0..2560 of one disk; the second changes 512 of them and shares the rest.
    let first = noise(1, 2560 * CHUNK);
    let mut second = first.clone();
    second[..512 * CHUNK].copy_from_slice(&noise(2, 512 * CHUNK));
    let (first_root, _) = write_all(&writer, None, &first);
    let (second_root, _) = write_all(&writer, Some(first_root), &second);
    let (other_root, _) = write_all(&writer, None, &noise(3, 4096 * CHUNK));
    writer.put_point(&point("web01", "20261120T100000Z", first_root, 1)).unwrap();
    drop(writer);
    let reader = store.reader();
    let marked = |roots: &[MapRoot]| reader.reachable(roots.iter().copied(), &NEVER).unwrap();

    let both = marked(&[first_root, second_root, first_root, MapRoot::EMPTY]);
    assert_eq!(both.chunks(), 2560 + 512);
    // Three leaves and a root each; the second map shares two of the leaves.
    assert_eq!(both.pages(), 4 + 2);
    assert_eq!(marked(&[]).chunks(), 0);

    let all = marked(&[first_root, second_root, other_root]);
    assert_eq!(reader.estimate_gc(&all, MaxUnused::default()).unwrap(), GcEstimate::default());
    let without_other = reader.estimate_gc(&both, MaxUnused::default()).unwrap();
    assert_eq!((without_other.chunks, without_other.kept_chunks), (4096, 0));
    assert!(without_other.dropped_files > 0 && without_other.rewritten_files == 0);
    let payload = (4096 * CHUNK) as u64;
    assert!((payload..payload * 11 / 10).contains(&without_other.bytes), "{without_other:?}");

    // A fifth of the first disk's file is then unreferenced: it stays.
    let without_first =
        reader.estimate_gc(&marked(&[second_root, other_root]), MaxUnused::default()).unwrap();
    assert_eq!((without_first.chunks, without_first.kept_chunks), (0, 512));
    assert!(without_first.kept_bytes >= (512 * CHUNK) as u64);
    let nothing = reader.estimate_gc(&marked(&[]), MaxUnused::default()).unwrap();
    assert_eq!(nothing.chunks, 2560 + 512 + 4096);
    // The pages of the last disk are still in the log.
    assert!((4 + 2..=4 + 2 + 5).contains(&nothing.pages), "{nothing:?}");
}

#[test]
fn marking_can_be_cancelled_and_fails_on_a_missing_page() {
    let store = Store::new();
    let writer = store.writer();
    let (root, _) = write_all(&writer, None, &noise(1, 2000 * CHUNK));
    drop(writer);
    let reader = store.reader();
    let cancelled = reader.reachable([root], &AtomicBool::new(true)).unwrap_err();
    assert_eq!(cancelled.kind(), ErrorKind::Interrupted);
    let text = serde_json::to_string(&root).unwrap().replace("\"page\":", "\"page\":100");
    let absent: MapRoot = serde_json::from_str(&text).unwrap();
    let missing = reader.reachable([absent], &NEVER).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::Corrupt);
}
