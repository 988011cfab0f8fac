//! The words between Coldrise and the machine that reads file systems.
//!
//! ```text
//! greeting   MAGIC, 16 random bytes              both ways, each time a command connects
//! frame      length of the body (u32), body      a request, then its answers up to End or Failed
//! body       kind (u8), fields                   integers little-endian, bytes after their length (u32)
//! ```
//!
//! The machine is not trusted: a file system made for it can take it over. So every length and count is
//! bounded here, and the receiver checks everything else. Names are bytes without any promise.
//!
//! A command that connects sends a greeting and drops everything until the machine has returned the
//! same random bytes: they cannot be an answer for the command before. A greeting that arrives while
//! the machine answers ends that answer.
#![forbid(unsafe_code)]

mod entry;
mod fields;
mod group;
mod messages;

pub use entry::{Entry, EntryKind};
pub use fields::Malformed;
pub use group::{Affected, Group};
pub use messages::{Answer, Device, Failure, Found, Request, is_encrypted};

/// The first bytes of a greeting.
pub const MAGIC: [u8; 8] = *b"\xffCRFILE1";
/// Length of the random part of a greeting, in bytes.
pub const NONCE_BYTES: usize = 16;
/// Maximum length of a frame's body, in bytes.
pub const MAX_FRAME_BYTES: usize = 256 << 10;
/// Content of a file in one frame, in bytes.
pub const CONTENT_BYTES: usize = 64 << 10;
/// Maximum length of a path inside a file system, in bytes.
pub const MAX_PATH_BYTES: usize = 32 << 10;
/// Maximum depth of folders that are walked.
pub const MAX_DEPTH: usize = 400;
/// Maximum number of devices that are reported.
pub const MAX_DEVICES: usize = 256;
/// Maximum length of a name of a device or of a text, in bytes.
const MAX_TEXT_BYTES: usize = 1024;
/// Name of the virtio port.
pub const PORT: &str = "org.coldrise.files";

/// A frame with this body.
pub fn frame(body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
    let mut frame = Vec::with_capacity(body.len() + 4);
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(body);
    frame
}
