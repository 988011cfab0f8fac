//! A hypervisor's host: this one, or one at the other end of a connection.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base64::engine::general_purpose::STANDARD;
use base64::Engine;
use coldrise_block::{Error, ErrorKind, Result};

use crate::channel::Channel;
use crate::messages::{Answer, Facts, Outcome, Request};
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

    /// Runs commands of virsh that change nothing, each within `patience`. The results are in the order of the commands.
    ///
    /// # Errors
    /// Errors of the connection.
    pub fn ask_virsh(
        &self,
        uri: &str,
        commands: Vec<Vec<String>>,
        patience: Duration,
    ) -> Result<Vec<Result<String>>> {
        let patience_ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
        let count = commands.len();
        let request = Request::AskVirsh { uri: uri.to_owned(), commands, patience_ms };
        let text = |outcome: Outcome| match Result::from(outcome)? {
            Answer::Text(text) => Ok(text),
            _ => Err(odd()),
        };
        match self.0.call(request)? {
            Answer::Each(outcomes) if outcomes.len() == count => {
                Ok(outcomes.into_iter().map(text).collect())
            }
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
