//! What is lost or damaged in a bucket, or not ours.

use std::sync::atomic::Ordering;

use super::tests::{Bucket, open, point, random};
use super::*;
use coldrise_store::{BackupTarget, PointDocument, WriteOptions};

#[test]
fn a_base_with_lost_data_is_not_used() {
    let bucket = Bucket::new();
    let content = random(1, 500);
    let first = bucket.add(1, None, &content);
    let writer = bucket.writer().unwrap();
    assert!(writer.is_whole(&first).unwrap());
    drop(writer);
    let name = bucket.memory.largest_pack();
    let kept = bucket.memory.get(&name, u64::MAX).unwrap();
    let headless = [vec![0; 8], kept[8..].to_vec()].concat();
    let cut = kept[..kept.len() - 100].to_vec();
    let forms = [None, Some(cut), Some(vec![0; 50]), Some(Vec::new()), Some(headless)];
    for (second, lost) in (2..).zip(forms) {
        match lost {
            None => bucket.memory.delete(&name).unwrap(),
            Some(content) => bucket.memory.put(&name, content).unwrap(),
        }
        let writer = bucket.writer().unwrap();
        assert!(!writer.is_whole(&first).unwrap(), "{second}");
        drop(writer);
        // Its content is stored again.
        let next = bucket.add(second, None, &content);
        assert!(bucket.content(&next).unwrap() == content, "{second}");
        let writer = bucket.writer().unwrap();
        assert!(writer.is_whole(&next).unwrap() && !writer.is_whole(&first).unwrap());
    }
    bucket.memory.put(&name, kept).unwrap();
    assert!(bucket.writer().unwrap().is_whole(&first).unwrap());
}

/// A bucket with one point, of which one value is damaged; what the point had, and the point.
fn with_a_damaged_value() -> (Bucket, Vec<u8>, PointDocument) {
    let bucket = Bucket::new();
    let content = random(1, 500);
    let first = bucket.add(1, None, &content);
    let name = bucket.memory.largest_pack();
    let size = bucket.memory.get(&name, u64::MAX).unwrap().len();
    bucket.memory.flip(&name, size - 5000);
    (bucket, content, first)
}

#[test]
fn a_cancelled_mend_fails_only_with_interrupted() {
    let (bucket, content, _) = with_a_damaged_value();
    for gets in 0..1000 {
        let repository = open(&bucket.memory);
        bucket.memory.gets_left.store(gets, Ordering::Relaxed);
        let mended = repository.verify(BucketCheck::Mend);
        bucket.memory.gets_left.store(-1, Ordering::Relaxed);
        match mended {
            Ok(report) => {
                assert!(gets > 3 && report.damaged.len() == 1, "{gets}");
                let next = bucket.add(2, None, &content);
                assert!(bucket.content(&next).unwrap() == content);
                return;
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::Interrupted, "{gets}: {error}"),
        }
    }
    panic!("it never ended");
}

#[test]
fn damaged_values_are_removed_and_stored_again() {
    let (bucket, content, first) = with_a_damaged_value();
    // No list shows it.
    let second = bucket.add(2, Some(&first), &content);
    assert!(bucket.content(&second).is_err());
    let report = open(&bucket.memory).verify(BucketCheck::Mend).unwrap();
    assert_eq!((report.damaged.len(), report.mended_packs), (2, 1));
    let writer = bucket.writer().unwrap();
    assert!(!writer.is_whole(&second).unwrap());
    drop(writer);
    let third = bucket.add(3, None, &content);
    assert!(bucket.content(&third).unwrap() == content);
    let report = open(&bucket.memory).verify(BucketCheck::Mend).unwrap();
    assert_eq!((report.damaged.len(), report.mended_packs), (2, 0));
}

