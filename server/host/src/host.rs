//! A hypervisor's host: this one, or one at the other end of a connection.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base64::engine::general_purpose::STANDARD;
use base64::Engine;
use coldrise_block::{Error, ErrorKind, Result};

use crate::channel::Channel;
use crate::files::{FileFacts, FilesState};
use crate::messages::{Answer, Facts, Request};
use crate::programs::{ProgramStart, ProgramState};
use crate::tasks::HostTasks;

/// A host. Copies share its connection.
#[derive(Clone)]
pub struct Host(Arc<dyn Channel>);

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Host").field(&self.0.name()).finish()
    }
}

impl Host {
    /// This host.
    pub fn here() -> Host {
        Host(Arc::new(HostTasks::default()))
    }

    /// The host at the other end of `channel`.
    pub fn over(channel: Arc<dyn Channel>) -> Host {
        Host(channel)
    }

    /// Its name; `None` for this host.
    pub fn name(&self) -> Option<&str> {
        self.0.name()
    }

    /// The path at which one of its Unix sockets can be connected to from here.
    ///
    /// # Errors
    /// If the way cannot be made.
    pub fn reach(&self, socket: &Path) -> Result<PathBuf> {
        self.0.reach(socket)
    }

    /// Runs one command of virsh within `patience` and returns its output.
    ///
    /// # Errors
    /// `ToolFailed` if virsh is not installed, fails, or does not end in time; the message has virsh's text.
    pub fn virsh(
        &self,
        uri: &str,
        words: Vec<String>,
        input: Option<&str>,
        patience: Duration,
    ) -> Result<String> {
        let patience_ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
        let input = input.map(str::to_owned);
        let request = Request::Virsh { uri: uri.to_owned(), words, input, patience_ms };
        match self.0.call(request)? {
            Answer::Text(text) => Ok(text),
            _ => Err(odd()),
        }
    }

    /// Facts of the host.
    ///
    /// # Errors
    /// Errors of the connection.
    pub fn facts(&self) -> Result<Facts> {
        match self.0.call(Request::Facts)? {
            Answer::Facts(facts) => Ok(facts),
            _ => Err(odd()),
        }
    }

    /// The content of a file of at most `max_bytes`.
    ///
    /// # Errors
    /// Errors of the operating system there; `InvalidInput` if it is larger.
    pub fn read_file(&self, path: &Path, max_bytes: u64) -> Result<Vec<u8>> {
        content(self.0.call(Request::ReadFile { path: path.to_owned(), max_bytes })?)
    }

    /// Facts of a file or block device.
    ///
    /// # Errors
    /// Errors of the operating system there; `Unsupported` if it is something else.
    pub fn look_at_file(&self, path: &Path) -> Result<FileFacts> {
        match self.0.call(Request::LookAtFile { path: path.to_owned() })? {
            Answer::File(facts) => Ok(facts),
            _ => Err(odd()),
        }
    }

    /// Whether a living process holds a private folder.
    ///
    /// # Errors
    /// Errors of the connection.
    pub fn is_in_use(&self, space: &Path) -> Result<bool> {
        match self.0.call(Request::IsInUse { space: space.to_owned() })? {
            Answer::Flag(flag) => Ok(flag),
            _ => Err(odd()),
        }
    }

    /// Removes the private folders that killed processes left in `parent`; see [`Request::MakeSpace`] for its default.
    ///
    /// # Errors
    /// Errors of the connection.
    pub fn remove_abandoned(&self, parent: Option<&Path>) -> Result<()> {
        let parent = parent.map(Path::to_owned);
        self.0.call(Request::RemoveAbandoned { parent }).map(drop)
    }
}

/// A private folder on a host, which QEMU's group can enter. Dropping it removes it.
///
/// ```text
///   coldrise-backup-RANDOM/      0710
///     disk-vda …                 0660  scratch files
///     backup.xml checkpoint.xml  what virsh reads
///     qemu/nbd                   0770  QEMU makes its socket in this folder
/// ```
pub struct ScratchSpace {
    host: Host,
    folder: PathBuf,
}

impl ScratchSpace {
    /// Makes a folder in `parent`. Default: $TMPDIR there, else /var/tmp.
    ///
    /// # Errors
    /// With advice if the folder cannot be given to QEMU's `group`.
    pub fn new(host: &Host, parent: Option<&Path>, group: Option<u32>) -> Result<ScratchSpace> {
        let parent = parent.map(Path::to_owned);
        match host.0.call(Request::MakeSpace { parent, group })? {
            Answer::Path(folder) => Ok(ScratchSpace { host: host.clone(), folder }),
            _ => Err(odd()),
        }
    }

