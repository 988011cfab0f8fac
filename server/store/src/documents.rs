//! The documents of the catalog: the content of a restore point.

use std::fmt;

use coldrise_block::{Error, ErrorKind, MAX_DISK_SIZE_BYTES, Result};
use serde::{Deserialize, Serialize};

use crate::parts::{MachinePart, check_parts};
use crate::{
    DiskName, DisplayName, MachineName, MapRoot, PointName, RepositoryId, SessionName, StateTime,
};
use coldrise_block::hex;

/// Maximum number of disks of one machine.
pub const MAX_DISKS: usize = 256;
/// Repositories that a copied point remembers; with more, the first are forgotten.
pub const MAX_CAME_BY: usize = 32;
/// Maximum number of layers under one synthetic point.
pub(crate) const MAX_LAYERS: usize = 4096;
/// Maximum size of a configuration, in bytes.
pub const MAX_CONFIGURATION_BYTES: usize = 1 << 20;
/// Maximum length of a source's description, in bytes.
const MAX_SOURCE_BYTES: usize = 4096;

/// A restore point: the state of all disks of a machine at one time, and the machine's
/// configuration. Once stored, only its protection and its quarantine change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PointDocument {
    /// The machine.
    pub machine: MachineName,
    /// The point's name.
    pub point: PointName,
    /// When it was stored or sealed, in milliseconds since 1970-01-01T00:00:00Z.
    pub created_at_ms: u64,
    /// How it was made.
    pub origin: PointOrigin,
    /// At least one; names are unique.
    pub disks: Vec<DiskDocument>,
    /// The machine's configuration, if one was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configuration: Option<Configuration>,
    /// The machine's parts beside its disks; at most one of a kind.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<MachinePart>,
    /// What people called the machine when the point was stored, if that differs from its name.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "DisplayName::read_stored"
    )]
    pub display_name: Option<DisplayName>,
    /// A protected point is neither forgotten nor pruned.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_protected: bool,
    /// The client files that were sealed with it, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<PointFiles>,
    /// A point in quarantine is not served, published or counted; `None` for a normal point.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quarantine: Option<Quarantine>,
    /// Where a copied point was made; `None` for a point that was made in this repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made_in: Option<MadeIn>,
    /// Of a copied point: the repositories in which it was a copy on its way here, first to last, with the machine's names there;
    /// at most `MAX_CAME_BY`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub came_by: Vec<MadeIn>,
}

/// A repository in which a copied point was made, or was before, and the machine's name there. The point's name
/// and time are the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadeIn {
    /// The repository.
    pub repository: RepositoryId,
    /// The machine.
    pub machine: MachineName,
}

/// Why a restore point is in quarantine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quarantine {
    /// A repair found a part of it damaged. A later repair that finds it healed releases it.
    Damaged,
    /// A person put it there; only a person can release it.
    Chosen,
}

impl fmt::Display for Quarantine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Quarantine::Damaged => "damaged",
            Quarantine::Chosen => "chosen",
        })
    }
}

/// Summary of the files that a point carries. The files are a separate document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PointFiles {
    /// Number of files and folders.
    pub count: u32,
    /// The sum of their sizes.
    pub size_bytes: u64,
    /// A keyed hash of the document, 64 hexadecimal digits. It detects any other document.
    pub hash: String,
}

/// How a restore point was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PointOrigin {
    /// A backup.
    Backup {
        /// Descriptions of the sources, for people: one entry per disk.
        sources: Vec<String>,
    },
    /// A sealed session.
    Synthetic {
        /// The point that the session was published from.
        base: PointName,
        /// The session.
        session: SessionName,
        /// The time of the mark that it shows, in milliseconds since 1970; `None` if it shows the
        /// session as it was when it was sealed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        marked_at_ms: Option<u64>,
    },
}

/// One disk of a restore point: a chunk map and the layers over it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskDocument {
    /// The disk's name.
    pub name: DiskName,
    /// The disk's size, in bytes.
    pub size_bytes: u64,
    /// The root of its chunk map.
    pub root: MapRoot,
    /// The layers over the chunks, bottom first; empty for a backup.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerReference>,
}

/// A layer as one point sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerReference {
    /// The layer.
    pub id: LayerId,
    /// Sequence number of the last write that is in the point.
    pub sealed_sequence: u64,
    /// Slots in use when the layer was sealed; each holds a record.
    pub sealed_slots: u32,
    /// Cells in it when it was sealed; none may be missing.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub sealed_cells: u32,
    /// Sequence number of the last write in the layer, if it holds later writes than the point: the
    /// point is the state at a time mark. A version that does not know this refuses the layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_sequence: Option<u64>,
    /// Until this time, in milliseconds since 1970, the session to which the layer belonged may go
    /// back to time marks in it. A fold that chooses points by itself leaves it alone until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub marks_until_ms: Option<u64>,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// The random 16 bytes that name a layer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayerId(pub [u8; 16]);

impl LayerId {
    /// A new random id.
    pub fn random() -> Result<Self> {
        let mut id = [0; 16];
        crate::aead::random(&mut id)?;
        Ok(LayerId(id))
    }

