//! The document of a proof. docs/recovery.md specifies it.

use coldrise_block::hex;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use coldrise_block::{Context, Error, ErrorKind, MAX_DISK_SIZE_BYTES, Result};
use coldrise_store::{DiskName, MAX_DISKS, MachineName, PointName};
use serde::{Deserialize, Serialize};

use super::key::{PublicKey, SigningKey};
use super::section::{MAX_SECTIONS, MIN_SECTION_BYTES, Sections, root};
use super::tree::{Hash, LEAF_BYTES};

/// Maximum length of a proof, in bytes: more than the sections of the largest point take.
pub const MAX_PROOF_BYTES: u64 = 80 << 20;
const KIND: &str = "coldrise-proof";
const VERSION: u64 = 1;
const HASH: &str = "sha256";

/// The signed part. The signed bytes are this object as JSON with sorted names and without spaces: the
/// fields below stand in that order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Statement {
    /// When it was signed, in milliseconds since 1970-01-01T00:00:00Z.
    pub created_at_ms: u64,
    /// The disks; names are unique.
    pub disks: Vec<DiskStatement>,
    hash: String,
    kind: String,
    leaf_bytes: u64,
    /// The machine.
    pub machine: String,
    /// The point.
    pub point: String,
    version: u64,
}

/// The statement about one disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskStatement {
    /// The disk's name.
    pub disk: String,
    /// The root of its tree, in hexadecimal.
    pub root: String,
    /// Its size, in bytes.
    pub size_bytes: u64,
}

/// 64 hexadecimal digits. Anything else ends the parsing, so a long file of short texts takes no memory.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
struct WrittenHash(Hash);

impl TryFrom<String> for WrittenHash {
    type Error = &'static str;

    fn try_from(text: String) -> std::result::Result<WrittenHash, &'static str> {
        hex::decode_lower(&text).map(WrittenHash).ok_or("a hash that is not hexadecimal")
    }
}

