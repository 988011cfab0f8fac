//! The result of a point's last boot check, stored beside its marker.
//!
//! Storing it needs no writer of the database, so a check works during a backup. The file is
//! replaced by a rename, and is removed with its point. It repeats what another check can find
//! again, so a damaged one is only named.

use std::path::PathBuf;

use coldrise_block::{Context, Error, ErrorKind, Result, sync_directory, write_synced};
use serde::{Deserialize, Serialize};

use super::{DIRECTORY, TEMPORARY_EXTENSION, purpose};
use crate::{MachineName, PointName, Repository};

pub(super) const BOOT_EXTENSION: &str = "boot";
/// Files are padded to a multiple of this, because the size of a picture says something about it.
const PADDING_BYTES: usize = 16 << 10;
/// A larger picture is left out.
const MAX_SCREENSHOT_BYTES: usize = 1 << 20;
/// Length of the document, little endian, before it.
const LENGTH_BYTES: usize = 4;

/// Whether a point boots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BootVerdict {
    /// It reached the wanted stage.
    Ok,
    /// It provably failed.
    Failed,
    /// No proof of either within the time limit.
    NotProven,
}

/// How far a boot came, and the proof of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReachedStage {
    /// Such as `login`.
    #[serde(rename = "rung")]
    pub stage: String,
    /// Since the start of the machine, in milliseconds.
    pub after_ms: u64,
    /// In words.
    pub evidence: String,
}

/// The evidence of a boot check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootCheckDocument {
    /// The end of the check, in milliseconds since 1970.
    pub checked_at_ms: u64,
    /// The result.
    pub verdict: BootVerdict,
    /// The stage that was to be reached.
    pub until: String,
    /// The reached stages, from the lowest on.
    #[serde(rename = "rungs")]
    pub stages: Vec<ReachedStage>,
    /// The proof of the failure.
    pub failure: Option<String>,
    /// Why a check of the user proved nothing.
    #[serde(default)]
    pub note: Option<String>,
    /// Nothing was proven, and the machine came less far than in its last good checks.
    #[serde(default)]
    pub is_worse: bool,
    /// The highest stage of those checks. Set only if nothing was proven.
    #[serde(default, rename = "usual_rung")]
    pub usual_stage: Option<String>,
    /// The text of the screen, if it had any.
    pub screen_text: Option<String>,
    /// The last lines of the serial port.
    pub serial_tail: Vec<String>,
}

impl Repository {
    /// Stores the result of a point's last boot check, durably, with a picture of the screen. A
    /// picture of more than 1 MiB is left out.
    ///
    /// # Errors
    /// `NotFound` if the point no longer exists; `NoSpace` and other errors of the operating
    /// system.
    pub fn put_boot_check(
        &self,
        machine: &MachineName,
        point: &PointName,
        document: &BootCheckDocument,
        screenshot: Option<&[u8]>,
    ) -> Result<()> {
        let name = format!("{machine}/{point}");
        if !self.is_marked(&name) {
            let text = format!("{name} no longer exists: the result of its check is not stored");
            return Err(Error::new(ErrorKind::NotFound, text));
        }
        let path = self.boot_check_path(machine, point);
        let text = serde_json::to_vec(document)
            .map_err(|e| Error::with_source(ErrorKind::Internal, "writing a boot check", e))?;
        let length = u32::try_from(text.len())
            .map_err(|e| Error::with_source(ErrorKind::Internal, "a boot check is too long", e))?;
        let picture = screenshot.filter(|picture| picture.len() <= MAX_SCREENSHOT_BYTES);
        let picture = picture.unwrap_or_default();
        let mut plaintext = [&length.to_le_bytes(), &text[..]].concat();
        let picture_length = u32::try_from(picture.len()).unwrap_or(0);
        plaintext.extend_from_slice(&picture_length.to_le_bytes());
        plaintext.extend_from_slice(picture);
        plaintext.resize(plaintext.len().next_multiple_of(PADDING_BYTES), 0);
        let stored = self.encrypt_document(&purpose(&path), &plaintext)?;
        let mut temporary = path.clone().into_os_string();
        temporary.push(format!(".{TEMPORARY_EXTENSION}"));
        let writing = || format!("writing {}", path.display());
        write_synced(temporary.as_ref(), &stored).context(writing)?;
        std::fs::rename(&temporary, &path).context(writing)?;
        sync_directory(&self.path().join(DIRECTORY))
    }

    /// The result of a point's last boot check, with the picture of its screen.
    ///
    /// # Errors
    /// `Corrupt` if it is damaged or belongs to another point.
    pub fn boot_check(
        &self,
        machine: &MachineName,
        point: &PointName,
    ) -> Result<Option<(BootCheckDocument, Option<Vec<u8>>)>> {
        let path = self.boot_check_path(machine, point);
        if !path.try_exists().context(|| format!("looking for {}", path.display()))? {
            return Ok(None);
        }
        let damaged = || {
            let text =
                format!("it cannot be read: coldrise check-boot {machine}/{point} replaces it");
            Error::new(ErrorKind::Corrupt, text)
        };
        let Some(plaintext) = self.read_sealed(&path) else {
            // It may have been removed with its point.
            return if path.exists() { Err(damaged()) } else { Ok(None) };
        };
        let parsed = || {
            let (text, rest) = split_part(&plaintext)?;
            let (picture, _) = split_part(rest)?;
            let document = serde_json::from_slice(text).ok()?;
            Some((document, Some(picture.to_vec()).filter(|picture| !picture.is_empty())))
        };
        parsed().ok_or_else(damaged).map(Some)
    }

    fn boot_check_path(&self, machine: &MachineName, point: &PointName) -> PathBuf {
        self.marker_path(&format!("{machine}/{point}")).with_extension(BOOT_EXTENSION)
    }
}

/// A part with its length before it, and the rest.
fn split_part(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<LENGTH_BYTES>()?;
    rest.split_at_checked(u32::from_le_bytes(*length) as usize)
}