    /// Parses 32 lower-case hexadecimal digits.
    ///
    /// # Errors
    /// `ErrorKind::InvalidInput` for anything else.
    pub fn parse(text: &str) -> Result<Self> {
        hex::decode_lower(text).map(LayerId).ok_or_else(|| {
            Error::new(ErrorKind::InvalidInput, "a layer id is 32 hexadecimal digits")
        })
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Display for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&hex::encode(&self.0))
    }
}

impl fmt::Debug for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for LayerId {
    fn serialize<S: serde::Serializer>(&self, out: S) -> std::result::Result<S::Ok, S::Error> {
        out.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for LayerId {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        LayerId::parse(&text).map_err(serde::de::Error::custom)
    }
}

/// A libvirt configuration (`virsh dumpxml`).
pub const LIBVIRT_XML: &str = "libvirt-xml";
/// A VMware configuration.
pub const VMX: &str = "vmx";
/// A descriptor of a virtual appliance (OVF).
pub const OVF: &str = "ovf";
/// Coldrise's own description of a machine.
pub const COLDRISE_JSON: &str = "coldrise-json";

/// The configuration of a machine, byte for byte as it was given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configuration {
    /// The format, for example [`LIBVIRT_XML`], [`VMX`], [`OVF`] or [`COLDRISE_JSON`].
    pub format: String,
    /// The text.
    pub text: String,
}

impl PointDocument {
    /// The disk of this name.
    pub fn disk(&self, name: &DiskName) -> Option<&DiskDocument> {
        self.disks.iter().find(|disk| disk.name == *name)
    }

    /// The time of the time mark that it shows, in milliseconds since 1970-01-01T00:00:00Z.
    pub fn marked_at_ms(&self) -> Option<u64> {
        match self.origin {
            PointOrigin::Synthetic { marked_at_ms, .. } => marked_at_ms,
            PointOrigin::Backup { .. } => None,
        }
    }

    /// What decides its place among the machine's points.
    pub fn state_time(&self) -> StateTime {
        StateTime {
            name_seconds: self.point.unix_seconds(),
            created_at_ms: self.created_at_ms,
            marked_at_ms: self.marked_at_ms(),
        }
    }

    /// The part of this kind beside the disks.
    pub fn part(&self, kind: &str) -> Option<&MachinePart> {
        self.parts.iter().find(|part| part.kind == kind)
    }

    /// Checks the bounds that the fields' types cannot express.
    ///
    /// # Errors
    /// `ErrorKind::InvalidInput`, naming the bound.
    pub fn check(&self) -> Result<()> {
        let refuse = |what: String| {
            Err(Error::new(
                ErrorKind::InvalidInput,
                format!("point {}/{}: {what}", self.machine, self.point),
            ))
        };
        if self.disks.is_empty() || self.disks.len() > MAX_DISKS {
            return refuse(format!("it has {} disks, not 1 to {MAX_DISKS}", self.disks.len()));
        }
        let mut names: Vec<&DiskName> = self.disks.iter().map(|disk| &disk.name).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return refuse(format!("disk {} is there twice", pair[0]));
        }
        for disk in &self.disks {
            if disk.size_bytes == 0 || disk.size_bytes > MAX_DISK_SIZE_BYTES {
                return refuse(format!("disk {} has {} bytes", disk.name, disk.size_bytes));
            }
            if disk.layers.len() > MAX_LAYERS {
                return refuse(format!("disk {} has {} layers", disk.name, disk.layers.len()));
            }
        }
        if let PointOrigin::Backup { sources } = &self.origin {
            if sources.len() > MAX_DISKS || sources.iter().any(|s| s.len() > MAX_SOURCE_BYTES) {
                return refuse("the description of its sources is too long".to_owned());
            }
        }
        if self.came_by.len() > MAX_CAME_BY {
            return refuse(format!("it came by {} repositories", self.came_by.len()));
        }
        if let Err(error) = check_parts(&self.parts) {
            return refuse(error.message());
        }
        match &self.configuration {
            Some(c) if c.text.len() > MAX_CONFIGURATION_BYTES || c.format.len() > 64 => {
                refuse(format!("its configuration is over {MAX_CONFIGURATION_BYTES} bytes"))
            }
            _ => Ok(()),
        }
    }
}

/// A damaged document of the catalog, or of the store itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CatalogDamage {
    /// The name, as far as it is known: `web01/20261120T100000Z`.
    pub what: String,
    /// The kind of damage, in words.
    pub reason: String,
    /// How the repository becomes usable again.
    #[serde(skip)]
    pub way_out: WayOut,
}

/// How a repository becomes usable again after a document was damaged or lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WayOut {
    /// The damage does not determine it.
    #[default]
    Unknown,
    /// A repair restores it from its marker.
    Repair,
    /// No part of the repository still has it; a command removes the entry.
    GiveUp,
}

impl CatalogDamage {
    /// Damage without a known remedy.
    pub fn new(what: String, reason: String) -> CatalogDamage {
        CatalogDamage { what, reason, way_out: WayOut::Unknown }
    }
}

/// A flag of a point, stored beside its marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flag {
    Protected,
    Quarantined,
}

#[cfg(test)]
#[path = "documents_tests.rs"]
mod tests;
