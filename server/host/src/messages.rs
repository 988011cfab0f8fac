//! The messages between a backup server and the program on a host: frames of JSON.
//!
//! ```text
//!   u32 length of the JSON in bytes, little endian   at most 32 MiB
//!   JSON                                             Envelope one way, Reply the other way
//! ```
//!
//! Each request has a number; replies come in any order. A side that reads something else ends the connection.

use std::io::{Read, Write};
use std::path::PathBuf;

use coldrise_block::{Context, Error, ErrorKind, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::disk_file::DiskFacts;
use crate::image_files::{FileFacts, FilesState};
use crate::programs::{ProgramStart, ProgramState};
use crate::qemu::QemuFacts;

/// The version of the messages. Both sides must have the same: the server brings the program along.
pub const PROTOCOL_VERSION: u32 = 2;
/// Maximum length of a frame's JSON, in bytes.
const MAX_FRAME_BYTES: u32 = 32 << 20;

/// A task for the host.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "task", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Facts of the host. Sent now and then, too, so that the host knows that the server lives.
    Facts,
    /// What it has for machines in QEMU.
    QemuFacts,
    /// One command of virsh.
    Virsh {
        /// The URI of libvirt on that host.
        uri: String,
        /// The command and its arguments.
        words: Vec<String>,
        /// What it reads from /dev/stdin.
        input: Option<String>,
        /// The time limit, in milliseconds.
        patience_ms: u64,
    },
    /// Commands of virsh that change nothing.
    AskVirsh {
        /// The URI of libvirt on that host.
        uri: String,
        /// The commands and their arguments.
        commands: Vec<Vec<String>>,
        /// The time limit of each, in milliseconds.
        patience_ms: u64,
    },
    /// A private folder for scratch files. It vanishes with the connection.
    MakeSpace {
        /// Its parent. Default: $TMPDIR, else /var/tmp.
        parent: Option<PathBuf>,
        /// QEMU's group.
        group: Option<u32>,
    },
    /// An empty qcow2 image with all its space allocated.
    AddImage {
        /// The folder.
        space: PathBuf,
        /// The file's name.
        name: String,
        /// The size of the disk, in bytes.
        size_bytes: u64,
        /// The size of a cluster, in bytes.
        cluster_bytes: u64,
        /// The bitmap in which the image records what is written to it.
        bitmap: Option<String>,
    },
    /// A small file for virsh.
    WriteDocument {
        /// The folder.
        space: PathBuf,
        /// The file's name.
        name: String,
        /// Its content.
        text: String,
    },
    /// The content of a small qcow2 image.
    RawOfQcow2 {
        /// A folder for the images.
        space: PathBuf,
        /// The image, as base64.
        image: String,
        /// Maximum size of the content, in bytes.
        max_bytes: u64,
    },
    /// Removes a folder and its files.
    RemoveSpace {
        /// The folder.
        space: PathBuf,
    },
    /// Whether a living process holds a folder.
    IsInUse {
        /// The folder.
        space: PathBuf,
    },
    /// Removes the folders of killed processes.
    RemoveAbandoned {
        /// Their parent. Default: as for `MakeSpace`.
        parent: Option<PathBuf>,
    },
    /// Starts a program, which ends with its folder and with the connection.
    StartProgram {
        /// The folder.
        space: PathBuf,
        /// The program.
        start: ProgramStart,
    },
    /// The state of a program.
    ProgramState {
        /// The folder.
        space: PathBuf,
        /// Its number.
        number: u64,
        /// How long to wait for its end, in milliseconds; at most 60,000.
        patience_ms: u64,
    },
    /// Ends a program.
    StopProgram {
        /// The folder.
        space: PathBuf,
        /// Its number.
        number: u64,
    },
    /// A part of a file that is being written.
    ReadFrom {
        /// Its path.
        path: PathBuf,
        /// Where to begin, in bytes.
        offset: u64,
        /// Maximum length, in bytes; at most 16 MiB.
        max_bytes: u64,
    },
    /// A TCP port of loopback that nothing uses now.
    FreePort,
    /// Facts of a file or block device.
    LookAtFile {
        /// Its path.
        path: PathBuf,
    },
    /// Holds a name, so that no other program on the host does the same, until the folder is removed.
    Claim {
        /// The folder.
        space: PathBuf,
        /// The name.
        name: String,
    },
    /// Watches files from now on, in place of those that the folder's watch had before.
    WatchFiles {
        /// The folder.
        space: PathBuf,
        /// Their paths.
        paths: Vec<PathBuf>,
    },
    /// Whether the watched files are as they were.
    FilesState {
        /// The folder.
        space: PathBuf,
    },
    /// The content of a file.
    ReadFile {
        /// Its path.
        path: PathBuf,
        /// Maximum size, in bytes.
        max_bytes: u64,
    },
    /// The files of a folder, without those of its folders; none if there is no such folder.
    ReadFolder {
        /// Its path.
        path: PathBuf,
        /// Maximum size of each file, in bytes; larger ones are left out.
        max_bytes: u64,
    },
    /// What is at these paths.
    Look {
        /// The paths.
        paths: Vec<PathBuf>,
    },
    /// Writes a file durably and makes its folders, which other users can go through.
    WriteFile {
        /// Its path.
        path: PathBuf,
        /// Its content, as base64.
        content: String,
        /// Whether its own folder is closed to other users.
        is_private: bool,
    },
    /// Opens a file or block device for a disk, and creates the file, empty. It stays open until the end of the connection.
    OpenDisk {
        /// Its path.
        path: PathBuf,
        /// The size of the disk, in bytes.
        size_bytes: u64,
        /// Overwrite what is there.
        force: bool,
    },
    /// Holds a block device against mounts until the end of the connection.
    HoldDisk {
        /// Its path, or that of a file.
        path: PathBuf,
    },
    /// Checks that [`Request::OpenDisk`] would work.
    CheckDisk {
        /// Its path.
        path: PathBuf,
        /// The size of the disk, in bytes.
        size_bytes: u64,
        /// Overwrite what is there.
        force: bool,
    },
    /// Removes a file that was created for a disk, if it is still that one.
    DiscardDisk {
        /// Its path.
        path: PathBuf,
        /// Its device and inode.
        made: (u64, u64),
    },
    /// Removes a file, if it is there.
    RemoveFile {
        /// Its path.
        path: PathBuf,
    },
    /// Removes the state of a TPM of libvirt, with the folder that has the UUID of its domain.
    RemoveTpm {
        /// That folder.
        folder: PathBuf,
    },
    /// The path of a Unix socket for QEMU.
    SocketPath {
        /// Its file name, in the host's folder for sockets; or its path.
        name: PathBuf,
    },
    /// Makes room for a Unix socket that SSH is about to make. One of an older connection is removed, and that connection is
    /// ended. It is removed at the end of this connection.
    PrepareSocket {
        /// Its path.
        path: PathBuf,
    },
    /// Listens at a socket that was prepared, in place of SSH.
    Listen {
        /// Its path.
        path: PathBuf,
    },
    /// The private socket of the next connection to such a socket; [`Answer::Done`] if there was none for 1 s.
    NextConnection {
        /// The path of the socket.
        path: PathBuf,
    },
    /// Gives a socket to the user as whom libvirt runs QEMU.
    ShareSocket {
        /// Its path.
        path: PathBuf,
        /// The URI of libvirt on that host.
        uri: String,
        /// The owner, as `USER` or `USER:GROUP`. Default: by the names of distributions.
        owner: Option<String>,
    },
}

