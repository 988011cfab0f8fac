//! A hypervisor's host: this one, or one at the other end of a connection.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use coldrise_block::{Error, ErrorKind, Result};

use crate::channel::Channel;
use crate::disk_file::DiskFacts;
use crate::image_files::{FileFacts, FilesState};
use crate::messages::{Answer, Facts, FileKind, FoundFile, Outcome, Request};
use crate::programs::{ProgramStart, ProgramState};
use crate::qemu::QemuFacts;
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

    /// Its name in a sentence: `this host`, or `host hv1`.
    pub fn sentence_name(&self) -> String {
        self.name().map_or_else(|| "this host".to_owned(), |name| format!("host {name}"))
    }

    /// Whether the connection to it is lost, and so each further call fails.
    pub fn is_lost(&self) -> bool {
        self.0.is_lost()
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

    /// What it has for machines in QEMU.
    ///
    /// # Errors
    /// Errors of the connection.
    pub fn qemu_facts(&self) -> Result<QemuFacts> {
        match self.0.call(Request::QemuFacts)? {
            Answer::QemuFacts(facts) => Ok(facts),
            _ => Err(odd()),
        }
    }

    /// A TCP port of its loopback that nothing uses now, and the port of loopback here that leads to it.
    ///
    /// # Errors
    /// `Io` if it has none; `ToolFailed` if its sshd forbids forwarding.
    pub fn free_port(&self) -> Result<(u16, u16)> {
        let port = match self.0.call(Request::FreePort)? {
            Answer::Number(number) => u16::try_from(number).map_err(|_| odd())?,
            _ => return Err(odd()),
        };
        Ok((port, self.0.reach_port(port)?))
    }

    /// A part of a file that is being written, of at most `max_bytes` and 16 MiB.
    ///
    /// # Errors
    /// Errors of the operating system there; `InvalidInput` for anything but a regular file.
    pub fn read_from(&self, path: &Path, offset: u64, max_bytes: u64) -> Result<Vec<u8>> {
        content(self.0.call(Request::ReadFrom { path: path.to_owned(), offset, max_bytes })?)
    }

    /// The content of a file of at most `max_bytes`.
    ///
    /// # Errors
    /// Errors of the operating system there; `InvalidInput` if it is larger.
    pub fn read_file(&self, path: &Path, max_bytes: u64) -> Result<Vec<u8>> {
        content(self.0.call(Request::ReadFile { path: path.to_owned(), max_bytes })?)
    }

    /// Names and contents of the files of a folder; those of more than `max_bytes` are left out.
    ///
    /// # Errors
    /// Errors of the operating system there.
    pub fn read_folder(&self, path: &Path, max_bytes: u64) -> Result<Vec<(String, Vec<u8>)>> {
        match self.0.call(Request::ReadFolder { path: path.to_owned(), max_bytes })? {
            Answer::Files(files) => {
                let decoded = files.into_iter().map(|(name, content)| {
                    STANDARD.decode(content).map(|content| (name, content)).map_err(|_| odd())
                });
                decoded.collect()
            }
            _ => Err(odd()),
        }
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

    /// What is at each of these paths; `None` where there is nothing.
    ///
    /// # Errors
    /// Errors of the connection.
    pub fn look<const N: usize>(&self, paths: [&Path; N]) -> Result<[Option<FoundFile>; N]> {
        let paths = paths.iter().map(|path| (*path).to_owned()).collect();
        match self.0.call(Request::Look { paths })? {
            Answer::Found(found) => found.try_into().map_err(|_| odd()),
            _ => Err(odd()),
        }
    }

    /// The size of a regular file, in bytes; `None` if there is none, or if the host does not answer.
    pub fn file_bytes(&self, path: &Path) -> Option<u64> {
        let [found] = self.look([path]).unwrap_or_default();
        found.filter(|found| found.kind == FileKind::File).map(|found| found.size_bytes)
    }

    /// Writes a file durably and makes its folders; its own one can be closed to other users.
    ///
    /// # Errors
    /// Errors of the operating system there.
    pub fn write_file(&self, path: &Path, content: &[u8], is_private: bool) -> Result<()> {
        let (path, content) = (path.to_owned(), STANDARD.encode(content));
        self.0.call(Request::WriteFile { path, content, is_private }).map(drop)
    }

    /// Opens a file or block device for a disk, and creates the file, empty. It stays open until the end of the connection.
    ///
    /// # Errors
    /// Those of [`crate::open_disk_file`].
    pub fn open_disk(&self, path: &Path, size_bytes: u64, force: bool) -> Result<DiskFacts> {
        match self.0.call(Request::OpenDisk { path: path.to_owned(), size_bytes, force })? {
            Answer::Disk(facts) => Ok(facts),
            _ => Err(odd()),
        }
    }

    /// Holds a block device against mounts until the end of the connection, and checks that no loop device shows a file.
    ///
    /// # Errors
    /// `Busy` if it is in use; errors of the operating system there.
    pub fn hold_disk(&self, path: &Path) -> Result<()> {
        self.0.call(Request::HoldDisk { path: path.to_owned() }).map(drop)
    }

    /// Checks that [`Host::open_disk`] would work, as far as that is known before.
    ///
    /// # Errors
    /// As for [`Host::open_disk`]; `NotFound` if the folder is missing.
    pub fn check_disk(&self, path: &Path, size_bytes: u64, force: bool) -> Result<()> {
        self.0.call(Request::CheckDisk { path: path.to_owned(), size_bytes, force }).map(drop)
    }

    /// Removes a file that was created for a disk, if it is still that one.
    ///
    /// # Errors
    /// Errors of the connection.
    pub fn discard_disk(&self, path: &Path, made: (u64, u64)) -> Result<()> {
        self.0.call(Request::DiscardDisk { path: path.to_owned(), made }).map(drop)
    }

    /// Removes a file, if it is there.
    ///
    /// # Errors
    /// Errors of the operating system there.
    pub fn remove_file(&self, path: &Path) -> Result<()> {
        self.0.call(Request::RemoveFile { path: path.to_owned() }).map(drop)
    }

    /// Removes the folder of a TPM's state, which has a domain's UUID.
    ///
    /// # Errors
    /// `InvalidInput` for another folder; errors of the operating system there.
    pub fn remove_tpm(&self, folder: &Path) -> Result<()> {
        self.0.call(Request::RemoveTpm { folder: folder.to_owned() }).map(drop)
    }

    /// The path there of a Unix socket for QEMU, as [`crate::socket_path`].
    ///
    /// # Errors
    /// Those of [`crate::socket_path`].
    pub fn socket_path(&self, name: &Path) -> Result<PathBuf> {
        match self.0.call(Request::SocketPath { name: name.to_owned() })? {
            Answer::Path(path) => Ok(path),
            _ => Err(odd()),
        }
    }

    /// Removes a socket that an ended connection has left on another host, and ends the connection if it still has it.
    ///
    /// # Errors
    /// Errors of the operating system there; `InvalidInput` if something other than a socket is there.
    pub fn remove_socket(&self, path: &Path) -> Result<()> {
        self.0.call(Request::PrepareSocket { path: path.to_owned() }).map(drop)
    }

    /// Lets QEMU on the host reach the socket `local` of this host at `there`, until the end of the connection. On
    /// this host both are one.
    ///
    /// # Errors
    /// Errors of the connection, and `Unsupported` if its sshd forbids forwarding; `InvalidInput` for an unknown owner.
    pub fn offer(&self, local: &Path, there: &Path, uri: &str, owner: Option<&str>) -> Result<()> {
        if self.name().is_none() {
            return Ok(());
        }
        let path = || there.to_owned();
        self.0.call(Request::PrepareSocket { path: path() })?;
        self.0.offer(local, there)?;
        let (uri, owner) = (uri.to_owned(), owner.map(str::to_owned));
        self.0.call(Request::ShareSocket { path: path(), uri, owner }).map(drop)
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

    /// Lets a program in the folder reach the socket `local` of this host. Returns the path at which it does so.
    ///
    /// # Errors
    /// Errors of the connection, and `ToolFailed` if its sshd forbids forwarding.
    pub fn offer(&self, local: &Path, name: &str) -> Result<PathBuf> {
        let path = self.file(name);
        self.host.0.offer(local, &path).map(|()| path)
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
            Answer::Watched(state) => Ok(state),
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
        "the program on the host did not answer the request that was sent",
    )
}
