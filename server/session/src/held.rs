//! What a command reads is held: a lease keeps it until the command ends.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::Arc;

use coldrise_block::Result;
use coldrise_store::{PointDocument, Repository};

use crate::catalog::Catalog;
use crate::document::SessionDocument;
use crate::lease::{Lease, LeaseHold, Served};
use crate::verify::Inventory;

/// Restore points or sessions whose chunks and layers stay for as long as this
/// lives, also when they are forgotten or ended meanwhile.
pub struct Held {
    _hold: LeaseHold,
}

impl Held {
    /// Holds a point that was found just now, and makes `point` what it is then.
    /// `program` is told to people.
    ///
    /// # Errors
    /// `NotFound` where it was forgotten meanwhile.
    pub fn point(
        repository: &Arc<Repository>,
        program: &str,
        point: &mut PointDocument,
    ) -> Result<Held> {
        loop {
            let held = hold(repository, program, of_point(point).collect())?;
            let now = Catalog::new(repository).confirm(point)?;
            if now.disks == point.disks {
                return Ok(held);
            }
            *point = now;
        }
    }

    /// Holds a session that was found just now.
    ///
    /// # Errors
    /// `NotFound` where it has ended meanwhile.
    pub fn session(
        repository: &Arc<Repository>,
        program: &str,
        session: &SessionDocument,
    ) -> Result<Held> {
        let held = hold(repository, program, of_session(session).collect())?;
        SessionDocument::of(repository, &session.name)?;
        Ok(held)
    }

    /// Holds everything that is there, and returns it. What goes in the moment
    /// between is left out.
    ///
    /// # Errors
    /// As of [`Inventory::take`].
    pub fn everything(
        repository: &Arc<Repository>,
        program: &str,
        cancel: &AtomicBool,
    ) -> Result<(Inventory, Held)> {
        loop {
            let (inventory, held, is_all) = Held::try_everything(repository, program, cancel)?;
            if is_all {
                return Ok((inventory, held));
            }
        }
    }

    /// False where a fold has moved something meanwhile.
    fn try_everything(
        repository: &Arc<Repository>,
        program: &str,
        cancel: &AtomicBool,
    ) -> Result<(Inventory, Held, bool)> {
        let first = Inventory::take(repository, cancel)?;
        let points = first.points.iter().flat_map(of_point);
        let served = points.chain(first.sessions.iter().flat_map(of_session)).collect();
        let held = hold(repository, program, served)?;
        let mut now = Inventory::take(repository, cancel)?;
        let name = |point: &PointDocument| (point.machine.clone(), point.point.clone());
        let known: HashMap<_, _> = first.points.iter().map(|p| (name(p), &p.disks)).collect();
        now.points.retain(|point| known.contains_key(&name(point)));
        let is_same = |point: &PointDocument| known.get(&name(point)) == Some(&&point.disks);
        let is_all = now.points.iter().all(is_same);
        now.sessions.retain(|session| first.sessions.iter().any(|s| s.name == session.name));
        Ok((now, held, is_all))
    }
}

fn of_point(point: &PointDocument) -> impl Iterator<Item = Served> + '_ {
    point.disks.iter().map(|disk| Served {
        name: format!("{}/{}/{}", point.machine, point.point, disk.name),
        disk: Some(disk.clone()),
    })
}

fn of_session(session: &SessionDocument) -> impl Iterator<Item = Served> + '_ {
    session.disks.iter().map(|disk| Served {
        name: format!("live/{}/{}", session.name, disk.name),
        disk: Some(disk.sealed()),
    })
}

fn hold(repository: &Arc<Repository>, program: &str, served: Vec<Served>) -> Result<Held> {
    let hold = Lease::take(repository, program)?.hold_all(served)?;
    Ok(Held { _hold: hold })
}
