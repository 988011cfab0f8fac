//! What has a marker and nothing else: it is lost.

use std::collections::HashSet;

use coldrise_block::{ErrorKind, Result};

use crate::verify::CatalogDamage;
use crate::{catalog, MachineName, PointName, Repository};

const MISSING: &str =
    "it is missing: the repository was told to keep it, and has lost its document";

impl CatalogDamage {
    /// A session or point that is lost: its marker is there and nothing else.
    pub fn lost(name: String) -> CatalogDamage {
        CatalogDamage { what: name, reason: MISSING.to_owned() }
    }

    /// The command by which the repository goes on without a point or session that it
    /// has lost; none for what is there and damaged.
    pub fn way_out(&self) -> Option<String> {
        let what = &self.what;
        (self.reason == MISSING).then(|| match what.strip_prefix("live/") {
            Some(session) => format!("coldrise unpublish {session} --discard"),
            None => format!("coldrise forget {what}"),
        })
    }

    /// What is wrong with what, and the way out where there is one.
    pub fn message(&self) -> String {
        let way_out = self.way_out().map(|command| {
            format!("; if no copy of the repository still has it, {command} strikes it off")
        });
        format!("{}: {}{}", self.what, self.reason, way_out.unwrap_or_default())
    }
}

impl Repository {
    /// What has to be there and was not `found`: of the names that [`Repository::marked`]
    /// gave before it was looked for. What went meanwhile is left out.
    pub fn missing<'a>(&self, marked: &'a [String], found: &HashSet<String>) -> Vec<CatalogDamage> {
        let is_missing = |name: &&'a String| !found.contains(*name) && self.is_marked(name);
        marked.iter().filter(is_missing).cloned().map(CatalogDamage::lost).collect()
    }

    /// The points that have to be there and are not in the catalog, of one machine or of
    /// all, the oldest of a machine first. Reads the directory and the catalog's keys, and
    /// opens no marker of what is there: on a slow drive those are thousands of small files.
    ///
    /// # Errors
    /// `Corrupt` where the catalog cannot be read; what the operating system says.
    pub fn lost_points(&self, only: Option<&MachineName>) -> Result<Vec<(MachineName, PointName)>> {
        let mut markers: HashSet<_> = self.marker_paths()?.into_iter().collect();
        // A point is in the catalog before its marker appears.
        self.catch_up()?;
        match catalog::point_names(self) {
            // Where a machine's name does not read, each marker is asked.
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

    /// Whether this point has to be there and is not in the catalog. Looks at no other one.
    ///
    /// # Errors
    /// As of [`Repository::lost_points`].
    pub fn is_lost(&self, machine: &MachineName, point: &PointName) -> Result<bool> {
        if !self.is_marked(&format!("{machine}/{point}")) {
            return Ok(false);
        }
        self.catch_up()?;
        self.is_gone(machine, point)
    }

    /// Of one that was marked. What was forgotten meanwhile has no marker any more.
    fn is_gone(&self, machine: &MachineName, point: &PointName) -> Result<bool> {
        Ok(!self.has_point(machine, point)? && self.is_marked(&format!("{machine}/{point}")))
    }
}

/// The point of a marker's name; `None` for a session.
pub(crate) fn point_of(name: &str) -> Option<(MachineName, PointName)> {
    let (machine, point) = name.split_once('/')?;
    match machine {
        "live" => None,
        machine => Some((MachineName::parse(machine).ok()?, PointName::parse(point).ok()?)),
    }
}
