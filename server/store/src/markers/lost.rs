//! What has a marker and nothing else: it is lost.

use std::collections::HashSet;

use coldrise_block::Result;

use crate::verify::CatalogDamage;
use crate::{MachineName, PointName, Repository};

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
    /// all, the oldest of a machine first. Opens every marker, and no point's document.
    ///
    /// # Errors
    /// `Corrupt` where the catalog cannot be read; what the operating system says.
    pub fn lost_points(&self, only: Option<&MachineName>) -> Result<Vec<(MachineName, PointName)>> {
        let marked = self.marked()?;
        let points = marked.iter().filter_map(|name| point_of(name));
        self.lost_of(points.filter(|(machine, _)| only.is_none_or(|only| only == machine)))
    }

    /// Whether this point has to be there and is not in the catalog. Looks at no other one.
    ///
    /// # Errors
    /// As of [`Repository::lost_points`].
    pub fn is_lost(&self, machine: &MachineName, point: &PointName) -> Result<bool> {
        let is_marked = self.is_marked(&format!("{machine}/{point}"));
        let marked = is_marked.then(|| (machine.clone(), point.clone()));
        Ok(!self.lost_of(marked.into_iter())?.is_empty())
    }

    /// Of these, which were marked, those that are not in the catalog.
    fn lost_of(
        &self,
        marked: impl Iterator<Item = (MachineName, PointName)>,
    ) -> Result<Vec<(MachineName, PointName)>> {
        // A point is in the catalog before its marker appears.
        self.catch_up()?;
        let mut lost = Vec::new();
        for (machine, point) in marked {
            // What was forgotten meanwhile has no marker any more.
            if !self.has_point(&machine, &point)? && self.is_marked(&format!("{machine}/{point}")) {
                lost.push((machine, point));
            }
        }
        lost.sort_unstable();
        Ok(lost)
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
