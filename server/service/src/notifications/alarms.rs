//! Alarms: conditions that hold, or held.

use std::collections::{HashMap, HashSet};

use coldrise_block::{Error, ErrorKind, Result};
use rusqlite::{Connection, Row, Transaction, params};
use serde::Serialize;

use super::condition::{Condition, Severity};
use super::message::Occasion;
use crate::access::Identity;
use crate::clock::now_ms;
use crate::database::{Database, SqlResult};
use crate::service::Service;

/// An alarm that still holds and is not acknowledged is sent again after this time, in milliseconds.
const REMINDER_MS: i64 = 24 * 3600 * 1000;
/// Cleared alarms are kept this long, in milliseconds.
const HISTORY_MS: i64 = 90 * 24 * 3600 * 1000;

/// An alarm.
#[derive(Clone, Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct Alarm {
    #[serde(flatten)]
    pub(crate) condition: Condition,
    /// Since when it holds or held, in milliseconds since 1970.
    pub(crate) raised_ms: i64,
    /// When it ceased to hold; absent while it holds.
    pub(crate) cleared_ms: Option<i64>,
    pub(crate) acknowledged_ms: Option<i64>,
    pub(crate) acknowledged_by: Option<String>,
    #[serde(skip)]
    messaged_ms: i64,
}

impl Alarm {
    /// One that is in memory only.
    pub(super) fn unstored(condition: Condition, raised_ms: i64) -> Alarm {
        Alarm {
            condition,
            raised_ms,
            cleared_ms: None,
            acknowledged_ms: None,
            acknowledged_by: None,
            messaged_ms: raised_ms,
        }
    }

    /// Whether it holds.
    pub(crate) fn is_active(&self) -> bool {
        self.cleared_ms.is_none()
    }

    /// Whether a caller sees it: one without a machine concerns all machines.
    pub(crate) fn is_seen_by(&self, caller: &Identity) -> bool {
        match &self.condition.machine {
            Some(machine) => caller.sees(machine),
            None => caller.sees_all(),
        }
    }
}

/// The change of an alarm.
pub(super) struct AlarmChange {
    pub(super) condition: Condition,
    pub(super) occasion: Occasion,
}

fn alarm(row: &Row<'_>) -> SqlResult<Alarm> {
    let condition: String = row.get("condition")?;
    Ok(Alarm {
        condition: serde_json::from_str(&condition).map_err(|_| rusqlite::Error::InvalidQuery)?,
        raised_ms: row.get("raised_ms")?,
        cleared_ms: row.get("cleared_ms")?,
        acknowledged_ms: row.get("acknowledged_ms")?,
        acknowledged_by: row.get("acknowledged_by")?,
        messaged_ms: row.get("messaged_ms")?,
    })
}

fn read_all(sql: &Connection) -> SqlResult<Vec<Alarm>> {
    let mut found = sql.prepare_cached("SELECT * FROM alarms ORDER BY raised_ms DESC, key")?;
    let found = found.query_map([], alarm)?;
    found.collect()
}

