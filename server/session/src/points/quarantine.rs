//! Quarantine: points are set aside, because a part of them is damaged or because a user does not
//! trust them.
//!
//! A quarantined point stays in the catalog unchanged. It is never a machine's `latest` or the base
//! of a backup, and no retention rule counts it. Servers of points neither list nor open it.
//! Publishing it requires force. By its name it can be shown, verified, compared and restored.

use std::collections::HashSet;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{
    Affected, MachineName, PointDocument, PointName, Quarantine, RepositoryWriter,
};

/// Quarantines points, or with `None` releases them; all or none. Durable on return. The points
/// must be in the catalog: see [`crate::enter_sealed_points`].
///
/// # Errors
/// `NotFound` if one of them is not in the catalog; `NoSpace`.
pub fn set_quarantine(
    writer: &RepositoryWriter,
    points: &[(MachineName, PointName)],
    quarantine: Option<Quarantine>,
) -> Result<()> {
    let repository = writer.repository();
    let read = |(machine, point): &(MachineName, PointName)| {
        let point = repository.point(machine, point)?;
        Ok(PointDocument { quarantine, ..point })
    };
    writer.replace_points(&points.iter().map(read).collect::<Result<Vec<_>>>()?)
}

/// The changes of a repair: addresses of points, sorted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QuarantineReport {
    /// Newly quarantined points.
    pub quarantined: Vec<String>,
    /// Points that were quarantined and are intact again.
    pub released: Vec<String>,
}

/// Releases points that were quarantined as damaged and are no longer `affected`. With
/// `is_marking`, quarantines points that are. Quarantines chosen by a user stay. One batch, durable
/// on return.
///
/// # Errors
/// The errors of writing to the catalog.
pub fn apply_quarantine(
    writer: &RepositoryWriter,
    affected: &[Affected],
    is_marking: bool,
) -> Result<QuarantineReport> {
    let affected: HashSet<&str> =
        affected.iter().filter_map(|part| Some(part.disk.rsplit_once('/')?.0)).collect();
    let mut report = QuarantineReport::default();
    let mut changed = Vec::new();
    let (points, _) = writer.repository().verify_catalog()?;
    for mut point in points {
        let address = format!("{}/{}", point.machine, point.point);
        match (point.quarantine, affected.contains(&*address)) {
            (None, true) if is_marking => {
                point.quarantine = Some(Quarantine::Damaged);
                report.quarantined.push(address);
            }
            (Some(Quarantine::Damaged), false) => {
                point.quarantine = None;
                report.released.push(address);
            }
            _ => continue,
        }
        changed.push(point);
    }
    writer.replace_points(&changed)?;
    report.quarantined.sort_unstable();
    report.released.sort_unstable();
    Ok(report)
}

/// Accepts a point that may be served or published: any that is not quarantined.
///
/// # Errors
/// `NotFound`. The message says how to proceed.
pub fn check_offered(point: PointDocument) -> Result<PointDocument> {
    let Some(quarantine) = point.quarantine else { return Ok(point) };
    let address = format!("{}/{}", point.machine, point.point);
    let message = format!(
        "{address} is quarantined ({quarantine}) and not served: restore what it still holds with \
         coldrise restore, publish it with --force, or coldrise release {address}"
    );
    Err(Error::new(ErrorKind::NotFound, message))
}
