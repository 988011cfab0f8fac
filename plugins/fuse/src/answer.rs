//! The border to the kernel: errors become errno, panics stay inside.

use crate::served::{Served, Tree};
use coldrise_block::{defect, Error, ErrorKind};
use coldrise_export::{Node, OpenFile};
use fuser::Errno;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;

/// What a request is answered with.
pub(crate) type Answer<T> = std::result::Result<T, Errno>;

impl Served {
    /// Answers a request that belongs to no open file.
    pub(crate) fn answer<T>(&self, call: impl FnOnce(&Tree) -> Answer<T>) -> Answer<T> {
        // Unwind safe: what a panic leaves behind is dropped with the call, or lies
        // behind locks and atomics whose tables settle on unwinding.
        let answered = self.with(|tree| catch_unwind(AssertUnwindSafe(|| call(tree))));
        match answered {
            Some(Ok(answer)) => answer,
            Some(Err(panic)) => {
                tracing::error!("{}", defect(panic));
                Err(Errno::EIO)
            }
            None => Err(Errno::ENODEV),
        }
    }

    /// Answers a request on an open file; a panic stops the file for good, and with
    /// it every file of its session.
    #[inline]
    pub(crate) fn on_file<T>(
        &self,
        handle: u64,
        call: impl FnOnce(&OpenFile) -> coldrise_block::Result<T>,
    ) -> Answer<T> {
        self.answer(|tree| {
            let file = tree.files.get(handle).ok_or(Errno::EBADF)?;
            on_open_file(&file, call)
        })
    }
}

/// The same for a file at hand.
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

/// The errno for an error, which is told in the log: whoever asked sees a number
/// only. That there is nothing of some name is no news.
pub(crate) fn refused(what: &str, error: &Error) -> Errno {
    let message = error.full_message();
    match error.kind() {
        ErrorKind::NotFound => {}
        ErrorKind::Corrupt | ErrorKind::Io | ErrorKind::Poisoned | ErrorKind::Internal => {
            tracing::error!("{what}: {message}");
        }
        _ => tracing::warn!("{what}: {message}"),
    }
    Errno::from_i32(error.kind().errno())
}

/// The errno for what nobody can do in a folder. Points are read-only, as a
/// file system can be; sessions are published and ended by other means.
pub(crate) fn not_here(folder: &Node, what: &str) -> Errno {
    if !folder.is_live() {
        return Errno::EROFS;
    }
    tracing::warn!(
        "{}: {what} is refused: there are files and folders, in the folders of sessions; publish \
         and end sessions with coldrise publish and coldrise unpublish",
        folder.path()
    );
    Errno::EPERM
}

#[cfg(test)]
mod tests {
    use super::*;
    use coldrise_block::{Disk, Extent, Result};
    use coldrise_export::Export;

    /// A disk whose second half is broken code.
    struct Broken;

    impl Disk for Broken {
        fn size_bytes(&self) -> u64 {
            8192
        }

        fn read_at(&self, _buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
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
