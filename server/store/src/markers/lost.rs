//! Lost points and sessions: their marker exists, their content does not.

use std::collections::HashSet;

use coldrise_block::{ErrorKind, Result};

use crate::documents::{CatalogDamage, WayOut};
use crate::{MachineName, PointDocument, PointName, PointOrigin, Repository, SessionName, catalog};

const MISSING: &str = "it is missing: its marker exists, but its document does not";
const IN_MARKER: &str = "it is missing, and its marker still has its document";

impl CatalogDamage {
    /// The command that makes the repository usable again, if the damage determines one.
    pub fn command(&self) -> Option<String> {
        let what = &self.what;
        match (self.way_out, what.strip_prefix("live/")) {
            (WayOut::Unknown, _) => None,
            (WayOut::Repair, _) => Some("coldrise repair".to_owned()),
            (WayOut::GiveUp, Some(session)) => {
                Some(format!("coldrise unpublish {session} --discard"))
            }
            (WayOut::GiveUp, None) => Some(format!("coldrise forget {what}")),
        }
    }

    /// Message and, if any, suggested command.
    pub fn message(&self) -> String {
        let advice = match (self.way_out, self.command()) {
            (WayOut::Repair, Some(command)) => format!("; {command} restores it"),
            (WayOut::GiveUp, Some(command)) => {
                let first = if self.what.starts_with("live/") {
                    "coldrise repair restores the points that were sealed from it; "
                } else {
                    ""
                };
                format!("; {first}if no copy of the repository still has it, {command} removes it")
            }
            _ => String::new(),
        };
        format!("{}: {}{advice}", self.what, self.reason)
    }
}

impl Repository {
    /// The damage of a session or point whose marker exists although it is missing.
    pub fn lost(&self, name: String) -> CatalogDamage {
        let marker = self.read_marker(self.marker_path(&name));
        let (reason, way_out) = match marker.and_then(|marker| marker.point()) {
            Some(_) => (IN_MARKER, WayOut::Repair),
            None => (MISSING, WayOut::GiveUp),
        };
        CatalogDamage { what: name, reason: reason.to_owned(), way_out }
    }

    /// The lost points that were sealed from this session and whose markers still have the
    /// document.
    ///
    /// # Errors
    /// As [`Repository::lost_points`].
    pub fn lost_points_of(&self, session: &SessionName) -> Result<Vec<PointDocument>> {
        let mut found = Vec::new();
        for (machine, point) in self.lost_points(None)? {
            let marker = self.read_marker(self.marker_path(&format!("{machine}/{point}")));
            found.extend(marker.and_then(|marker| marker.point()).filter(|point| {
                matches!(&point.origin, PointOrigin::Synthetic { session: of, .. } if of == session)
            }));
        }
        Ok(found)
    }

    /// The points of this point's time that have a marker with their document, from `number` + 1 up
    /// to the first number without a marker.
    ///
    /// # Errors
    /// `InvalidInput` if there is no name for the next number.
    pub fn marked_after(
        &self,
        machine: &MachineName,
        point: &PointName,
        number: u32,
    ) -> Result<Vec<PointDocument>> {
        let mut found = Vec::new();
        for number in number.saturating_add(1)..u32::MAX {
            let path = self.marker_path(&format!("{machine}/{}", point.synthetic(number)?));
            if !path.exists() {
                break;
            }
            found.extend(self.read_marker(path).and_then(|marker| marker.point()));
        }
        Ok(found)
    }

    /// The damage of names in `marked` that are not `found`. [`Repository::marked`] must have been
    /// called before the search. Names that were removed in the meantime are left out.
    pub fn missing<'a>(&self, marked: &'a [String], found: &HashSet<String>) -> Vec<CatalogDamage> {
        let is_missing = |name: &&'a String| !found.contains(*name) && self.is_marked(name);
        marked.iter().filter(is_missing).cloned().map(|name| self.lost(name)).collect()
    }

    /// The points that have a marker and are missing from the catalog, of one machine or of all,
    /// oldest first within a machine. Reads the directory and the catalog's keys, but opens no
    /// marker of an existing point: those can be thousands of small files on a slow drive.
    ///
    /// # Errors
    /// `Corrupt` if the catalog cannot be read; errors of the operating system.
    pub fn lost_points(&self, only: Option<&MachineName>) -> Result<Vec<(MachineName, PointName)>> {
        let mut markers: HashSet<_> = self.marker_paths()?.into_iter().collect();
        // A point is in the catalog before its marker appears.
        self.catch_up()?;
        match catalog::point_names(self) {
            // Without a readable machine name, each marker is read.
            Err(error) if error.kind() == ErrorKind::Corrupt => {}
            points => {
                for (machine, point) in points? {
                    markers.remove(&self.marker_path(&format!("{machine}/{point}")));
                }
            }
        }
        let mut lost = Vec::new();
        for marker in markers.into_iter().filter_map(|path| self.read_marker(path)) {
            let name = marker.name;
            match point_of(&name) {
                Some((machine, _)) if only.is_some_and(|only| *only != machine) => {}
                Some((machine, point)) if self.is_gone(&machine, &point)? => {
                    lost.push((machine, point));
                }
                _ => {}
            }
        }
        lost.sort_unstable();
        Ok(lost)
    }

    /// Whether this point has a marker and is missing from the catalog. Looks at no other point.
    ///
    /// # Errors
    /// As [`Repository::lost_points`].
    pub fn is_lost(&self, machine: &MachineName, point: &PointName) -> Result<bool> {
        if !self.is_marked(&format!("{machine}/{point}")) {
            return Ok(false);
        }
        self.catch_up()?;
        self.is_gone(machine, point)
    }

    /// Whether a marked point is missing. A point that was forgotten in the meantime has no marker
    /// any more.
    fn is_gone(&self, machine: &MachineName, point: &PointName) -> Result<bool> {
        Ok(!self.has_point(machine, point)? && self.is_marked(&format!("{machine}/{point}")))
    }
}

/// The point that a marker's name stands for; `None` for a session.
pub(crate) fn point_of(name: &str) -> Option<(MachineName, PointName)> {
    let (machine, point) = name.split_once('/')?;
    match machine {
        "live" => None,
        machine => Some((MachineName::parse(machine).ok()?, PointName::parse(point).ok()?)),
    }
}
