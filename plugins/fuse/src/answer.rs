//! The boundary to the kernel: errors become errnos, and panics do not cross it.

use coldrise_block::{Error, ErrorKind, defect};
use coldrise_export::{Node, OpenFile};
use fuser::Errno;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// The answer to a request.
pub(crate) type Answer<T> = std::result::Result<T, Errno>;

/// Answers a request on an open file; see `Served::on_file`.
pub(crate) fn on_open_file<T>(
    file: &Arc<OpenFile>,
    call: impl FnOnce(&OpenFile) -> coldrise_block::Result<T>,
) -> Answer<T> {
    // Unwind safe: after a panic the file refuses every call.
    match catch_unwind(AssertUnwindSafe(|| call(file))) {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(refused(file.path(), &error)),
        Err(panic) => {
            file.poison();
            tracing::error!("{}: {}", file.path(), defect(panic));
            Err(Errno::EIO)
        }
    }
}

/// The errno for an error. The message goes to the log, because the client sees
/// only a number. `NotFound` is not logged.
pub(crate) fn refused(what: &str, error: &Error) -> Errno {
    let message = error.full_message();
    match error.kind() {
        ErrorKind::NotFound => {}
        // Restore points are a read-only file system: the number says it, and programs try.
        ErrorKind::ReadOnly if !what.starts_with("live/") => {}
        ErrorKind::Corrupt | ErrorKind::Io | ErrorKind::Poisoned | ErrorKind::Internal => {
            tracing::error!("{what}: {message}");
        }
        _ => tracing::warn!("{what}: {message}"),
    }
    Errno::from_i32(error.kind().errno())
}

/// The errno for requests that a folder never allows. Points are a read-only file
/// system; sessions are published and ended by commands.
pub(crate) fn not_here(folder: &Node, what: &str) -> Errno {
    if !folder.is_live() {
        return Errno::EROFS;
    }
    tracing::warn!(
        "{}: {what} is refused: only files and folders can be made, in folders of sessions; \
         publish and end sessions with coldrise publish and coldrise unpublish",
        folder.path()
    );
    Errno::EPERM
}

#[cfg(test)]
mod tests {
    use super::*;
    use coldrise_block::{Disk, Extent, ReadContext, Result};
    use coldrise_export::Export;

    /// A disk whose second half panics.
    struct Broken;

    impl Disk for Broken {
        fn size_bytes(&self) -> u64 {
            8192
        }

        fn read(&self, _: &mut [u8], offset_bytes: u64, _: &mut ReadContext) -> Result<()> {
            assert!(offset_bytes < 4096, "read too far");
            Ok(())
        }

        fn extents(&self, _: u64, _: u64, _: usize) -> Result<Vec<Extent>> {
            Err(Error::new(ErrorKind::Corrupt, "a page is missing"))
        }
    }

    fn open() -> Arc<OpenFile> {
        let export = Export::of_disk("web01/latest/vda", "", Arc::new(Broken));
        Arc::new(OpenFile::new("web01/latest/vda.raw", export))
    }

    #[test]
    fn a_panic_is_an_io_error_and_stops_the_file() {
        let file = open();
        let read = |offset| on_open_file(&file, |file| file.read(&mut [0; 512], offset));
        assert_eq!(read(0).map_err(|errno| errno.code()), Ok(512));
        assert_eq!(read(4096).map_err(|errno| errno.code()), Err(libc::EIO));
        assert_eq!(read(0).map_err(|errno| errno.code()), Err(libc::EIO), "it was stopped");
    }

    #[test]
    fn an_error_is_its_errno() {
        let file = open();
        let code = |answer: Answer<u64>| answer.map_err(|errno| errno.code());
        let holes = on_open_file(&file, |file| file.next_hole(0));
        assert_eq!(code(holes), Err(libc::EIO));
        let behind = on_open_file(&file, |file| file.next_hole(8193));
        assert_eq!(code(behind), Err(libc::EINVAL));
        let written = on_open_file(&file, |file| file.write(b"x", 0).map(|()| 0));
        assert_eq!(code(written), Err(libc::EROFS));
    }
}
