//! The proof that a machine was off, and that none of its images changed, while they were read.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::{FileWatch, FilesState, ScratchSpace};
use coldrise_hypervisors::libvirt::{Domain, DomainState};
use coldrise_hypervisors::virsh::Virsh;

/// How often the files are looked at while they are read. A machine that starts is slowed down by the reader for as
/// long.
const INTERVAL: Duration = Duration::from_millis(50);

/// A domain that is off, and the files of its images, which its host watches.
pub(crate) struct Stillness {
    domain: Domain,
    files: FileWatch,
    /// Why it ended.
    broken: Mutex<Option<String>>,
}

impl Stillness {
    /// Begins before the first byte is read. It needs the private folder until its end.
    ///
    /// # Errors
    /// `Busy` if the domain runs or a program has an image open for writing.
    pub(super) fn begin(
        virsh: &Virsh,
        uuid: &str,
        space: &ScratchSpace,
        paths: Vec<PathBuf>,
    ) -> Result<Stillness> {
        let files = space.watch(paths)?;
        let domain = Domain::new(virsh, uuid);
        let still = Stillness { domain, files, broken: Mutex::new(None) };
        still.prove()?;
        Ok(still)
    }

    /// Whether the domain is off now and nothing was written since the beginning. A machine that was started and ended
    /// in between, and wrote, has changed a file.
    ///
    /// # Errors
    /// `Busy` or `Incomplete` with the reason; `ToolFailed` if libvirt does not tell, `Io` if the host does not: it is
    /// then unproven.
    pub(crate) fn prove(&self) -> Result<()> {
        if self.domain.state()? != DomainState::Off {
            return Err(self.end(ErrorKind::Busy, "the machine was started".to_owned()));
        }
        self.look()
    }

    fn look(&self) -> Result<()> {
        match self.files.state()? {
            FilesState::Unchanged => Ok(()),
            FilesState::Opened(path) => {
                let text = format!("a program has opened {} for writing", path.display());
                Err(self.end(ErrorKind::Busy, text).advise(
                    "end the program; or start the machine: QEMU then reads the image for the backup",
                ))
            }
            FilesState::Changed(path) => {
                let text = format!("{} has changed", path.display());
                Err(self.end(ErrorKind::Incomplete, text))
            }
        }
    }

    fn end(&self, kind: ErrorKind, why: String) -> Error {
        let mut broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
        let why = broken.get_or_insert(why).clone();
        Error::new(kind, why)
    }

    /// Why it has ended.
    pub(crate) fn broken(&self) -> Option<String> {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets `stop` as soon as it has ended, or `cancel` is set; until the sender of `ended` is dropped.
    pub(crate) fn watch(&self, cancel: &AtomicBool, stop: &AtomicBool, ended: &Receiver<()>) {
        while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
            // What cannot be looked at now is looked at again for the proof.
            if self.look().is_err() && self.broken().is_some() || cancel.load(Ordering::Relaxed) {
                stop.store(true, Ordering::Relaxed);
            }
        }
    }
}
