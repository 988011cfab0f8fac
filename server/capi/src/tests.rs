use super::*;
use coldrise_block::{Disk, Error, ErrorKind, Extent, ExtentKind, ReadContext, Result};
use std::collections::BTreeSet;
use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex};

/// A disk that records its requests and panics at a given place.
struct Recording {
    calls: Mutex<Vec<String>>,
}

const SIZE_BYTES: u64 = 1 << 20;
const PANIC_AT: u64 = 4096;

impl Recording {
    fn record(&self, call: String) {
        self.calls.lock().unwrap().push(call);
    }
}

impl Disk for Recording {
    fn size_bytes(&self) -> u64 {
        SIZE_BYTES
    }
    fn is_read_only(&self) -> bool {
        false
    }
    fn read(&self, buffer: &mut [u8], offset_bytes: u64, _: &mut ReadContext) -> Result<()> {
        assert_ne!(offset_bytes, PANIC_AT, "the panic of the test");
        if offset_bytes == SIZE_BYTES {
            return Err(Error::new(ErrorKind::OutOfRange, "outside\0 of the disk"));
        }
        buffer.fill(7);
        Ok(())
    }
    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        self.record(format!("write {} {offset_bytes}", bytes.len()));
        Ok(())
    }
    fn write_zeroes(&self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        self.record(format!("zero {length_bytes} {offset_bytes}"));
        Ok(())
    }
    fn trim(&self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        self.record(format!("trim {length_bytes} {offset_bytes}"));
        Ok(())
    }
    fn flush(&self) -> Result<()> {
        self.record("flush".to_owned());
        Ok(())
    }
    fn extents(&self, offset_bytes: u64, _: u64, _: usize) -> Result<Vec<Extent>> {
        let kinds = [ExtentKind::Stored, ExtentKind::Zero, ExtentKind::Hole];
        Ok((0..)
            .zip(kinds)
            .map(|(i, kind)| Extent {
                offset_bytes: offset_bytes + i * 4096,
                length_bytes: 4096,
                kind,
            })
            .collect())
    }
}

fn open() -> (Arc<Recording>, ExportHandle) {
    let disk = Arc::new(Recording { calls: Mutex::new(Vec::new()) });
    let shared: Arc<dyn Disk> = disk.clone();
    (
        disk,
        ExportHandle::new(Export::of_disk("machine/point/disk", "a disk", shared), &Arc::default()),
    )
}

fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

fn last_error() -> &'static str {
    // SAFETY: the tests read the message before the thread's next failure.
    unsafe { CStr::from_ptr(coldrise_last_error()) }.to_str().unwrap()
}

fn read(handle: &ExportHandle, offset: u64) -> c_int {
    let mut buffer = [0u8; 16];
    // SAFETY: the handle and the buffer are alive.
    unsafe { coldrise_export_read(handle, buffer.as_mut_ptr().cast(), buffer.len(), offset) }
}

#[test]
fn a_panic_becomes_eio_and_stops_the_export() {
    let (disk, handle) = open();
    assert_eq!(read(&handle, 0), 0);

    assert_eq!(read(&handle, PANIC_AT), -1);
    assert_eq!(errno(), libc::EIO);
    assert!(last_error().starts_with("machine/point/disk: a defect inside Coldrise"));
    assert!(last_error().contains("the panic of the test"), "{}", last_error());

    assert_eq!(read(&handle, 0), -1, "a stopped export answered");
    assert_eq!(errno(), libc::EIO);
    // SAFETY: the handle is alive.
    assert_eq!(unsafe { coldrise_export_flush(&handle) }, -1);
    assert_eq!(errno(), libc::EIO);
    assert!(disk.calls.lock().unwrap().is_empty(), "the disk was called after the panic");
    // SAFETY: the handle is alive.
    assert_eq!(unsafe { coldrise_export_size(&handle) }, SIZE_BYTES);

    let (_, other) = open();
    assert_eq!(read(&other, 0), 0, "another export was stopped too");
}

#[test]
fn an_error_leaves_errno_and_a_message_for_its_thread() {
    let (_, handle) = open();
    assert_eq!(read(&handle, SIZE_BYTES), -1);
    assert_eq!(errno(), libc::EINVAL);
    assert_eq!(last_error(), "outside\u{fffd} of the disk");
    let elsewhere = std::thread::spawn(|| last_error().to_owned()).join().unwrap();
    assert_eq!(elsewhere, "");
    assert_eq!(read(&handle, 0), 0, "an error is not a defect");
}

#[test]
fn fua_flushes_after_the_change_and_only_then() {
    let (disk, handle) = open();
    let bytes = [1u8; 512];
    // SAFETY: the handle and the bytes are alive.
    unsafe {
        assert_eq!(coldrise_export_write(&handle, bytes.as_ptr().cast(), 512, 1, 0), 0);
        assert_eq!(coldrise_export_write(&handle, bytes.as_ptr().cast(), 512, 2, FUA), 0);
        assert_eq!(coldrise_export_zero(&handle, 3, 4, FUA), 0);
        assert_eq!(coldrise_export_trim(&handle, 5, 6, FUA), 0);
        assert_eq!(coldrise_export_zero(&handle, 7, 8, 0), 0);
        assert_eq!(coldrise_export_trim(&handle, 9, 10, 0), 0);
    }
    assert_eq!(
        *disk.calls.lock().unwrap(),
        [
            "write 512 1",
            "write 512 2",
            "flush",
            "zero 3 4",
            "flush",
            "trim 5 6",
            "flush",
            "zero 7 8",
            "trim 9 10"
        ]
    );
}