impl From<WrittenHash> for String {
    fn from(hash: WrittenHash) -> String {
        hex::encode(&hash.0)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenSections {
    hashes: Vec<WrittenHash>,
    section_bytes: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenProof {
    statement: Statement,
    public_key: String,
    signature: String,
    sections: BTreeMap<String, WrittenSections>,
}

/// The version of a proof.
#[derive(Deserialize)]
struct Head {
    statement: HeadStatement,
}

#[derive(Deserialize)]
struct HeadStatement {
    kind: String,
    version: u64,
}

/// A proof whose signature and sections are right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// The signed part.
    pub statement: Statement,
    /// The key that signed it. Who holds it is not part of the proof.
    pub public_key: PublicKey,
    signature: Vec<u8>,
    /// By disk.
    pub(super) sections: BTreeMap<String, Sections>,
}

impl Proof {
    /// Signs the sections of a point's disks.
    ///
    /// # Errors
    /// `Internal` if the statement cannot be written.
    pub fn sign(
        (machine, point): (&MachineName, &PointName),
        disks: Vec<(DiskName, u64, Sections)>,
        created_at_ms: u64,
        key: &SigningKey,
    ) -> Result<Proof> {
        let stated = |(disk, size_bytes, sections): &(DiskName, u64, Sections)| DiskStatement {
            disk: disk.to_string(),
            root: hex::encode(&root(sections.hashes.clone(), sections.section_bytes, *size_bytes)),
            size_bytes: *size_bytes,
        };
        let statement = Statement {
            created_at_ms,
            disks: disks.iter().map(stated).collect(),
            hash: HASH.to_owned(),
            kind: KIND.to_owned(),
            leaf_bytes: LEAF_BYTES,
            machine: machine.to_string(),
            point: point.to_string(),
            version: VERSION,
        };
        let signature = key.sign(&statement.signed_bytes()?);
        let sections = disks.into_iter().map(|(disk, _, found)| (disk.to_string(), found));
        let sections = sections.collect();
        Ok(Proof { statement, public_key: key.public(), signature, sections })
    }

    /// Writes the proof to a new file, durably.
    ///
    /// # Errors
    /// `AlreadyExists`; errors of the system. A part of the file may be left after those.
    pub fn write(&self, path: &Path) -> Result<()> {
        let what = || format!("writing {}", path.display());
        let written = |(disk, found): (&String, &Sections)| {
            let hashes = found.hashes.iter().copied().map(WrittenHash).collect();
            (disk.clone(), WrittenSections { hashes, section_bytes: found.section_bytes })
        };
        let proof = WrittenProof {
            statement: self.statement.clone(),
            public_key: self.public_key.to_pem(),
            signature: BASE64.encode(&self.signature),
            sections: self.sections.iter().map(written).collect(),
        };
        let mut text = serde_json::to_vec_pretty(&proof).map_err(internal)?;
        text.push(b'\n');
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o644)
            .open(path)
            .context(what)?;
        file.write_all(&text).and_then(|()| file.sync_all()).context(what)
    }

    /// Reads a proof, and checks it against itself: the signature, and the way from its sections to the
    /// signed roots.
    ///
    /// # Errors
    /// `InvalidInput` if it is not a proof or too long, `Unsupported` for another version, `Corrupt` for a
    /// wrong signature or sections that do not lead to the root.
    pub fn read(path: &Path) -> Result<Proof> {
        let what = || format!("reading {}", path.display());
        let file = std::fs::File::open(path).context(what)?;
        let mut text = Vec::new();
        file.take(MAX_PROOF_BYTES + 1).read_to_end(&mut text).context(what)?;
        Proof::parse(&text).map_err(|error| error.context(path.display()))
    }

    pub(super) fn parse(text: &[u8]) -> Result<Proof> {
        if text.len() as u64 > MAX_PROOF_BYTES {
            return Err(invalid("longer than a proof can be"));
        }
        // First the version: a later one may have other fields.
        let Head { statement } = serde_json::from_slice(text).map_err(no_proof)?;
        if statement.kind != KIND {
            return Err(invalid("no proof of coldrise attest"));
        }
        if statement.version != VERSION {
            let text = format!("a proof of version {}, not {VERSION}", statement.version);
            return Err(Error::new(ErrorKind::Unsupported, text).advise("use a newer coldrise"));
        }
        let written: WrittenProof = serde_json::from_slice(text).map_err(no_proof)?;
        written.statement.check()?;
        let key = PublicKey::of_pem(&written.public_key)
            .ok_or_else(|| invalid("its public key is none of Ed25519"))?;
        let signature = BASE64
            .decode(&written.signature)
            .map_err(|_| invalid("its signature is not base64"))?;
        if !key.verifies(&written.statement.signed_bytes()?, &signature) {
            let text = "the signature does not belong to the statement: the proof was changed";
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        let sections = read_sections(&written.statement, written.sections)?;
        Ok(Proof { statement: written.statement, public_key: key, signature, sections })
    }
}

impl Statement {
    /// The bytes under the signature.
    fn signed_bytes(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(internal)
    }

    fn check(&self) -> Result<()> {
        if self.hash != HASH || self.leaf_bytes != LEAF_BYTES {
            return Err(invalid("another hash or size of leaves"));
        }
        // Names of this form need no escapes, so every implementation writes the signed bytes alike.
        MachineName::parse(&self.machine)?;
        PointName::parse(&self.point)?;
        if self.disks.is_empty() || self.disks.len() > MAX_DISKS {
            return Err(invalid("no disks, or too many"));
        }
        for (index, disk) in self.disks.iter().enumerate() {
            DiskName::parse(&disk.disk)?;
            if disk.size_bytes == 0 || disk.size_bytes > MAX_DISK_SIZE_BYTES {
                return Err(invalid("a disk of an impossible size"));
            }
            if self.disks[..index].iter().any(|other| other.disk == disk.disk) {
                return Err(invalid("a disk twice"));
            }
        }
        Ok(())
    }
}

/// The sections of every disk, if they lead to its root.
fn read_sections(
    statement: &Statement,
    mut written: BTreeMap<String, WrittenSections>,
) -> Result<BTreeMap<String, Sections>> {
    let mut sections = BTreeMap::new();
    for disk in &statement.disks {
        let found = written.remove(&disk.disk).ok_or_else(|| invalid("a disk without sections"))?;
        let bytes = found.section_bytes;
        let is_possible = bytes.is_power_of_two() && bytes >= MIN_SECTION_BYTES;
        let count = found.hashes.len() as u64;
        if !is_possible || count > MAX_SECTIONS || count != disk.size_bytes.div_ceil(bytes) {
            return Err(invalid("sections that do not cover the disk"));
        }
        let hashes: Vec<Hash> = found.hashes.into_iter().map(|hash| hash.0).collect();
        if hex::encode(&root(hashes.clone(), bytes, disk.size_bytes)) != disk.root {
            let text = format!("{}: the sections do not lead to the signed root", disk.disk);
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        sections.insert(disk.disk.clone(), Sections { section_bytes: bytes, hashes });
    }
    match written.is_empty() {
        true => Ok(sections),
        false => Err(invalid("sections of a disk that the statement does not name")),
    }
}

fn invalid(what: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("this is not a valid proof: {what}"))
}

fn no_proof(error: serde_json::Error) -> Error {
    Error::with_source(ErrorKind::InvalidInput, "this is not a valid proof", error)
}

fn internal(error: serde_json::Error) -> Error {
    Error::with_source(ErrorKind::Internal, "writing a proof", error)
}
