//! Leases for commands that read: the data stays until the command ends.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use coldrise_block::Result;
use coldrise_store::{PointDocument, Repository};

use crate::locks::lease::{Lease, LeaseHold, Served};
use crate::points::catalog::Catalog;
use crate::points::inventory::Inventory;
use crate::session_folder::document::SessionDocument;

/// While this exists, the chunks and layers of its restore points or sessions stay, even if the
/// points are forgotten or the sessions end meanwhile.
pub struct ReadLease {
    _hold: LeaseHold,
}

impl ReadLease {
    /// Leases a point that was found just now, and updates `point` to its current document.
    /// `program` is shown to people.
    ///
    /// # Errors
    /// `NotFound` if the point was forgotten meanwhile.
    pub fn point(
        repository: &Arc<Repository>,
        program: &str,
        point: &mut PointDocument,
    ) -> Result<ReadLease> {
        loop {
            let held = hold(repository, program, of_point(point).collect())?;
            let now = Catalog::new(repository).confirm(point)?;
            if now.disks == point.disks {
                return Ok(held);
            }
            *point = now;
        }
    }

    /// Leases a session that was found just now.
    ///
    /// # Errors
    /// `NotFound` if the session has ended meanwhile.
    pub fn session(
        repository: &Arc<Repository>,
        program: &str,
        session: &SessionDocument,
    ) -> Result<ReadLease> {
        let held = hold(repository, program, of_session(session).collect())?;
        SessionDocument::of(repository, &session.name)?;
        Ok(held)
    }

    /// Leases everything that exists, and returns the inventory. Parts removed in between are
    /// omitted.
    ///
    /// # Errors
    /// As for [`Inventory::take`].
    pub fn everything(
        repository: &Arc<Repository>,
        program: &str,
        cancel: &AtomicBool,
    ) -> Result<(Inventory, ReadLease)> {
        loop {
            let (inventory, held, is_all) = ReadLease::try_everything(repository, program, cancel)?;
            if is_all {
                return Ok((inventory, held));
            }
        }
    }

    /// The last value is false if a fold moved a disk meanwhile, or a session was sealed.
    fn try_everything(
        repository: &Arc<Repository>,
        program: &str,
        cancel: &AtomicBool,
    ) -> Result<(Inventory, ReadLease, bool)> {
        let first = Inventory::take(repository, cancel)?;
        let points = first.points.iter().flat_map(of_point);
        let served = points.chain(first.sessions.iter().flat_map(of_session)).collect();
        let held = hold(repository, program, served)?;
        let mut now = Inventory::take(repository, cancel)?;
        let name = |point: &PointDocument| (point.machine.clone(), point.point.clone());
        let known: HashMap<_, _> = first.points.iter().map(|p| (name(p), &p.disks)).collect();
        now.points.retain(|point| known.contains_key(&name(point)));
        let is_same = |point: &PointDocument| known.get(&name(point)) == Some(&&point.disks);
        let sealed = |session: &SessionDocument| of_session(session).collect::<Vec<_>>();
        let is_same_session = |session: &SessionDocument| {
            let before = first.sessions.iter().find(|before| before.name == session.name);
            before.is_none_or(|before| sealed(before) == sealed(session))
        };
        let is_all = now.points.iter().all(is_same) && now.sessions.iter().all(is_same_session);
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

fn hold(repository: &Arc<Repository>, program: &str, served: Vec<Served>) -> Result<ReadLease> {
    let hold = Lease::take(repository, program)?.hold_all(served)?;
    Ok(ReadLease { _hold: hold })
}
