//! QEMU's tools as child processes. They parse foreign image formats; this process never
//! does.
//!
//! ```text
//!   questions ── qemu-img ──┐
//!                           ├─ coldrise_host: a program in a private folder, with bounds
//!   server ───── qemu-nbd ──┘
//! ```
//!
//! The program runs on the host of the private folder: this one, or that of a machine.
//!
//! `qemu-img` answers questions; `qemu-nbd` serves one image, read-only, on a private Unix
//! socket. Both get the format and never probe it. Neither can open a file that is
//! not listed in the [`QemuImage`].

mod bitmaps;
mod questions;
mod server;

use std::path::{Path, PathBuf};

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_host::{AllowedFile, Bounds, FileFacts, Limits, ScratchSpace};
use serde_json::{Value, json};

pub(crate) use bitmaps::{BitmapChange, change_bitmap};
pub(crate) use questions::{check_image, image_facts};
pub use server::ImageServer;

const SECTOR_BYTES: u64 = 512;

/// A part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileRange {
    pub(crate) offset_bytes: u64,
    pub(crate) length_bytes: u64,
}

/// The options with which QEMU opens an image, and all files that it may open for it.
#[derive(Clone, Debug)]
pub(crate) struct QemuImage {
    options: Value,
    files: Vec<AllowedFile>,
    length_bytes: u64,
    allocated_bytes: u64,
}

impl QemuImage {
    /// A file or block device, on the host of `space`, with its format. Only `extents`, its own files, and
    /// `backing`, if the format supports it, are opened with it.
    ///
    /// Fails if a file cannot be examined, or if a path cannot be written in JSON.
    pub(crate) fn new(
        space: &ScratchSpace,
        driver: &str,
        path: &Path,
        extents: &[PathBuf],
        backing: Option<QemuImage>,
    ) -> Result<QemuImage> {
        let absolute = std::path::absolute(path)
            .context(|| format!("finding the absolute path of {}", path.display()))?;
        let Some(filename) = absolute.to_str() else {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("{}: QEMU needs a path in UTF-8; rename the file", path.display()),
            ));
        };
        let facts = space.host().look_at_file(&absolute)?;
        let file_driver = if facts.is_device { "host_device" } else { "file" };
        let mut options =
            json!({ "driver": driver, "file": { "driver": file_driver, "filename": filename } });
        let mut image = QemuImage {
            options: Value::Null,
            files: Vec::new(),
            length_bytes: 0,
            allocated_bytes: 0,
        };
        image.add_file(&absolute, true, &facts);
        for extent in extents {
            image.add_file(extent, false, &space.host().look_at_file(extent)?);
        }
        // Raw and VHD have no backing file and would reject the option.
        if matches!(driver, "qcow2" | "vmdk") {
            options["backing"] = Value::Null;
            if let Some(backing) = backing {
                options["backing"] = backing.options;
                image.files.extend(backing.files);
                image.length_bytes = image.length_bytes.saturating_add(backing.length_bytes);
                image.allocated_bytes =
                    image.allocated_bytes.saturating_add(backing.allocated_bytes);
            }
        }
        if driver == "vpc" {
            // Otherwise QEMU computes the size from the geometry for most creators. That
            // size is smaller than the disk, so its end would be lost.
            options["force_size_calc"] = json!("current_size");
        }
        image.options = options;
        Ok(image)
    }

    /// A part of a local file. Opens no other file.
    ///
    /// Fails as [`QemuImage::new`] does; and if the file ends before the part does.
    pub(crate) fn new_part(
        space: &ScratchSpace,
        driver: &str,
        path: &Path,
        range: FileRange,
    ) -> Result<QemuImage> {
        let mut image = QemuImage::new(space, driver, path, &[], None)?;
        // QEMU wants whole sectors; a tar archive fills up its members to them.
        let size_bytes = range.length_bytes.next_multiple_of(SECTOR_BYTES);
        let end_bytes = range.offset_bytes.saturating_add(size_bytes);
        if end_bytes > image.length_bytes {
            let text =
                format!("{} is truncated: it ends before offset {end_bytes}", path.display());
            return Err(Error::new(ErrorKind::Io, text));
        }
        let file = image.options["file"].take();
        image.options["file"] = json!({ "driver": "raw", "offset": range.offset_bytes, "size": size_bytes, "file": file });
        image.length_bytes = size_bytes;
        image.allocated_bytes = image.allocated_bytes.min(size_bytes);
        Ok(image)
    }

    fn add_file(&mut self, path: &Path, may_be_link: bool, facts: &FileFacts) {
        self.length_bytes = self.length_bytes.saturating_add(facts.length_bytes);
        self.allocated_bytes = self.allocated_bytes.saturating_add(facts.allocated_bytes);
        self.files.push(AllowedFile { path: path.to_path_buf(), may_be_link, is_writable: false });
    }

    /// What a program may use that opens it.
    fn bounds(&self, limits: Limits) -> Bounds {
        Bounds { files: self.files.clone(), limits }
    }

    /// The same, opened without a lock that could keep a machine from starting on it. Such a machine may change
    /// the image at any time: the caller has to notice it.
    pub(crate) fn shared(mut self) -> QemuImage {
        self.options["force-share"] = json!(true);
        self
    }

    /// All files that are opened for it.
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        self.files.iter().map(|file| file.path.clone()).collect()
    }

    /// The lengths of all its files together, in bytes.
    pub(crate) fn length_bytes(&self) -> u64 {
        self.length_bytes
    }

    /// QEMU's name for it.
    fn name(&self) -> String {
        format!("json:{}", self.options)
    }
}

/// The useful part of a tool's messages, without the tool's own name and the long `json:`
/// name of the image. An image may have put text into a message, and with it terminal
/// escapes: these are replaced.
fn plain_message(raw: &str, image: &str) -> String {
    let text = raw.replace(image, "the image");
    let text = text.replace(|c: char| c.is_control() && c != '\n', "\u{fffd}");
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .map(|line| {
            line.strip_prefix("qemu-img: ")
                .or_else(|| line.strip_prefix("qemu-nbd: "))
                .unwrap_or(line)
        })
        .collect();
    if lines.is_empty() { "it gave no reason".to_string() } else { lines.join("; ") }
}

/// Converts a tool's message to an error with a suggestion.
fn refused(what: &str, message: String) -> Error {
    let advice = if message.contains("\" lock") {
        " (the image is in use, most likely by a running VM: back it up through an NBD export \
         of that VM, or stop the VM first)"
    } else if message.contains("failed to execute") {
        " (Debian: apt install qemu-utils)"
    } else {
        ""
    };
    Error::with_source(ErrorKind::ToolFailed, format!("{what}{advice}"), message)
}
