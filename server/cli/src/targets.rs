//! The restore points that a user names in commands which change the catalog.

use std::collections::BTreeMap;
use std::sync::Arc;

use coldrise_block::Result;
use coldrise_requests::{Target, parse_point};
use coldrise_session::{Catalog, IncomingPoint};
use coldrise_store::{MachineName, PointDocument, PointName, PointSelector, Repository};

/// The points that a request names.
///
/// # Errors
/// `InvalidInput` for another address.
pub(crate) fn points(addresses: &[String]) -> Result<Vec<Target>> {
    addresses.iter().map(|text| parse_point(text)).collect()
}

/// The named points, each once, by machine and time.
///
/// # Errors
/// `NotFound`; the message names the existing machines or points.
pub(crate) fn find(repository: &Arc<Repository>, targets: &[Target]) -> Result<Vec<PointDocument>> {
    let catalog = Catalog::new(repository);
    let mut found: BTreeMap<(MachineName, PointName), PointDocument> = BTreeMap::new();
    let mut add = |point: PointDocument| {
        found.insert((point.machine.clone(), point.point.clone()), point);
    };
    for target in targets {
        match target {
            Target::Point(machine, selector) => add(catalog.point(machine, selector)?),
            Target::Machine(machine) => {
                // The error lists the existing machines.
                catalog.check_machine(machine)?;
                catalog.points(machine)?.into_iter().for_each(&mut add);
            }
        }
    }
    Ok(found.into_values().collect())
}

/// The same for quarantine and release: `latest` counts points in quarantine, too.
///
/// # Errors
/// `NotFound` as from [`find`].
pub(crate) fn find_or_quarantined(
    repository: &Arc<Repository>,
    targets: &[Target],
) -> Result<Vec<PointDocument>> {
    let catalog = Catalog::new(repository);
    let mut found = BTreeMap::new();
    for target in targets {
        // These commands take single points only.
        let Target::Point(machine, selector) = target else { continue };
        let point = catalog.point_or_quarantined(machine, selector)?;
        found.insert((point.machine.clone(), point.point.clone()), point);
    }
    Ok(found.into_values().collect())
}

/// The addresses of a machine's points in quarantine.
///
/// # Errors
/// `Corrupt` if a document does not authenticate.
pub(crate) fn quarantined(
    repository: &Arc<Repository>,
    machine: &MachineName,
) -> Result<Vec<String>> {
    let mut points = Catalog::new(repository).points(machine)?;
    points.retain(|point| point.quarantine.is_some());
    Ok(addresses(&points))
}

/// Removes from `targets` the points that are still on their way and whose other site is not connected, and returns them. A machine
/// stays if it has restore points.
///
/// # Errors
/// Errors of the drive, and of reading the catalog.
pub(crate) fn take_incoming(
    repository: &Arc<Repository>,
    targets: &mut Vec<Target>,
) -> Result<Vec<IncomingPoint>> {
    let is_lost = |incoming: &IncomingPoint| !incoming.is_reachable(repository);
    let mut lost: Vec<IncomingPoint> =
        IncomingPoint::all(repository)?.into_iter().filter(is_lost).collect();
    let is_named = |incoming: &IncomingPoint, target: &Target| match target {
        Target::Point(machine, PointSelector::Exact(point)) => {
            (machine, point) == (&incoming.partial.machine, &incoming.partial.point)
        }
        Target::Point(..) => false,
        Target::Machine(machine) => *machine == incoming.partial.machine,
    };
    lost.retain(|incoming| targets.iter().any(|target| is_named(incoming, target)));
    let catalog = Catalog::new(repository);
    // A machine can have other points.
    targets.retain(|target| match target {
        Target::Machine(machine) if catalog.check_machine(machine).is_ok() => true,
        _ => !lost.iter().any(|incoming| is_named(incoming, target)),
    });
    Ok(lost)
}

/// Removes lost points from `targets`: their marker exists, but the point does not. Returns
/// their names.
///
/// # Errors
/// `Corrupt` if a document does not authenticate.
pub(crate) fn take_lost(
    repository: &Arc<Repository>,
    targets: &mut Vec<Target>,
) -> Result<Vec<(MachineName, PointName)>> {
    let catalog = Catalog::new(repository);
    let (mut lost, mut kept) = (Vec::new(), Vec::new());
    for target in targets.drain(..) {
        match target {
            Target::Point(machine, PointSelector::Exact(point))
                if catalog.is_lost(&machine, &point)? =>
            {
                lost.push((machine, point));
            }
            target => kept.push(target),
        }
    }
    *targets = kept;
    Ok(lost)
}

/// The addresses of points.
pub(crate) fn addresses(points: &[PointDocument]) -> Vec<String> {
    points.iter().map(|point| format!("{}/{}", point.machine, point.point)).collect()
}

/// The names of points, for the store.
pub(crate) fn names(points: &[PointDocument]) -> Vec<(MachineName, PointName)> {
    points.iter().map(|point| (point.machine.clone(), point.point.clone())).collect()
}