    /// The host.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Holds a name on the host until the folder is removed.
    ///
    /// # Errors
    /// `Busy` if another process there holds it.
    pub fn claim(&self, name: &str) -> Result<()> {
        let (space, name) = (self.folder.clone(), name.to_owned());
        self.host.0.call(Request::Claim { space, name }).map(drop)
    }

    /// Watches files from now on. There is one watch for each folder.
    ///
    /// # Errors
    /// Errors of the operating system there.
    pub fn watch(&self, paths: Vec<PathBuf>) -> Result<FileWatch> {
        let (host, space) = (self.host.clone(), self.folder.clone());
        host.0.call(Request::WatchFiles { space: space.clone(), paths })?;
        Ok(FileWatch { host, space })
    }

    /// The folder, absolute.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where QEMU offers the disks.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("qemu/nbd")
    }

    /// The path of a file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Writes a document for virsh. Returns its path.
    ///
    /// # Errors
    /// Errors of the operating system there.
    pub fn write(&self, name: &str, text: &str) -> Result<PathBuf> {
        let space = self.folder.clone();
        let request =
            Request::WriteDocument { space, name: name.to_owned(), text: text.to_owned() };
        self.host.0.call(request)?;
        Ok(self.file(name))
    }

    /// Starts a program in the folder. It ends when the answer is dropped, with the folder, or with the connection.
    ///
    /// # Errors
    /// `ToolFailed` if it cannot be started there.
    pub fn start(&self, start: ProgramStart) -> Result<HostProgram> {
        let (host, space) = (self.host.clone(), self.folder.clone());
        match host.0.call(Request::StartProgram { space: space.clone(), start })? {
            Answer::Number(number) => Ok(HostProgram { host, space, number }),
            _ => Err(odd()),
        }
    }

    /// The content of a small qcow2 image, of at most `max_bytes`; a backing file counts as none.
    ///
    /// # Errors
    /// `ToolFailed` if it is not one.
    pub fn raw_of_qcow2(&self, image: &[u8], max_bytes: u64) -> Result<Vec<u8>> {
        let (space, image) = (self.folder.clone(), STANDARD.encode(image));
        content(self.host.0.call(Request::RawOfQcow2 { space, image, max_bytes })?)
    }

    /// Makes an empty qcow2 image for a disk and allocates all space that it can ever need. With `bitmap`
    /// the image records in a bitmap of that name what is written to it.
    ///
    /// # Errors
    /// `NoSpace`; `Unsupported` if the file system cannot allocate ahead.
    pub fn add(
        &self,
        name: &str,
        size_bytes: u64,
        cluster_bytes: u64,
        bitmap: Option<&str>,
    ) -> Result<()> {
        let (space, name) = (self.folder.clone(), name.to_owned());
        let bitmap = bitmap.map(str::to_owned);
        let request = Request::AddImage { space, name, size_bytes, cluster_bytes, bitmap };
        self.host.0.call(request).map(drop)
    }
}

/// Files of a host that are watched while their folder exists.
pub struct FileWatch {
    host: Host,
    space: PathBuf,
}

impl FileWatch {
    /// Whether they are as they were when the watch began.
    ///
    /// # Errors
    /// Errors of the operating system there, and of the connection: then it is unknown.
    pub fn state(&self) -> Result<FilesState> {
        match self.host.0.call(Request::FilesState { space: self.space.clone() })? {
            Answer::Files(state) => Ok(state),
            _ => Err(odd()),
        }
    }
}

/// A program on a host. Dropping it ends it.
pub struct HostProgram {
    host: Host,
    space: PathBuf,
    number: u64,
}

impl HostProgram {
    /// Its state, after its end or after `patience`, of at most 60 s.
    ///
    /// # Errors
    /// Errors of the connection.
    pub fn state(&self, patience: Duration) -> Result<ProgramState> {
        let (space, number) = (self.space.clone(), self.number);
        let patience_ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
        match self.host.0.call(Request::ProgramState { space, number, patience_ms })? {
            Answer::Program(state) => Ok(state),
            _ => Err(odd()),
        }
    }
}

impl Drop for HostProgram {
    fn drop(&mut self) {
        let (space, number) = (self.space.clone(), self.number);
        // If this fails, it ends with the connection.
        let _ = self.host.0.call(Request::StopProgram { space, number });
    }
}

impl Drop for ScratchSpace {
    fn drop(&mut self) {
        // If this fails, the next backup removes the folder.
        let _ = self.host.0.call(Request::RemoveSpace { space: self.folder.clone() });
    }
}

fn content(answer: Answer) -> Result<Vec<u8>> {
    match answer {
        Answer::Content(text) => STANDARD.decode(text).map_err(|_| odd()),
        _ => Err(odd()),
    }
}

fn odd() -> Error {
    Error::new(
        ErrorKind::ToolFailed,
        "the program on the host answers something else than was asked",
    )
}
