//! How the repository grew: the space that its folder takes, one sample per day.
//!
//! Points do not tell it afterwards: they share chunks, and those that were pruned took space, too
//! (docs/decisions/0045-growth-is-sampled.md).

use coldrise_block::Result;
use rusqlite::params;
use serde::Serialize;

use crate::clock::now_ms;
use crate::database::Database;
use crate::service::Service;

const HOUR_MS: i64 = 3600 * 1000;
const DAY_MS: i64 = 24 * HOUR_MS;
/// Time between two samples. The last one of a day stays.
const INTERVAL_MS: i64 = 6 * HOUR_MS;
/// Days that are kept of each repository.
const MAX_DAYS: i64 = 400;

/// The size of the repository on one day.
#[derive(Debug, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub(crate) struct GrowthSample {
    /// The time of the sample, in milliseconds since 1970.
    pub(crate) at_ms: i64,
    /// The space that the repository's folder takes on its drive, in bytes.
    pub(crate) occupied_bytes: i64,
}

/// Takes a sample if one is due.
///
/// # Errors
/// Errors of the repository and of the database.
pub(crate) fn sample(service: &Service) -> Result<()> {
    let inventory = service.inventory()?;
    let (id, now) = (inventory.id()?, now_ms());
    if service.database.is_growth_due(&id, now)? {
        let bytes = i64::try_from(inventory.occupied_bytes()?).unwrap_or(i64::MAX);
        service.database.add_growth(&id, now, bytes)?;
    }
    Ok(())
}

impl Database {
    fn is_growth_due(&self, repository: &str, now_ms: i64) -> Result<bool> {
        let last: Option<i64> = self.read(|sql| {
            let found = "SELECT max(at_ms) FROM growth WHERE repository = ?1 AND at_ms <= ?2";
            sql.query_row(found, params![repository, now_ms], |row| row.get(0))
        })?;
        Ok(last.is_none_or(|last| now_ms - last >= INTERVAL_MS))
    }

    fn add_growth(&self, repository: &str, now_ms: i64, occupied_bytes: i64) -> Result<()> {
        self.change(|sql| {
            sql.execute(
                "INSERT INTO growth (repository, day, at_ms, occupied_bytes) VALUES (?1, ?2, ?3, ?4)
                 ON CONFLICT (repository, day) DO UPDATE
                 SET at_ms = excluded.at_ms, occupied_bytes = excluded.occupied_bytes",
                params![repository, now_ms / DAY_MS, now_ms, occupied_bytes],
            )?;
            // By number and not by age: a wrong clock must not cost the past.
            sql.execute(
                "DELETE FROM growth WHERE repository = ?1 AND day NOT IN
                 (SELECT day FROM growth WHERE repository = ?1 ORDER BY day DESC LIMIT ?2)",
                params![repository, MAX_DAYS],
            )
        })?;
        Ok(())
    }

    /// The samples of a repository up to now, the oldest first.
    pub(crate) fn growth(&self, repository: &str, now_ms: i64) -> Result<Vec<GrowthSample>> {
        self.read(|sql| {
            let mut found = sql.prepare_cached(
                "SELECT at_ms, occupied_bytes FROM growth WHERE repository = ?1 AND at_ms <= ?2 ORDER BY day",
            )?;
            let found = found.query_map(params![repository, now_ms], |row| {
                Ok(GrowthSample { at_ms: row.get(0)?, occupied_bytes: row.get(1)? })
            })?;
            found.collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{DAY_MS, Database, HOUR_MS, MAX_DAYS};

    #[test]
    fn the_last_sample_of_each_day_stays() {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(folder.path()).unwrap();
        let add = |at_ms, bytes| database.add_growth("a", at_ms, bytes).unwrap();
        let sizes = |now_ms| -> Vec<i64> {
            let found = database.growth("a", now_ms).unwrap();
            found.iter().map(|sample| sample.occupied_bytes).collect()
        };
        let end = 1000 * DAY_MS;
        assert!(database.is_growth_due("a", end).unwrap());
        add(end, 1);
        assert!(!database.is_growth_due("a", end + 5 * HOUR_MS).unwrap());
        assert!(database.is_growth_due("a", end + 6 * HOUR_MS).unwrap());
        assert!(database.is_growth_due("b", end).unwrap(), "another repository");
        add(end + 6 * HOUR_MS, 2);
        add(end + DAY_MS, 3);
        assert_eq!(sizes(end + DAY_MS), [2, 3]);
        // A clock that is far ahead for a while hides nothing, and is not a part of the past.
        add(9000 * DAY_MS, 4);
        assert_eq!(sizes(end + DAY_MS), [2, 3]);
        assert!(database.is_growth_due("a", end + 2 * DAY_MS).unwrap());
        for day in 0..MAX_DAYS {
            add(end + (2 + day) * DAY_MS, 5);
        }
        assert_eq!(sizes(9000 * DAY_MS).len() as i64, MAX_DAYS);
    }
}
