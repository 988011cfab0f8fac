//! One restore point, as `show` shows it.

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{
    BootCheckDocument, Configuration, DiskDocument, DiskName, PointDocument, PointOrigin,
    Quarantine,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::hardware::Hardware;
use crate::listing::PointKind;
use crate::schema::{BootCheckSchema, ConfigurationSchema, QuarantineSchema};

/// A restore point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PointDetails {
    /// MACHINE/POINT.
    pub address: String,
    /// The machine's name.
    pub machine: String,
    /// What people called the machine at that time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display_name: Option<String>,
    /// The point's name.
    pub point: String,
    /// How it was made.
    pub kind: PointKind,
    /// When it was stored or sealed, in milliseconds since 1970-01-01T00:00:00Z.
    pub created_at_ms: u64,
    /// Neither forget nor prune removes it.
    pub is_protected: bool,
    /// Why it is in quarantine; absent for a normal point.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<QuarantineSchema>)]
    pub quarantine: Option<Quarantine>,
    /// The point that its session was published from; absent for a backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// The session that it was sealed from; absent for a backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// The time of the mark of that session that it shows, in milliseconds since
    /// 1970-01-01T00:00:00Z; absent if it shows the session as it was when it was sealed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub marked_at_ms: Option<u64>,
    /// Descriptions of the sources of a backup.
    pub sources: Vec<String>,
    /// The disks.
    pub disks: Vec<PointDisk>,
    /// The machine's configuration, if one was stored.
    #[schema(value_type = Option<ConfigurationSchema>)]
    pub configuration: Option<Configuration>,
    /// The machine's parts beside its disks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<PointPart>,
    /// The hardware that `boot` gives the machine: of the configuration, else the default.
    pub hardware: Hardware,
    /// The last boot check.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<BootCheckSchema>)]
    pub boot: Option<BootCheckDocument>,
}

/// A disk of a restore point.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PointDisk {
    /// The disk's name.
    pub disk: String,
    /// MACHINE/POINT/DISK.
    pub address: String,
    /// Its size, in bytes.
    pub size_bytes: u64,
    /// Number of layers of captured writes over its chunks.
    pub layers: usize,
}

/// A part of a machine beside its disks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PointPart {
    /// What it is, such as `firmware-variables` or `tpm-state`.
    pub kind: String,
    /// The format of its content.
    pub format: String,
    /// Its size, in bytes.
    pub size_bytes: u64,
    /// The SHA-256 of its content, 64 hexadecimal digits.
    pub sha256: String,
}

impl PointPart {
    /// All parts of a point.
    ///
    /// # Errors
    /// `Corrupt` if one cannot be decompressed.
    pub fn all(point: &PointDocument) -> Result<Vec<PointPart>> {
        let described = point.parts.iter().map(|part| {
            let (kind, format) = (part.kind.clone(), part.format.clone());
            Ok(PointPart { kind, format, size_bytes: part.size_bytes, sha256: part.sha256()? })
        });
        described.collect()
    }
}

impl PointDetails {
    /// A point with all disks or with one.
    ///
    /// # Errors
    /// `NotFound` for an unknown disk, naming the existing ones; `Corrupt` for a damaged part.
    pub fn new(
        point: &PointDocument,
        only: Option<&DiskName>,
        boot: Option<BootCheckDocument>,
    ) -> Result<PointDetails> {
        let chosen: Vec<&DiskDocument> = match only {
            Some(name) => vec![find_disk(point, name)?],
            None => point.disks.iter().collect(),
        };
        let address = format!("{}/{}", point.machine, point.point);
        let (sources, base, session, marked_at_ms) = match &point.origin {
            PointOrigin::Backup { sources } => (sources.clone(), None, None, None),
            PointOrigin::Synthetic { base, session, marked_at_ms } => {
                (Vec::new(), Some(base.to_string()), Some(session.to_string()), *marked_at_ms)
            }
        };
        let disks = chosen
            .into_iter()
            .map(|disk| PointDisk {
                disk: disk.name.to_string(),
                address: format!("{address}/{}", disk.name),
                size_bytes: disk.size_bytes,
                layers: disk.layers.len(),
            })
            .collect();
        Ok(PointDetails {
            address,
            machine: point.machine.to_string(),
            display_name: point.display_name.clone().map(String::from),
            point: point.point.to_string(),
            kind: PointKind::of(&point.origin),
            created_at_ms: point.created_at_ms,
            is_protected: point.is_protected,
            quarantine: point.quarantine,
            base,
            session,
            marked_at_ms,
            sources,
            disks,
            configuration: point.configuration.clone(),
            parts: PointPart::all(point)?,
            hardware: Hardware::of(point.configuration.as_ref()).unwrap_or_default(),
            boot,
        })
    }
}

/// The disk of a point.
///
/// # Errors
/// `NotFound`, naming the existing disks.
pub fn find_disk<'a>(point: &'a PointDocument, name: &DiskName) -> Result<&'a DiskDocument> {
    point.disk(name).ok_or_else(|| {
        let names: Vec<&str> = point.disks.iter().map(|disk| disk.name.as_str()).collect();
        let (machine, point) = (&point.machine, &point.point);
        let text = format!("{machine}/{point} has no disk {name}, only {}", names.join(", "));
        Error::new(ErrorKind::NotFound, text)
    })
}