/// Raises, updates and clears alarms so that they are what `conditions` say. Alarms for which
/// `is_unknown` is true stay as they are: their source could not be read. Returns the changes to send.
pub(super) fn update(
    sql: &Transaction<'_>,
    conditions: &[Condition],
    is_unknown: &dyn Fn(&Condition) -> bool,
    now_ms: i64,
) -> SqlResult<Vec<AlarmChange>> {
    let mut active: HashMap<String, Alarm> = HashMap::new();
    for alarm in read_all(sql)? {
        if alarm.is_active() {
            active.insert(alarm.condition.key.clone(), alarm);
        }
    }
    let mut changes = Vec::new();
    let mut seen = HashSet::new();
    for condition in conditions {
        if !seen.insert(&condition.key) {
            continue;
        }
        let occasion = match active.remove(&condition.key) {
            None => Some(Occasion::Raised),
            Some(alarm) if condition.severity > alarm.condition.severity => Some(Occasion::Raised),
            // A clock that was set back must not silence reminders.
            Some(alarm)
                if alarm.acknowledged_ms.is_none()
                    && (now_ms - alarm.messaged_ms).abs() >= REMINDER_MS =>
            {
                Some(Occasion::Reminder)
            }
            Some(alarm) if alarm.condition == *condition => continue,
            Some(_) => None,
        };
        store(sql, condition, occasion, now_ms)?;
        changes.extend(
            occasion.map(|occasion| AlarmChange { condition: condition.clone(), occasion }),
        );
    }
    for alarm in active.into_values().filter(|alarm| !is_unknown(&alarm.condition)) {
        sql.prepare_cached("UPDATE alarms SET cleared_ms = ?2 WHERE key = ?1")?
            .execute(params![alarm.condition.key, now_ms])?;
        changes.push(AlarmChange { condition: alarm.condition, occasion: Occasion::Cleared });
    }
    sql.execute("DELETE FROM alarms WHERE cleared_ms < ?1", [now_ms - HISTORY_MS])?;
    Ok(changes)
}

/// Stores a condition that holds. With `Raised` the alarm begins, or becomes worse: then it is
/// unacknowledged.
fn store(
    sql: &Transaction<'_>,
    condition: &Condition,
    occasion: Option<Occasion>,
    now_ms: i64,
) -> SqlResult<()> {
    let text = serde_json::to_string(condition).map_err(|_| rusqlite::Error::InvalidQuery)?;
    let mut insert = sql.prepare_cached(
        "INSERT INTO alarms (key, severity, machine, condition, raised_ms, messaged_ms)
         VALUES (?1, ?2, ?3, ?4, ?5, ?5)
         ON CONFLICT (key) DO UPDATE SET
             severity = excluded.severity, machine = excluded.machine, condition = excluded.condition,
             raised_ms = iif(cleared_ms IS NULL, raised_ms, excluded.raised_ms),
             messaged_ms = iif(?6, excluded.messaged_ms, messaged_ms),
             acknowledged_ms = iif(?7, NULL, acknowledged_ms),
             acknowledged_by = iif(?7, NULL, acknowledged_by),
             cleared_ms = NULL",
    )?;
    insert.execute(params![
        condition.key,
        condition.severity.word(),
        condition.machine,
        text,
        now_ms,
        occasion.is_some(),
        occasion == Some(Occasion::Raised)
    ])?;
    Ok(())
}

/// The severity of an alarm that holds.
pub(super) fn held(sql: &Connection, key: &str) -> SqlResult<Option<Severity>> {
    let active = read_all(sql)?.into_iter().filter(Alarm::is_active);
    Ok(active
        .filter(|alarm| alarm.condition.key == key)
        .map(|alarm| alarm.condition.severity)
        .next())
}

/// Number of alarms that hold: warnings, failures.
pub(super) fn counts(sql: &Connection) -> SqlResult<(usize, usize)> {
    let active: Vec<_> = read_all(sql)?.into_iter().filter(Alarm::is_active).collect();
    let count = |severity| active.iter().filter(|a| a.condition.severity == severity).count();
    Ok((count(Severity::Warn), count(Severity::Fail)))
}

impl Database {
    /// All alarms, the newest first; also those that were cleared in the last 90 days.
    pub(crate) fn alarms(&self) -> Result<Vec<Alarm>> {
        self.read(read_all)
    }

    /// Acknowledges an alarm that holds: it is not sent again.
    ///
    /// # Errors
    /// `NotFound`.
    pub(crate) fn acknowledge(&self, key: &str, who: &str) -> Result<Alarm> {
        self.change(|sql| {
            sql.execute(
                "UPDATE alarms SET acknowledged_ms = ?2, acknowledged_by = ?3
                 WHERE key = ?1 AND cleared_ms IS NULL",
                params![key, now_ms(), who],
            )
        })?;
        let found = self.alarms()?.into_iter();
        let mut found = found.filter(|alarm| alarm.condition.key == key && alarm.is_active());
        found.next().ok_or_else(|| no_alarm(key))
    }
}

