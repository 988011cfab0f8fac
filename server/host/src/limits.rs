//! Resource limits of a program that reads a foreign image. They are in proportion to the bytes that its image
//! really stores, so a forged size or count gains nothing.

use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};

const MIB: u64 = 1 << 20;

/// Memory for tables, caches and requests of any image.
const MEMORY_BYTES: u64 = 512 * MIB;
/// A check keeps a count of 2 bytes for each cluster, and nearly every image has
/// clusters of 4 KiB or more. So the limit adds one byte of memory for this many
/// allocated bytes.
const ALLOCATED_PER_MEMORY_BYTE: u64 = 1024;
/// Upper bound of the memory.
const MAX_MEMORY_BYTES: u64 = 16 << 30;
/// Address space on top of the memory: programs, libraries, and reservations.
const UNUSED_ADDRESSES_BYTES: u64 = 1 << 30;
/// The stack of each thread: threads mostly wait for the disk.
const STACK_BYTES: u64 = 2 * MIB;
/// Processor time for a question about any image.
const QUESTION_SECONDS: u64 = 8;
/// A check walks all tables: one more second of processor time for this many bytes.
const CHECKED_BYTES_PER_SECOND: u64 = 50 * MIB;
/// Processor time for serving any image.
const SERVING_SECONDS: u64 = 12;
/// Deflate expands by up to 1032, to 250 MiB in a second: one more second for this many
/// bytes of an image.
const SERVED_BYTES_PER_SECOND: u64 = MIB / 4;
/// Open files besides those of the image.
const OPEN_FILES: u64 = 64;

/// The upper bounds of a program's resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Processor time, in seconds.
    pub processor_seconds: u64,
    /// Memory, in bytes.
    pub memory_bytes: u64,
    /// Number of open files.
    pub open_files: u64,
    /// How long a file may become by writing, in bytes: 0 unless the image is changed.
    pub file_bytes: u64,
}

impl Limits {
    /// For one question about an image that occupies `allocated_bytes` in `files` files.
    pub fn of_question(allocated_bytes: u64, files: usize) -> Limits {
        Limits::new(allocated_bytes, files, QUESTION_SECONDS, CHECKED_BYTES_PER_SECOND)
    }

    /// For reading an image once.
    pub fn of_serving(allocated_bytes: u64, files: usize) -> Limits {
        Limits::new(allocated_bytes, files, SERVING_SECONDS, SERVED_BYTES_PER_SECOND)
    }

    /// For a small change of an image's tables.
    pub fn of_change(allocated_bytes: u64, files: usize) -> Limits {
        Limits { file_bytes: u64::MAX, ..Limits::of_question(allocated_bytes, files) }
    }

    fn new(allocated_bytes: u64, files: usize, seconds: u64, bytes_per_second: u64) -> Limits {
        let memory_bytes = MEMORY_BYTES + allocated_bytes / ALLOCATED_PER_MEMORY_BYTE;
        Limits {
            processor_seconds: seconds + allocated_bytes / bytes_per_second,
            memory_bytes: memory_bytes.min(MAX_MEMORY_BYTES),
            open_files: OPEN_FILES + 2 * files as u64,
            file_bytes: 0,
        }
    }

    /// The arguments of `prlimit`. Existing stricter limits stay: only root could raise
    /// them.
    pub(crate) fn arguments(&self) -> Vec<String> {
        [
            ("cpu", Resource::Cpu, self.processor_seconds),
            ("data", Resource::Data, self.memory_bytes),
            ("as", Resource::As, self.memory_bytes.saturating_add(UNUSED_ADDRESSES_BYTES)),
            ("stack", Resource::Stack, STACK_BYTES),
            ("nofile", Resource::Nofile, self.open_files),
            ("core", Resource::Core, 0),
            ("fsize", Resource::Fsize, self.file_bytes),
        ]
        .into_iter()
        .map(|(word, resource, wanted)| {
            let most = getrlimit(resource).maximum.unwrap_or(u64::MAX);
            let soft = wanted.min(most);
            // The signal of the soft limit identifies the cause; the hard limit kills.
            let hard = if resource == Resource::Cpu { most.min(wanted + 1) } else { soft };
            format!("--{word}={soft}:{hard}")
        })
        .collect()
    }
}
