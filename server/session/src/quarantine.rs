//! Quarantine: points that are set aside, because a part of them is damaged or because
//! somebody does not trust them.
//!
//! Such a point stays in the catalog as it is. It is no machine's `latest`, no base of a
//! backup, and no rule of retention counts it; it is neither listed nor opened by what
//! serves points, and published only by force. By its name it can be shown, verified,
//! compared and restored.

use std::collections::HashSet;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{
    Affected, MachineName, PointDocument, PointName, Quarantine, RepositoryWriter,
};

/// Sets points aside, or with `None` takes that back; all or none. Durable on return.
/// The points are in the catalog: see [`crate::enter_sealed_points`].
///
/// # Errors
/// `NotFound` where one of them is not in the catalog; `NoSpace`.
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

/// What a repair has changed: addresses of points, sorted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settled {
    /// Set aside now.
    pub quarantined: Vec<String>,
    /// Set aside before, and whole again.
    pub released: Vec<String>,
}

/// Releases points that were set aside as damaged and are not `affected` any more, and
/// with `is_marking` sets those aside that are. What somebody has chosen stays. One
/// batch, durable on return.
///
/// # Errors
/// As writing to the catalog.
pub fn settle_quarantine(
    writer: &RepositoryWriter,
    affected: &[Affected],
    is_marking: bool,
) -> Result<Settled> {
    let affected: HashSet<&str> =
        affected.iter().filter_map(|part| Some(part.disk.rsplit_once('/')?.0)).collect();
    let mut settled = Settled::default();
    let mut changed = Vec::new();
    let (points, _) = writer.repository().verify_catalog()?;
    for mut point in points {
        let address = format!("{}/{}", point.machine, point.point);
        match (point.quarantine, affected.contains(&*address)) {
            (None, true) if is_marking => {
                point.quarantine = Some(Quarantine::Damaged);
                settled.quarantined.push(address);
            }
            (Some(Quarantine::Damaged), false) => {
                point.quarantine = None;
                settled.released.push(address);
            }
            _ => continue,
        }
        changed.push(point);
    }
    writer.replace_points(&changed)?;
    settled.quarantined.sort_unstable();
    settled.released.sort_unstable();
    Ok(settled)
}

/// A point that may be served or published: any that is not set aside.
///
/// # Errors
/// `NotFound`, saying what to do about it.
pub fn check_offered(point: PointDocument) -> Result<PointDocument> {
    let Some(quarantine) = point.quarantine else { return Ok(point) };
    let address = format!("{}/{}", point.machine, point.point);
    let message = format!(
        "{address} is quarantined ({quarantine}) and not served: restore what it still holds with \
         coldrise restore, publish it with --force, or coldrise release {address}"
    );
    Err(Error::new(ErrorKind::NotFound, message))
}