/// All alarms, the newest first, with the one that the database has no room for.
///
/// # Errors
/// Errors of the database.
pub(crate) fn all_alarms(service: &Service) -> Result<Vec<Alarm>> {
    let mut found = service.database.alarms()?;
    if let Some(unstored) = service.messenger.unstored.lock().clone() {
        found.retain(|alarm| alarm.condition.key != unstored.condition.key);
        found.insert(0, unstored);
    }
    Ok(found)
}

/// The answer for an alarm that does not hold, or that the caller may not see.
pub(crate) fn no_alarm(key: &str) -> Error {
    let shown: String = key.chars().take(100).collect();
    Error::new(ErrorKind::NotFound, format!("there is no active alarm {shown}"))
}

#[cfg(test)]
mod tests {
    use super::{Condition, Occasion, REMINDER_MS, Severity, update};
    use crate::database::Database;
    use crate::notifications::condition::Topic;

    fn updated(
        database: &Database,
        conditions: &[Condition],
        unknown: &[Topic],
        now_ms: i64,
    ) -> Vec<(String, Occasion)> {
        let is_unknown = |condition: &Condition| unknown.contains(&condition.topic);
        let changes = database.change(|sql| update(sql, conditions, &is_unknown, now_ms)).unwrap();
        changes.into_iter().map(|change| (change.condition.key, change.occasion)).collect()
    }

    #[test]
    fn an_alarm_is_sent_once_and_again_when_it_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(folder.path()).unwrap();
        let age = |severity| Condition::new("age:a", Topic::Age, severity, "old");
        let (warn, fail) = ([age(Severity::Warn)], [age(Severity::Fail)]);
        let sent = |occasion| vec![("age:a".to_owned(), occasion)];
        assert_eq!(updated(&database, &warn, &[], 10), sent(Occasion::Raised));
        assert!(updated(&database, &warn, &[], 20).is_empty());
        drop(database);
        let database = Database::open(folder.path()).unwrap();
        assert!(updated(&database, &warn, &[], 30).is_empty(), "a restart repeats nothing");
        assert_eq!(updated(&database, &fail, &[], 40), sent(Occasion::Raised), "it became worse");
        assert!(updated(&database, &warn, &[], 50).is_empty());
        assert_eq!(database.alarms().unwrap()[0].raised_ms, 10);
        assert!(updated(&database, &[], &[Topic::Age], 60).is_empty(), "its source is away");
        assert!(database.alarms().unwrap()[0].is_active());
        let twice = [warn[0].clone(), warn[0].clone()];
        assert!(updated(&database, &twice, &[], 65).is_empty());
        assert_eq!(updated(&database, &[], &[], 70), sent(Occasion::Cleared));
        assert_eq!(updated(&database, &warn, &[], 80), sent(Occasion::Raised));
        assert_eq!(database.alarms().unwrap()[0].raised_ms, 80);
    }

    #[test]
    fn a_reminder_comes_daily_until_somebody_acknowledges() {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(folder.path()).unwrap();
        let age = [Condition::new("age:a", Topic::Age, Severity::Warn, "old")];
        updated(&database, &age, &[], 0);
        assert!(updated(&database, &age, &[], REMINDER_MS - 1).is_empty());
        assert_eq!(updated(&database, &age, &[], REMINDER_MS)[0].1, Occasion::Reminder);
        assert!(updated(&database, &age, &[], REMINDER_MS + 1).is_empty());
        database.acknowledge("age:a", "admin").unwrap();
        assert!(updated(&database, &age, &[], 9 * REMINDER_MS).is_empty());
        updated(&database, &[], &[], 9 * REMINDER_MS + 1);
        assert!(database.acknowledge("age:a", "admin").is_err(), "it does not hold");
        updated(&database, &age, &[], 9 * REMINDER_MS + 2);
        assert!(database.alarms().unwrap()[0].acknowledged_by.is_none());
    }
}
