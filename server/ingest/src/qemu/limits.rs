//! How much of the machine a child may use: in proportion to what its image really
//! stores, so that a forged size or count buys nothing.

use rustix::process::{getrlimit, Resource};

use super::QemuImage;

const MIB: u64 = 1 << 20;

/// Memory for tables, caches and requests, whatever the image.
const MEMORY_BYTES: u64 = 512 * MIB;
/// A check keeps a count of 2 bytes for each cluster, which has 4 KiB or more in nearly
/// every image; so much of what is allocated may be memory on top.
const ALLOCATED_PER_MEMORY_BYTE: u64 = 1024;
/// Memory at most.
const MAX_MEMORY_BYTES: u64 = 16 << 30;
/// Address space on top of the memory: programs, libraries, what is reserved only.
const UNUSED_ADDRESSES_BYTES: u64 = 1 << 30;
/// The stack of each thread: they do little but wait for the disk.
const STACK_BYTES: u64 = 2 * MIB;
/// Processor time for a question, whatever the image.
const QUESTION_SECONDS: u64 = 8;
/// A check walks all tables: a second of processor time for so many bytes on top.
const CHECKED_BYTES_PER_SECOND: u64 = 50 * MIB;
/// Processor time for serving, whatever the image.
const SERVING_SECONDS: u64 = 12;
/// Deflate expands by up to 1032, to 250 MiB in a second: so many bytes of an image may
/// cost a second.
const SERVED_BYTES_PER_SECOND: u64 = MIB / 4;
/// Open files besides those of the image.
const OPEN_FILES: u64 = 64;

/// What a child may use at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) processor_seconds: u64,
    pub(super) memory_bytes: u64,
    pub(super) open_files: u64,
}

impl Limits {
    /// For one question about an image.
    pub(super) fn of_question(image: &QemuImage) -> Limits {
        Limits::new(image, QUESTION_SECONDS, CHECKED_BYTES_PER_SECOND)
    }

    /// For reading an image once.
    pub(super) fn of_serving(image: &QemuImage) -> Limits {
        Limits::new(image, SERVING_SECONDS, SERVED_BYTES_PER_SECOND)
    }

    fn new(image: &QemuImage, seconds: u64, bytes_per_second: u64) -> Limits {
        let memory_bytes = MEMORY_BYTES + image.allocated_bytes / ALLOCATED_PER_MEMORY_BYTE;
        Limits {
            processor_seconds: seconds + image.allocated_bytes / bytes_per_second,
            memory_bytes: memory_bytes.min(MAX_MEMORY_BYTES),
            open_files: OPEN_FILES + 2 * image.files.len() as u64,
        }
    }

    /// The words for `prlimit`. What is limited more strictly already stays so: only
    /// root could raise it.
    pub(super) fn arguments(&self) -> Vec<String> {
        [
            ("cpu", Resource::Cpu, self.processor_seconds),
            ("data", Resource::Data, self.memory_bytes),
            ("as", Resource::As, self.memory_bytes.saturating_add(UNUSED_ADDRESSES_BYTES)),
            ("stack", Resource::Stack, STACK_BYTES),
            ("nofile", Resource::Nofile, self.open_files),
            ("core", Resource::Core, 0),
            // Not one byte into a regular file.
            ("fsize", Resource::Fsize, 0),
        ]
        .into_iter()
        .map(|(word, resource, wanted)| {
            let most = getrlimit(resource).maximum.unwrap_or(u64::MAX);
            let soft = wanted.min(most);
            // The signal of the lower limit tells what happened; the higher one kills.
            let hard = if resource == Resource::Cpu { most.min(wanted + 1) } else { soft };
            format!("--{word}={soft}:{hard}")
        })
        .collect()
    }
}