#[test]
fn unknown_flags_change_nothing() {
    let (disk, handle) = open();
    // SAFETY: the handle and the bytes are alive.
    unsafe {
        assert_eq!(coldrise_export_write(&handle, b"x".as_ptr().cast(), 1, 0, 2), -1);
        assert_eq!(coldrise_export_zero(&handle, 1, 0, 2), -1);
        assert_eq!(coldrise_export_trim(&handle, 1, 0, 2), -1);
    }
    assert_eq!(errno(), libc::EINVAL);
    assert!(disk.calls.lock().unwrap().is_empty());
}

#[test]
fn null_is_refused_and_no_length_needs_no_buffer() {
    let (_, handle) = open();
    // SAFETY: NULL is what is tested; the handle is alive.
    unsafe {
        assert_eq!(coldrise_export_read(null(), null_mut(), 1, 0), -1);
        assert_eq!(errno(), libc::EINVAL);
        assert_eq!(coldrise_export_read(&handle, null_mut(), 1, 0), -1);
        assert_eq!(errno(), libc::EINVAL);
        assert_eq!(coldrise_export_write(&handle, null(), 1, 0, 0), -1);
        assert_eq!(coldrise_export_extents(&handle, 1, 0, 1, None, null_mut()), -1);
        assert_eq!(coldrise_export_open(null(), c"x".as_ptr(), 0, null_mut()), -1);
        assert_eq!(coldrise_repository_open(null(), null(), null_mut()), -1);
        assert_eq!(coldrise_export_read(&handle, null_mut(), 0, 0), 0);
        assert_eq!(coldrise_export_write(&handle, null(), 0, 0, 0), 0);
        coldrise_export_close(null_mut());
        coldrise_repository_close(null_mut());
    }
}

unsafe extern "C" fn collect(context: *mut c_void, offset: u64, length: u64, flags: u32) -> c_int {
    // SAFETY: the tests pass their vector as the context.
    let seen = unsafe { &mut *context.cast::<Vec<(u64, u64, u32)>>() };
    seen.push((offset, length, flags));
    if seen.len() == 3 { 1 } else { 0 }
}

#[test]
fn open_exports_are_closed_once_with_their_repository() {
    let table = Arc::new(OpenHandles::default());
    let give = || table.give(Box::new(ExportHandle { opened_by: Arc::clone(&table), ..open().1 }));
    let (first, _second) = (give(), give());
    // SAFETY: both came from the table and are alive.
    unsafe { coldrise_export_close(first) };
    assert_eq!(table.take_all().len(), 1);
    assert_eq!(table.take_all().len(), 0);
}

#[test]
fn extents_keep_their_kinds_their_limit_and_their_callers_veto() {
    let (_, handle) = open();
    let mut seen: Vec<(u64, u64, u32)> = Vec::new();
    let context: *mut c_void = (&raw mut seen).cast();
    // SAFETY: the handle and the vector are alive.
    unsafe {
        assert_eq!(coldrise_export_extents(&handle, 8192, 0, 2, Some(collect), context), 0);
    }
    assert_eq!(seen, [(0, 4096, 0), (4096, 4096, EXTENT_HOLE)]);
    seen.clear();
    let context: *mut c_void = (&raw mut seen).cast();
    // SAFETY: the handle and the vector are alive.
    unsafe {
        assert_eq!(coldrise_export_extents(&handle, 12288, 0, 9, Some(collect), context), -1);
    }
    assert_eq!(errno(), libc::ECANCELED);
    assert_eq!(seen[2], (8192, 4096, EXTENT_HOLE));
}

/// The library exports exactly the functions that the header declares.
#[test]
fn header_and_library_have_the_same_functions() {
    let headers =
        [include_str!("../include/coldrise.h"), include_str!("../include/coldrise-folders.h")];
    let declared: BTreeSet<_> = headers
        .iter()
        .flat_map(|header| header.split(" ("))
        .filter_map(|before| before.rsplit([' ', '*', '\n']).next())
        .filter(|word| word.starts_with("coldrise_") && !word.ends_with("_callback"))
        .collect();
    let sources = [
        include_str!("data.rs"),
        include_str!("folders/calls.rs"),
        include_str!("folders/client_calls.rs"),
        include_str!("folders/file_calls.rs"),
        include_str!("folders/node_calls.rs"),
        include_str!("lib.rs"),
        include_str!("message.rs"),
        include_str!("names.rs"),
        include_str!("repository.rs"),
    ];
    let exported: BTreeSet<_> = sources
        .iter()
        .flat_map(|source| source.split("#[unsafe(no_mangle)]").skip(1))
        .filter_map(|after| after.split_once(" fn ")?.1.split_once('(').map(|(name, _)| name))
        .collect();
    assert_eq!(declared, exported);
    assert!(declared.len() >= 38, "{declared:?}");
}
