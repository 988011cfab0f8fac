//! Restore points as commands that change the catalog are told of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_session::Catalog;
use coldrise_store::{
    Address, CatalogDamage, MachineName, PointDocument, PointName, PointSelector, Repository,
};

use crate::invocation::Invocation;

/// What was named: a point, or all points of a machine.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    Point(MachineName, PointSelector),
    Machine(MachineName),
}

/// Reads `MACHINE/POINT` or `MACHINE`.
///
/// # Errors
/// `InvalidInput`, saying what is allowed.
pub(crate) fn parse_target(text: &str) -> Result<Target> {
    if !text.contains('/') {
        return MachineName::parse(text).map(Target::Machine);
    }
    parse_point(text)
}

/// Reads `MACHINE/POINT`.
///
/// # Errors
/// `InvalidInput`, saying what is allowed.
pub(crate) fn parse_point(text: &str) -> Result<Target> {
    match Address::parse(text)? {
        Address::Point { machine, selector, disk: None } => Ok(Target::Point(machine, selector)),
        Address::Point { .. } | Address::Live { .. } => Err(Error::new(
            ErrorKind::InvalidInput,
            format!("{text}: only whole restore points are meant: give MACHINE/POINT"),
        )),
    }
}

/// The points that are meant, each once, by machine and time.
///
/// # Errors
/// `NotFound`, naming the machines or points that are there.
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
                // Says which machines there are where this one is not.
                catalog.check_machine(machine)?;
                catalog.points(machine)?.into_iter().for_each(&mut add);
            }
        }
    }
    Ok(found.into_values().collect())
}

/// The points that are to be released: `latest` counts those in quarantine, too.
///
/// # Errors
/// `NotFound` as of [`find`], and where `latest` is not in quarantine, naming those that are.
pub(crate) fn find_quarantined(
    repository: &Arc<Repository>,
    targets: &[Target],
) -> Result<Vec<PointDocument>> {
    let catalog = Catalog::new(repository);
    let mut found = BTreeMap::new();
    for target in targets {
        // Release takes single points only.
        let Target::Point(machine, selector) = target else { continue };
        let point = catalog.point_or_quarantined(machine, selector)?;
        if point.quarantine.is_none() && matches!(selector, PointSelector::Latest(_)) {
            let mut quarantined = catalog.points(machine)?;
            quarantined.retain(|point| point.quarantine.is_some());
            let there = match quarantined.len() {
                0 => "no point of the machine is".to_owned(),
                _ => format!("in quarantine: {}", addresses(&quarantined).join(", ")),
            };
            return Err(Error::new(
                ErrorKind::NotFound,
                format!("{machine}/{} ({selector}) is not in quarantine; {there}", point.point),
            ));
        }
        found.insert((point.machine.clone(), point.point.clone()), point);
    }
    Ok(found.into_values().collect())
}

/// Takes points out of `targets` that are lost: a marker says that they have to be there,
/// and they are not. Returns their names.
///
/// # Errors
/// `Corrupt` where a document does not authenticate.
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

/// Says which newer points of the machine are lost or dated in the future where the latest
/// was asked for: the user should know what else there is. Goes on where that cannot be
/// told: a point that is sound can be used all the same.
pub(crate) fn tell_newer(
    invocation: &Invocation,
    catalog: &Catalog,
    selector: &PointSelector,
    point: &PointDocument,
) {
    let PointSelector::Latest(_) = selector else { return };
    if let Ok(Some(warning)) = catalog.future_warning(&point.machine) {
        invocation.remark(&format!("warning: {warning}"));
    }
    let lost = match catalog.lost_points(Some(&point.machine)) {
        Ok(lost) => lost,
        Err(error) => {
            let why = error.full_message();
            invocation.remark(&format!("whether a newer point is lost cannot be told: {why}"));
            return;
        }
    };
    for (machine, name) in lost.into_iter().filter(|(_, name)| *name > point.point) {
        let lost = CatalogDamage::lost(format!("{machine}/{name}")).message();
        invocation.remark(&format!("{} is older than what is lost: {lost}", point.point));
    }
}

/// How points are addressed.
pub(crate) fn addresses(points: &[PointDocument]) -> Vec<String> {
    points.iter().map(|point| format!("{}/{}", point.machine, point.point)).collect()
}

/// The same, for the store.
pub(crate) fn names(points: &[PointDocument]) -> Vec<(MachineName, PointName)> {
    points.iter().map(|point| (point.machine.clone(), point.point.clone())).collect()
}