#[test]
fn one_bad_document_leaves_the_others() {
    let bucket = Bucket::new();
    let content = random(1, 100);
    let first = bucket.add(1, None, &content);
    let second = bucket.add(2, Some(&first), &content);
    let repository = open(&bucket.memory);
    let name = repository.name_of_point(&second.machine, &second.point);
    bucket.memory.flip(&name, 40);
    for stray in ["points/zzz", "points/.DS_Store", "points/a/b", "packs/zzz", "files/x"] {
        bucket.memory.put(stray, b"x".to_vec()).unwrap();
    }
    assert_eq!(repository.machines().unwrap(), std::slice::from_ref(&first.machine));
    assert_eq!(repository.all_points().unwrap(), std::slice::from_ref(&first));
    assert_eq!(
        repository.damaged_points().into_keys().collect::<Vec<_>>(),
        std::slice::from_ref(&name)
    );
    assert_eq!(repository.verify(BucketCheck::Full).unwrap().damaged[0].address, name);
    // Nobody knows what it needs.
    assert_eq!(repository.compact(false).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(repository.remove_damaged_points().unwrap(), 1);
    repository.compact(false).unwrap();
    assert!(bucket.content(&first).unwrap() == content);
    // All points vanish: that is no reason to remove the rest.
    bucket.memory.delete(&repository.name_of_point(&first.machine, &first.point)).unwrap();
    let repository = open(&bucket.memory);
    assert_eq!(repository.compact(false).unwrap_err().kind(), ErrorKind::Corrupt);
    assert!(repository.verify(BucketCheck::Full).unwrap().other_packs > 0);
    repository.compact(true).unwrap();
    // But for what is not a pack.
    assert_eq!(bucket.memory.count("packs/"), 1);
}

#[test]
fn another_key_writes_nothing() {
    let bucket = Bucket::new();
    bucket.add(1, None, &random(1, 100));
    let other = Bucket::new();
    let kept = bucket.memory.get(CONFIG, u64::MAX).unwrap();
    for name in [CONFIG, CONFIG_COPY] {
        let config = other.memory.get(name, u64::MAX).unwrap();
        bucket.memory.put(name, config).unwrap();
    }
    let before = bucket.memory.count("");
    let repository = open(&bucket.memory);
    let begun = BucketWriter::begin_in(&repository, &other.local.path().join("index"));
    assert_eq!(begun.map(|_| ()).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(repository.verify(BucketCheck::Mend).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(repository.remove_damaged_points().unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(repository.compact(false).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(bucket.memory.count(""), before);
    // One of two is noticed at once.
    bucket.memory.put(CONFIG, kept).unwrap();
    let objects = Arc::clone(&bucket.memory) as Arc<dyn Objects>;
    let opened = BucketRepository::open(objects, &PassphraseSource::None);
    assert_eq!(opened.map(|_| ()).unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn a_writer_that_may_not_remove_anything_blocks_no_other() {
    let bucket = Bucket::new();
    bucket.memory.refuses_removal.store(true, Ordering::Relaxed);
    bucket.add(1, None, &random(1, 100));
    assert_eq!(bucket.memory.count("busy/"), 1);
    bucket.memory.refuses_removal.store(false, Ordering::Relaxed);
    bucket.repository.compact(false).unwrap();
    assert_eq!(bucket.memory.count("busy/"), 0);
    // Nor does one whose time lies ahead.
    bucket.memory.clock_minutes.fetch_add(600, Ordering::Relaxed);
    bucket.memory.put("busy/w-ahead", Vec::new()).unwrap();
    bucket.memory.clock_minutes.fetch_sub(600, Ordering::Relaxed);
    bucket.repository.compact(false).unwrap();
}

#[test]
fn a_writer_whose_sign_was_removed_adds_nothing() {
    let bucket = Bucket::new();
    let writer = bucket.writer().unwrap();
    let content = random(1, 100);
    let mut disk = writer.start_disk(None, content.len() as u64, WriteOptions::default()).unwrap();
    disk.write(0, content.clone()).unwrap();
    let (root, _) = disk.finish().unwrap();
    let sign = bucket.memory.list("busy/").unwrap().remove(0).name;
    bucket.memory.delete(&sign).unwrap();
    let refused = writer.put_point(&point(1, root, content.len() as u64), None).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Incomplete);
    assert!(bucket.repository.all_points().unwrap().is_empty());
}

#[test]
fn removed_data_is_noticed_after_the_index_is_lost() {
    let (bucket, content, first) = with_a_damaged_value();
    assert_eq!(open(&bucket.memory).verify(BucketCheck::Mend).unwrap().mended_packs, 1);
    std::fs::remove_dir_all(bucket.local.path().join("index")).unwrap();
    let writer = bucket.writer().unwrap();
    assert!(!writer.is_whole(&first).unwrap());
    drop(writer);
    let next = bucket.add(2, None, &content);
    assert!(bucket.content(&next).unwrap() == content);
}

#[test]
fn damaged_names_cost_no_value() {
    let bucket = Bucket::new();
    let content = random(1, 500);
    let first = bucket.add(1, None, &content);
    let name = bucket.memory.largest_pack();
    let head = pack::Head::parse(&bucket.memory.get(&name, u64::MAX).unwrap()).unwrap();
    bucket.memory.flip(&name, head.names.start as usize + 40);
    for check in [BucketCheck::Quick, BucketCheck::Full] {
        let damaged = open(&bucket.memory).verify(check).unwrap().damaged;
        assert_eq!(damaged.iter().map(|one| &one.address).collect::<Vec<_>>(), [&name]);
    }
    // Points that are there are bases all the same.
    assert!(bucket.writer().unwrap().is_whole(&first).unwrap());
    let report = open(&bucket.memory).verify(BucketCheck::Mend).unwrap();
    let done = (report.damaged.len(), report.mended_packs, report.renamed_packs);
    assert_eq!(done, (1, 0, 1));
    assert!(bucket.content(&first).unwrap() == content);
    assert_eq!(open(&bucket.memory).verify(BucketCheck::Full).unwrap().damaged, []);
    // Its names are known again, without an index, too.
    std::fs::remove_dir_all(bucket.local.path().join("index")).unwrap();
    let packs = bucket.memory.count("packs/");
    let second = bucket.add(2, None, &content);
    assert!(bucket.content(&second).unwrap() == content);
    assert_eq!(bucket.memory.count("packs/"), packs + 1, "only a pack of pages");
}

#[test]
fn a_lost_configuration_is_put_back() {
    let bucket = Bucket::new();
    bucket.add(1, None, &random(1, 100));
    for (name, lost) in [(CONFIG, None), (CONFIG_COPY, Some(b"{".to_vec()))] {
        let kept = bucket.memory.get(name, u64::MAX).unwrap();
        match lost {
            None => bucket.memory.delete(name).unwrap(),
            Some(content) => bucket.memory.put(name, content).unwrap(),
        }
        let repository = open(&bucket.memory);
        for check in [BucketCheck::Quick, BucketCheck::Mend] {
            let report = repository.verify(check).unwrap();
            let damaged: Vec<_> = report.damaged.iter().map(|one| one.address.as_str()).collect();
            assert_eq!(damaged, [name]);
            assert_eq!(report.put_back.is_some(), check == BucketCheck::Mend);
        }
        assert!(bucket.memory.get(name, u64::MAX).unwrap() == kept);
        assert_eq!(open(&bucket.memory).verify(BucketCheck::Full).unwrap().damaged, []);
    }
}
