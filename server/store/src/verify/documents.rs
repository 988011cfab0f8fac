//! Reads the catalog past damage.

use coldrise_block::{Error, ErrorKind, Result};

use crate::catalog::{self, CatalogEntry};
use crate::documents::CatalogDamage;
use crate::state::StoreState;
use crate::{PointDocument, Repository, markers};

impl Repository {
    /// Reads every document of the catalog and the store's counters. Returns the readable points
    /// and the damage. Keys show a damaged point's time, and its machine's name if the machine's
    /// own document is readable.
    ///
    /// If the catalog cannot be walked, points are looked up by the names of their markers.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn verify_catalog(&self) -> Result<(Vec<PointDocument>, Vec<CatalogDamage>)> {
        let marked = self.marked()?;
        self.catch_up()?;
        let (mut points, mut damaged) = (Vec::new(), Vec::new());
        if let Err(error) = StoreState::read(self) {
            let what = "the store's counters".to_owned();
            damaged.push(CatalogDamage::new(what, reason(error)?));
        }
        let walked = catalog::for_each_entry(self, |what, entry| {
            match entry {
                Ok(CatalogEntry::Machine | CatalogEntry::Files) => {}
                Ok(CatalogEntry::Point(point)) => points.push(*point),
                Err(error) => damaged.push(CatalogDamage::new(what, reason(error)?)),
            }
            Ok(())
        });
        if let Err(error) = walked {
            damaged.push(CatalogDamage::new("the catalog".to_owned(), reason(error)?));
            self.look_up(&marked, &mut points, &mut damaged)?;
        }
        Ok((points, damaged))
    }
}

impl Repository {
    /// Reads points one by one if the catalog cannot be walked.
    fn look_up(
        &self,
        marked: &[String],
        points: &mut Vec<PointDocument>,
        damaged: &mut Vec<CatalogDamage>,
    ) -> Result<()> {
        for (machine, point) in marked.iter().filter_map(|name| markers::point_of(name)) {
            if points.iter().any(|known| known.machine == machine && known.point == point) {
                continue;
            }
            match self.point(&machine, &point) {
                Ok(document) => points.push(document),
                // The point is still in a session's document, or was removed; a check of all points
                // decides.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => {
                    damaged.push(CatalogDamage::new(format!("{machine}/{point}"), reason(error)?));
                }
            }
        }
        Ok(())
    }
}

/// Returns the reason of damage; any other error ends the verify.
fn reason(error: Error) -> Result<String> {
    match error.kind() {
        ErrorKind::Corrupt => Ok(error.full_message()),
        _ => Err(error),
    }
}
