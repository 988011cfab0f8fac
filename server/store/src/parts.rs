//! The parts of a machine beside its disks, such as firmware variables: stored in the point's document itself, so that they
//! go wherever it goes, and no gc, copy or bucket needs to know of them.

use std::fmt;
use std::sync::Arc;

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use coldrise_block::{Error, ErrorKind, Result, hex};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The variables of UEFI firmware, with their boot entries; their format is [`RAW`].
pub const FIRMWARE_VARIABLES: &str = "firmware-variables";
/// The state of a TPM; its format is [`SWTPM_PERMALL`].
pub const TPM_STATE: &str = "tpm-state";
/// A flash device, byte by byte.
pub const RAW: &str = "raw";
/// The file tpm2-00.permall of swtpm.
pub const SWTPM_PERMALL: &str = "swtpm-permall";

/// Maximum size of one part, in bytes.
pub const MAX_PART_BYTES: u64 = 16 << 20;
/// Maximum size of the compressed parts of a point together, in bytes. A session's document holds those of all points that
/// wait for a writer.
pub(crate) const MAX_PARTS_BYTES: usize = 1 << 20;
/// Maximum number of parts of a point; each has another kind.
pub(crate) const MAX_PARTS: usize = 8;
/// Maximum length of the words for kind and format, in bytes.
const MAX_WORD_BYTES: usize = 32;
const LEVEL: i32 = 12;

/// One part. In memory its content stays compressed, and copies share it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachinePart {
    /// What it is: [`FIRMWARE_VARIABLES`] or [`TPM_STATE`]. Kinds of later versions are carried along.
    pub kind: String,
    /// The format of the content.
    pub format: String,
    /// The size of the content, in bytes.
    pub size_bytes: u64,
    /// A zstd frame, in base64.
    content: Compressed,
}

#[derive(Clone, PartialEq, Eq)]
struct Compressed(Arc<[u8]>);

impl MachinePart {
    /// Compresses the content of a part.
    ///
    /// # Errors
    /// `InvalidInput` above [`MAX_PART_BYTES`], and if it is too large when compressed.
    pub fn new(kind: &str, format: &str, content: &[u8]) -> Result<MachinePart> {
        let compressed = zstd::bulk::compress(content, LEVEL)
            .map_err(|error| Error::with_source(ErrorKind::Internal, "compressing", error))?;
        let part = MachinePart {
            kind: kind.to_owned(),
            format: format.to_owned(),
            size_bytes: content.len() as u64,
            content: Compressed(compressed.into()),
        };
        check_parts(std::slice::from_ref(&part))?;
        Ok(part)
    }

    /// Its content.
    ///
    /// # Errors
    /// `Corrupt` if it cannot be decompressed or has another size.
    pub fn content(&self) -> Result<Vec<u8>> {
        let size = self.size_bytes.min(MAX_PART_BYTES) as usize;
        match zstd::bulk::decompress(&self.content.0, size) {
            Ok(content) if content.len() as u64 == self.size_bytes => Ok(content),
            _ => {
                let text = format!("the stored {} cannot be decompressed", self.kind);
                Err(Error::new(ErrorKind::Corrupt, text))
            }
        }
    }

    /// The SHA-256 of its content, 64 hexadecimal digits.
    ///
    /// # Errors
    /// As [`MachinePart::content`].
    pub fn sha256(&self) -> Result<String> {
        Ok(hex::encode(digest(&SHA256, &self.content()?).as_ref()))
    }

    /// Its size in a document, in bytes.
    pub fn stored_bytes(&self) -> usize {
        self.content.0.len().div_ceil(3) * 4
    }
}

/// Checks the bounds of a point's parts.
///
/// # Errors
/// `InvalidInput`, naming the bound.
pub fn check_parts(parts: &[MachinePart]) -> Result<()> {
    let refuse = |what: String| Err(Error::new(ErrorKind::InvalidInput, what));
    let is_word = |word: &str| {
        let allowed = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
        (1..=MAX_WORD_BYTES).contains(&word.len()) && word.bytes().all(allowed)
    };
    if parts.len() > MAX_PARTS {
        return refuse(format!("{} parts beside the disks, not {MAX_PARTS}", parts.len()));
    }
    for (i, part) in parts.iter().enumerate() {
        if !is_word(&part.kind) || !is_word(&part.format) {
            return refuse("a part beside the disks has an unusable kind or format".to_owned());
        }
        if parts.iter().skip(i + 1).any(|other| other.kind == part.kind) {
            return refuse(format!("the {} are there twice", part.kind));
        }
        if part.size_bytes > MAX_PART_BYTES {
            return refuse(format!("the {} are over {MAX_PART_BYTES} bytes", part.kind));
        }
    }
    let compressed: usize = parts.iter().map(|part| part.content.0.len()).sum();
    match compressed > MAX_PARTS_BYTES {
        true => refuse(format!("the parts are over {MAX_PARTS_BYTES} bytes, compressed")),
        false => Ok(()),
    }
}

impl fmt::Debug for Compressed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} compressed bytes", self.0.len())
    }
}

impl Serialize for Compressed {
    fn serialize<S: Serializer>(&self, out: S) -> std::result::Result<S::Ok, S::Error> {
        out.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Compressed {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let bytes = STANDARD.decode(text).map_err(serde::de::Error::custom)?;
        Ok(Compressed(bytes.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_comes_back_with_its_content() {
        let content = [vec![255; 540_672], b"Boot0000".to_vec()].concat();
        let part = MachinePart::new(FIRMWARE_VARIABLES, RAW, &content).unwrap();
        let text = serde_json::to_string(&part).unwrap();
        assert!(text.len() < 400, "{} bytes", text.len());
        let again: MachinePart = serde_json::from_str(&text).unwrap();
        assert_eq!(again, part);
        assert!(again.content().unwrap() == content);
        assert_eq!(again.size_bytes, 540_680);
    }

    #[test]
    fn bounds_hold_for_parts_of_any_origin() {
        let part = |kind: &str, content: &[u8]| MachinePart::new(kind, RAW, content);
        let mut random = vec![0; MAX_PARTS_BYTES + 4096];
        crate::aead::random(&mut random).unwrap();
        assert!(part(TPM_STATE, &random).is_err());
        assert!(part(TPM_STATE, &vec![0; MAX_PART_BYTES as usize + 1]).is_err());
        assert!(part("../x", b"").is_err());
        let halves =
            [part("a", &random[..600_000]).unwrap(), part("b", &random[..600_000]).unwrap()];
        assert!(check_parts(&halves[..1]).is_ok() && check_parts(&halves).is_err());
        assert!(check_parts(&[halves[0].clone(), halves[0].clone()]).is_err());
        // A frame that holds more than it says, from a hostile site.
        let larger = part("a", &[0; 9000]).unwrap();
        for size_bytes in [8999, 9001] {
            let lies = MachinePart { size_bytes, ..larger.clone() };
            assert_eq!(lies.content().unwrap_err().kind(), ErrorKind::Corrupt);
        }
    }
}
