//! Requests and answers.

use crate::entry::Entry;
use crate::fields::{Body, Fields, Malformed};
use crate::group::Group;
use crate::{CONTENT_BYTES, MAX_TEXT_BYTES};

/// Maximum length of a passphrase or key, in bytes.
const MAX_KEY_BYTES: usize = 64 << 10;

/// The requests of Coldrise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// The devices: [`Answer::Device`] for each, then [`Answer::Group`] for each volume group with which something
    /// is wrong. The key, if not empty, opens the encrypted ones.
    Devices(Vec<u8>),
    /// Makes a device readable: [`Answer::Opened`].
    Open(u64),
    /// The path, and what a folder holds: [`Answer::Entry`] for each.
    List(u64, Vec<u8>),
    /// The path and everything below: [`Answer::Entry`] for each, a folder before what it holds.
    Walk(u64, Vec<u8>),
    /// As `Walk`, and after each file its content in pieces: [`Answer::Content`].
    Read(u64, Vec<u8>),
    /// In a machine with the disks of several points: closes what is open, and shows this number of disks
    /// from this one on, instead of the others. Numbers of disks count from there. [`Answer::End`].
    Select {
        /// The number of the first disk.
        first: u64,
        /// How many.
        count: u64,
    },
}

impl Request {
    /// The body of its frame.
    pub fn body(&self) -> Vec<u8> {
        let counted;
        let (kind, device, bytes) = match self {
            Request::Devices(key) => (0, 0, key.as_slice()),
            Request::Open(device) => (1, *device, [].as_slice()),
            Request::List(device, path) => (2, *device, path.as_slice()),
            Request::Walk(device, path) => (3, *device, path.as_slice()),
            Request::Read(device, path) => (4, *device, path.as_slice()),
            Request::Select { first, count } => {
                counted = count.to_le_bytes();
                (5, *first, counted.as_slice())
            }
        };
        Body::new(kind).number(device).bytes(bytes).end()
    }

    /// Reads a body.
    ///
    /// # Errors
    /// `Malformed`.
    pub fn parse(body: &[u8]) -> Result<Request, Malformed> {
        let mut fields = Fields(body);
        let (kind, device) = (fields.kind()?, fields.number()?);
        let bytes = fields.bytes(MAX_KEY_BYTES)?.to_vec();
        fields.end()?;
        match kind {
            0 => Ok(Request::Devices(bytes)),
            1 => Ok(Request::Open(device)),
            2 => Ok(Request::List(device, bytes)),
            3 => Ok(Request::Walk(device, bytes)),
            4 => Ok(Request::Read(device, bytes)),
            5 => {
                let count = bytes.try_into().map(u64::from_le_bytes).map_err(|_| Malformed)?;
                Ok(Request::Select { first: device, count })
            }
            _ => Err(Malformed),
        }
    }
}

/// A disk, a partition or a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its number in requests.
    pub number: u64,
    /// The number of the disk; `None` for a volume of several disks, which has a name instead.
    pub disk: Option<u64>,
    /// The number of the partition; 0 for the whole disk.
    pub partition: u64,
    /// The name of a volume, else empty.
    pub volume: Vec<u8>,
    /// The file system, or what else it holds, such as `ext4`, `lvm`, `swap` or `unknown`.
    pub format: String,
    /// The label of the file system.
    pub label: Vec<u8>,
    /// The length, in bytes.
    pub size_bytes: u64,
    /// Whether there is a file system that can be read.
    pub is_readable: bool,
    /// Why not, or what else is to say; else empty.
    pub note: String,
}

/// Whether a device's format is an encrypted container that is not open: LUKS or BitLocker.
pub fn is_encrypted(format: &str) -> bool {
    matches!(format, "luks" | "bitlocker")
}

/// The system that a file system holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// No system.
    Nothing,
    /// The root of a Linux or Unix.
    Unix,
    /// A Windows.
    Windows,
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// There is no such device or path.
    NotFound,
    /// The path is not what the request needs.
    WrongKind,
    /// The device or the path cannot be read.
    Unreadable,
}

/// The answers of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// A device.
    Device(Device),
    /// The device can be read, and holds this.
    Opened(Found),
    /// A file.
    Entry(Entry),
    /// The next bytes of the last file.
    Content(Vec<u8>),
    /// The content of the last file could not be read to its end, or a folder could not be read.
    Unread(String),
    /// The request is done.
    End,
    /// The request failed.
    Failed(Failure, String),
    /// A volume group with which something is wrong.
    Group(Group),
}

impl Answer {
    /// The body of its frame.
    pub fn body(&self) -> Vec<u8> {
        match self {
            Answer::Device(device) => device.write(Body::new(0)),
            Answer::Opened(found) => Body::new(1).number(*found as u64),
            Answer::Entry(entry) => entry.write(Body::new(2)),
            Answer::Content(bytes) => Body::new(3).bytes(bytes),
            Answer::Unread(text) => Body::new(4).bytes(cut(text)),
            Answer::End => Body::new(5),
            Answer::Failed(failure, text) => Body::new(6).number(*failure as u64).bytes(cut(text)),
            Answer::Group(group) => group.write(Body::new(7)),
        }
        .end()
    }

    /// Reads a body.
    ///
    /// # Errors
    /// `Malformed`.
    pub fn parse(body: &[u8]) -> Result<Answer, Malformed> {
        let mut fields = Fields(body);
        let answer = match fields.kind()? {
            0 => Answer::Device(Device::read(&mut fields)?),
            1 => Answer::Opened(match fields.number()? {
                0 => Found::Nothing,
                1 => Found::Unix,
                2 => Found::Windows,
                _ => return Err(Malformed),
            }),
            2 => Answer::Entry(Entry::read(&mut fields)?),
            3 => Answer::Content(fields.bytes(CONTENT_BYTES)?.to_vec()),
            4 => Answer::Unread(fields.text(MAX_TEXT_BYTES)?),
            5 => Answer::End,
            6 => {
                let failure = match fields.number()? {
                    0 => Failure::NotFound,
                    1 => Failure::WrongKind,
                    2 => Failure::Unreadable,
                    _ => return Err(Malformed),
                };
                Answer::Failed(failure, fields.text(MAX_TEXT_BYTES)?)
            }
            7 => Answer::Group(Group::read(&mut fields)?),
            _ => return Err(Malformed),
        };
        fields.end()?;
        Ok(answer)
    }
}

/// The beginning of a text.
fn cut(text: &str) -> &[u8] {
    let bytes = text.as_bytes();
    bytes.get(..MAX_TEXT_BYTES).unwrap_or(bytes)
}

impl Device {
    fn write(&self, body: Body) -> Body {
        body.number(self.number)
            .number(self.disk.map_or(0, |disk| disk + 1))
            .number(self.partition)
            .bytes(&self.volume)
            .bytes(cut(&self.format))
            .bytes(&self.label)
            .number(self.size_bytes)
            .number(u64::from(self.is_readable))
            .bytes(cut(&self.note))
    }

    fn read(fields: &mut Fields<'_>) -> Result<Device, Malformed> {
        Ok(Device {
            number: fields.number()?,
            disk: fields.number()?.checked_sub(1),
            partition: fields.number()?,
            volume: fields.bytes(MAX_TEXT_BYTES)?.to_vec(),
            format: fields.text(MAX_TEXT_BYTES)?,
            label: fields.bytes(MAX_TEXT_BYTES)?.to_vec(),
            size_bytes: fields.number()?,
            is_readable: fields.number()? == 1,
            note: fields.text(MAX_TEXT_BYTES)?,
        })
    }
}