/// What is at a path; links are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundFile {
    /// Its kind.
    pub kind: FileKind,
    /// Its size, in bytes.
    pub size_bytes: u64,
}

/// A kind of file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A block device.
    BlockDevice,
    /// Anything else, and a link that leads nowhere.
    Other,
}

/// The answer to a task.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Done.
    Done,
    /// Yes or no.
    Flag(bool),
    /// What virsh has written.
    Text(String),
    /// The results of several commands.
    Each(Vec<Outcome>),
    /// A path on the host.
    Path(PathBuf),
    /// The content of a file, as base64.
    Content(String),
    /// The number of a program.
    Number(u64),
    /// For [`Request::ProgramState`].
    Program(ProgramState),
    /// For [`Request::LookAtFile`].
    File(FileFacts),
    /// For [`Request::FilesState`].
    Watched(FilesState),
    /// For [`Request::Facts`].
    Facts(Facts),
    /// For [`Request::QemuFacts`].
    QemuFacts(QemuFacts),
    /// Names and contents of files, as base64.
    Files(Vec<(String, String)>),
    /// For [`Request::OpenDisk`].
    Disk(DiskFacts),
    /// For [`Request::Look`].
    Found(Vec<Option<FoundFile>>),
}

/// Facts of a host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Facts {
    /// The version of its messages.
    pub version: u32,
    /// Whether the program runs as root.
    pub is_root: bool,
    /// The names of the groups it is in that matter: `libvirt`, `kvm`, `libvirt-qemu`, `qemu`.
    pub groups: Vec<String>,
    /// The folder of scratch files.
    pub scratch: PathBuf,
    /// Its free space, in bytes.
    pub scratch_free_bytes: u64,
    /// Why QEMU cannot use KVM; `None` if it can.
    pub lacks_kvm: Option<String>,
}

/// A numbered request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Envelope {
    /// Its number.
    pub number: u64,
    /// The task.
    pub request: Request,
}

/// A numbered reply.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Reply {
    /// The number of the request.
    pub number: u64,
    /// The result.
    pub outcome: Outcome,
}

/// The result of a task.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It is done.
    Answer(Answer),
    /// It failed.
    Error(HostError),
}

