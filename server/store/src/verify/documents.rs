//! The catalog, read past what is damaged in it.

use coldrise_block::{Error, ErrorKind, Result};

use crate::catalog::{self, CatalogEntry};
use crate::state::StoreState;
use crate::{markers, PointDocument, Repository};

/// A damaged document of the catalog, or of the store itself.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct CatalogDamage {
    /// What it is, as far as it can be told: `web01/20261120T100000Z`.
    pub what: String,
    /// What is wrong with it.
    pub reason: String,
}

impl Repository {
    /// Reads every document of the catalog and the store's counters. Returns the
    /// points that are readable, and what is damaged. Keys tell a damaged point's
    /// time, and its machine's name where the machine's own document is readable.
    ///
    /// Where the catalog cannot be walked, points are looked up by the names that markers
    /// have.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn verify_catalog(&self) -> Result<(Vec<PointDocument>, Vec<CatalogDamage>)> {
        let marked = self.marked()?;
        self.catch_up()?;
        let (mut points, mut damaged) = (Vec::new(), Vec::new());
        if let Err(error) = StoreState::read(self) {
            let what = "the store's counters".to_owned();
            damaged.push(CatalogDamage { what, reason: reason(error)? });
        }
        let walked = catalog::for_each_entry(self, |what, entry| {
            match entry {
                Ok(CatalogEntry::Machine | CatalogEntry::Files) => {}
                Ok(CatalogEntry::Point(point)) => points.push(*point),
                Err(error) => damaged.push(CatalogDamage { what, reason: reason(error)? }),
            }
            Ok(())
        });
        if let Err(error) = walked {
            damaged.push(CatalogDamage { what: "the catalog".to_owned(), reason: reason(error)? });
            self.look_up(&marked, &mut points, &mut damaged)?;
        }
        Ok((points, damaged))
    }
}

impl Repository {
    /// Asks for points one by one where the catalog cannot be walked.
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
                // It is a session's still, or gone: who asks for all tells which.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => damaged.push(CatalogDamage {
                    what: format!("{machine}/{point}"),
                    reason: reason(error)?,
                }),
            }
        }
        Ok(())
    }
}

/// Damage is told; anything else ends the verify.
fn reason(error: Error) -> Result<String> {
    match error.kind() {
        ErrorKind::Corrupt => Ok(error.full_message()),
        _ => Err(error),
    }
}