/// An error on its way.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HostError {
    kind: String,
    message: String,
    advice: Option<String>,
}

impl From<Result<Answer>> for Outcome {
    fn from(result: Result<Answer>) -> Outcome {
        match result {
            Ok(answer) => Outcome::Answer(answer),
            Err(error) => {
                let message = error.message();
                let full = error.full_message();
                let advice = full.strip_prefix(&message).and_then(|rest| rest.strip_prefix(": "));
                let advice = advice.map(str::to_owned);
                Outcome::Error(HostError { kind: error.kind().word().to_owned(), message, advice })
            }
        }
    }
}

impl From<Outcome> for Result<Answer> {
    fn from(outcome: Outcome) -> Result<Answer> {
        match outcome {
            Outcome::Answer(answer) => Ok(answer),
            Outcome::Error(HostError { kind, message, advice }) => {
                let kind = ErrorKind::from_word(&kind).unwrap_or(ErrorKind::ToolFailed);
                let error = Error::new(kind, message);
                Err(advice.into_iter().fold(error, Error::advise))
            }
        }
    }
}

/// Writes one frame.
///
/// # Errors
/// Errors of the connection; `InvalidInput` if it is too long.
pub fn write_frame(to: &mut impl Write, message: &impl Serialize) -> Result<()> {
    let what = || "writing to the other side";
    let json = serde_json::to_vec(message)
        .map_err(|error| Error::with_source(ErrorKind::InvalidInput, what(), error))?;
    let length = u32::try_from(json.len()).ok().filter(|length| *length <= MAX_FRAME_BYTES);
    let length = length.ok_or_else(|| {
        Error::new(ErrorKind::InvalidInput, format!("a message of {} bytes", json.len()))
    })?;
    let mut frame = Vec::with_capacity(json.len() + 4);
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(&json);
    to.write_all(&frame).and_then(|()| to.flush()).context(what)
}

/// Reads one frame; `None` at the end of the connection.
///
/// # Errors
/// Errors of the connection; `InvalidInput` for anything but a message.
pub fn read_frame<T: DeserializeOwned>(from: &mut impl Read) -> Result<Option<T>> {
    let what = || "reading from the other side";
    let mut length = [0; 4];
    if from.read(&mut length[..1]).context(what)? == 0 {
        return Ok(None);
    }
    from.read_exact(&mut length[1..]).context(what)?;
    let length = u32::from_le_bytes(length);
    if length > MAX_FRAME_BYTES {
        return Err(Error::new(ErrorKind::InvalidInput, format!("a message of {length} bytes")));
    }
    // Grows as it comes: a length alone takes no memory.
    let mut json = Vec::new();
    from.take(u64::from(length)).read_to_end(&mut json).context(what)?;
    serde_json::from_slice(&json)
        .map(Some)
        .map_err(|error| Error::with_source(ErrorKind::InvalidInput, "an unknown message", error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_read_as_it_was_written() {
        let request = Request::ReadFile { path: "/a".into(), max_bytes: 7 };
        let mut bytes = Vec::new();
        write_frame(&mut bytes, &Envelope { number: 3, request }).unwrap();
        let mut from = &bytes[..];
        let read: Envelope = read_frame(&mut from).unwrap().unwrap();
        assert!(matches!(read, Envelope { number: 3, request: Request::ReadFile { .. } }));
        assert!(read_frame::<Envelope>(&mut from).unwrap().is_none());
    }

    #[test]
    fn other_bytes_are_refused() {
        let frame = |json: &str| {
            let mut bytes = u32::try_from(json.len()).unwrap().to_le_bytes().to_vec();
            bytes.extend_from_slice(json.as_bytes());
            bytes
        };
        let mut cases = vec![b"SSH-2.0".to_vec(), vec![1], frame("{}")];
        cases.push(frame(r#"{"number":1,"request":{"task":"format_disk"}}"#));
        cases.push(frame(r#"{"number":1,"request":{"task":"remove_space","space":"/","x":1}}"#));
        let whole = frame(r#"{"number":1,"request":{"task":"facts"}}"#);
        cases.push(whole[..whole.len() - 1].to_vec());
        for bytes in cases {
            assert!(read_frame::<Envelope>(&mut &bytes[..]).is_err(), "{bytes:?}");
        }
        assert!(read_frame::<Envelope>(&mut &whole[..]).unwrap().is_some());
    }

    #[test]
    fn an_error_keeps_its_kind_and_advice() {
        let error = Error::new(ErrorKind::NoSpace, "/x has 1 MiB free").advise("use --scratch");
        let crossed: Result<Answer> = Outcome::from(Err(error)).into();
        let error = crossed.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert_eq!(error.full_message(), "/x has 1 MiB free: use --scratch");
        assert_eq!(error.message(), "/x has 1 MiB free");
    }
}
