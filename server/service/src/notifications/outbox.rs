//! The outbox: which message goes to which target, and when.

use coldrise_block::Result;
use rusqlite::{Connection, OptionalExtension, Transaction, params};

use super::message::Message;
use super::targets;
use crate::database::{Database, SqlResult};

/// A message that a target did not take for this long is dropped, in milliseconds,
const MAX_AGE_MS: i64 = 24 * 3600 * 1000;
/// after at least this many attempts, which take two hours: the clock may have been set, or the service
/// was down.
const MIN_ATTEMPTS: u32 = 8;
/// No pause is as long, in milliseconds: a message that is due later waits since before the clock was set back.
const MAX_PAUSE_MS: i64 = 2 * 3600 * 1000;
/// Maximum number of messages that one attempt takes.
const MAX_BATCH: usize = 100;

/// A message that waits for a target.
#[derive(Debug)]
pub(super) struct QueuedMessage {
    pub(super) number: i64,
    pub(super) message: Message,
}

/// Puts messages into the outbox, for each target that wants them. Returns whether there are any.
pub(super) fn post(sql: &Transaction<'_>, messages: &[Message], now_ms: i64) -> SqlResult<bool> {
    if messages.is_empty() {
        return Ok(false);
    }
    let targets = targets::all(sql)?;
    let mut is_any = false;
    for message in messages {
        let mut wanting = targets.iter().filter(|target| target.settings.wants(message)).peekable();
        if wanting.peek().is_none() {
            continue;
        }
        let text = serde_json::to_string(message).map_err(|_| rusqlite::Error::InvalidQuery)?;
        sql.prepare_cached("INSERT INTO messages (message, at_ms) VALUES (?1, ?2)")?
            .execute(params![text, now_ms])?;
        let number = sql.last_insert_rowid();
        for target in wanting {
            sql.prepare_cached(
                "INSERT INTO outbox (target, message, next_ms) VALUES (?1, ?2, ?3)",
            )?
            .execute(params![target.id, number, now_ms])?;
            is_any = true;
        }
    }
    Ok(is_any)
}

/// The targets that have something due, and when the next one is.
pub(super) fn due(sql: &Connection, now_ms: i64) -> SqlResult<(Vec<String>, Option<i64>)> {
    let mut found = sql.prepare_cached(
        "SELECT DISTINCT target FROM outbox WHERE next_ms NOT BETWEEN ?1 + 1 AND ?2 ORDER BY target",
    )?;
    let due = found
        .query_map([now_ms, now_ms + MAX_PAUSE_MS], |row| row.get(0))?
        .collect::<SqlResult<_>>()?;
    let next =
        sql.query_row("SELECT min(next_ms) FROM outbox WHERE next_ms > ?1", [now_ms], |row| {
            row.get(0)
        })?;
    Ok((due, next))
}

/// The messages that a target gets now: those with the fewest attempts first, so that one that it
/// refuses does not hold up others.
pub(super) fn batch(sql: &Connection, target: &str, now_ms: i64) -> SqlResult<Vec<QueuedMessage>> {
    let mut found = sql.prepare_cached(
        "SELECT number, messages.message FROM outbox JOIN messages ON number = outbox.message
         WHERE target = ?1 AND next_ms NOT BETWEEN ?2 + 1 AND ?3
         ORDER BY attempts, number LIMIT ?4",
    )?;
    let end_ms = now_ms + MAX_PAUSE_MS;
    let found = found.query_map(params![target, now_ms, end_ms, MAX_BATCH], |row| {
        let text: String = row.get(1)?;
        let message = serde_json::from_str(&text).map_err(|_| rusqlite::Error::InvalidQuery)?;
        Ok(QueuedMessage { number: row.get(0)?, message })
    })?;
    found.collect()
}

/// An attempt begins. Messages that [`hurry`] makes due from now on stay due if this attempt fails: it may be one
/// with the old settings.
pub(super) fn begin(sql: &Connection, target: &str) -> SqlResult<()> {
    sql.prepare_cached("UPDATE outbox SET next_ms = 1 WHERE target = ?1 AND next_ms = 0")?
        .execute([target])?;
    Ok(())
}

/// Records that a target took messages.
pub(super) fn sent(
    sql: &Transaction<'_>,
    target: &str,
    numbers: &[i64],
    now_ms: i64,
) -> SqlResult<()> {
    for number in numbers {
        remove(sql, target, *number)?;
    }
    targets::note(sql, target, now_ms, true, "sent")
}

/// Records that an attempt failed. The next one is after a pause that grows; a message that has waited for a
/// day is dropped. `random` is any number.
pub(super) fn failed(
    sql: &Transaction<'_>,
    target: &str,
    numbers: &[i64],
    error: &str,
    now_ms: i64,
    random: u32,
) -> SqlResult<()> {
    let mut pause_ms = 0;
    let mut given_up = 0;
    for number in numbers {
        let found = sql
            .prepare_cached(
                "SELECT attempts, at_ms FROM outbox JOIN messages ON number = outbox.message
                 WHERE target = ?1 AND number = ?2",
            )?
            .query_row(params![target, number], |row| {
                Ok((row.get::<_, u32>(0)?, row.get::<_, i64>(1)?))
            })
            .optional()?;
        let Some((attempts, at_ms)) = found else { continue };
        if now_ms - at_ms >= MAX_AGE_MS && attempts + 1 >= MIN_ATTEMPTS {
            remove(sql, target, *number)?;
            given_up += 1;
            continue;
        }
        let pause = coldrise_schedule::back_off(attempts + 1, random);
        pause_ms = pause_ms.max(i64::try_from(pause.as_millis()).unwrap_or(i64::MAX));
        sql.prepare_cached(
            "UPDATE outbox SET attempts = attempts + 1, next_ms = iif(next_ms = 0, 0, ?3)
             WHERE target = ?1 AND message = ?2",
        )?
        .execute(params![target, number, now_ms + pause_ms])?;
    }
    // The others wait as well: the target is not well. Those of an equal number of attempts come first.
    sql.execute(
        "UPDATE outbox SET next_ms = max(next_ms, ?2) WHERE target = ?1 AND next_ms != 0",
        params![target, now_ms + pause_ms],
    )?;
    let text = match given_up {
        0 => error.to_owned(),
        _ => format!("{error} ({given_up} messages were dropped after a day)"),
    };
    sql.execute(
        "UPDATE targets SET given_up = given_up + ?2 WHERE id = ?1",
        params![target, given_up],
    )?;
    targets::note(sql, target, now_ms, false, &text)
}

fn remove(sql: &Transaction<'_>, target: &str, number: i64) -> SqlResult<()> {
    sql.prepare_cached("DELETE FROM outbox WHERE target = ?1 AND message = ?2")?
        .execute(params![target, number])?;
    sql.prepare_cached(
        "DELETE FROM messages WHERE number = ?1
         AND NOT EXISTS (SELECT 1 FROM outbox WHERE message = ?1)",
    )?
    .execute([number])?;
    Ok(())
}

/// Makes everything that waits due now, of one target or of all: its settings changed, or the service
/// started, or the clock jumped.
pub(super) fn hurry(sql: &Connection, target: Option<&str>) -> SqlResult<()> {
    sql.execute("UPDATE outbox SET next_ms = 0 WHERE ?1 IS NULL OR target = ?1", [target])?;
    // Left by a target that was removed.
    sql.execute(
        "DELETE FROM messages WHERE NOT EXISTS (SELECT 1 FROM outbox WHERE message = number)",
        [],
    )?;
    Ok(())
}

/// Drops everything that waits for a target.
pub(super) fn drop_all(sql: &Connection, target: &str) -> SqlResult<()> {
    sql.execute("DELETE FROM outbox WHERE target = ?1", [target])?;
    hurry(sql, Some(target))
}

impl Database {
    /// As [`hurry`].
    pub(crate) fn hurry_outbox(&self, target: Option<&str>) -> Result<()> {
        self.change(|sql| hurry(sql, target))
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_AGE_MS, batch, begin, due, failed, hurry, post, sent};
    use crate::database::Database;
    use crate::notifications::condition::{Condition, Severity, Topic};
    use crate::notifications::message::{Message, Occasion};

    const MINUTE_MS: i64 = 60_000;

    fn with_target(folder: &std::path::Path) -> (Database, String) {
        let database = Database::open(folder).unwrap();
        let settings = serde_json::json!({"name": "a", "way": {
            "type": "webhook", "url": "https://a.example/", "template": "generic"}});
        let target = database.add_target(&serde_json::from_value(settings).unwrap()).unwrap();
        (database, target.id)
    }

    fn message(number: i64) -> Message {
        let key = format!("k{number}");
        let condition = Condition::new(key, Topic::Age, Severity::Fail, "old");
        Message::new(&condition, Occasion::Raised, number, "https://h/").unwrap()
    }

    #[test]
    fn pauses_grow_and_a_day_ends_the_attempts() {
        let folder = tempfile::tempdir().unwrap();
        let (database, target) = with_target(folder.path());
        let begin_ms = 10 * MINUTE_MS;
        database.change(|sql| post(sql, &[message(0)], begin_ms)).unwrap();
        let (mut now, mut pauses) = (begin_ms, Vec::new());
        loop {
            let waiting = database.read(|sql| batch(sql, &target, now)).unwrap();
            let numbers: Vec<i64> = waiting.iter().map(|waiting| waiting.number).collect();
            assert_eq!(numbers.len(), 1);
            database.change(|sql| failed(sql, &target, &numbers, "no", now, 0)).unwrap();
            let (found, next) = database.read(|sql| due(sql, now)).unwrap();
            assert!(found.is_empty(), "it waits");
            let Some(next) = next else { break };
            pauses.push((next - now) / MINUTE_MS);
            now = next;
        }
        assert_eq!(pauses[..8], [1, 2, 4, 8, 16, 32, 60, 60]);
        let waited = now - begin_ms;
        assert!((MAX_AGE_MS..MAX_AGE_MS + 61 * MINUTE_MS).contains(&waited), "{waited}");
        let shown = serde_json::to_value(&database.targets().unwrap()[0]).unwrap();
        assert_eq!((&shown["given_up"], &shown["waiting"]), (&1.into(), &0.into()));
        assert!(shown["last_result"]["text"].as_str().unwrap().contains("dropped after a day"));
        let left: i64 = database
            .read(|sql| sql.query_row("SELECT count(*) FROM messages", [], |row| row.get(0)))
            .unwrap();
        assert_eq!(left, 0);
    }

    #[test]
    fn a_clock_that_is_set_forwards_drops_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (database, target) = with_target(folder.path());
        database.change(|sql| post(sql, &[message(1)], 0)).unwrap();
        let later = 10 * MAX_AGE_MS;
        database.change(|sql| failed(sql, &target, &[1], "no", later, 0)).unwrap();
        let waiting = database.read(|sql| batch(sql, &target, later + MINUTE_MS)).unwrap();
        assert_eq!(waiting.len(), 1, "one attempt is not enough");
    }

    #[test]
    fn a_refused_message_comes_after_new_ones_and_the_target_rests() {
        let folder = tempfile::tempdir().unwrap();
        let (database, target) = with_target(folder.path());
        let now = 10 * MINUTE_MS;
        let later = now + MINUTE_MS;
        database.change(|sql| post(sql, &[message(1), message(2)], now)).unwrap();
        database.change(|sql| failed(sql, &target, &[1], "no", now, 0)).unwrap();
        assert!(database.read(|sql| batch(sql, &target, now)).unwrap().is_empty());
        let order = database.read(|sql| batch(sql, &target, later)).unwrap();
        assert_eq!(order.iter().map(|waiting| waiting.number).collect::<Vec<_>>(), [2, 1]);
        database.change(|sql| sent(sql, &target, &[1, 2], later)).unwrap();
        assert_eq!(database.read(|sql| due(sql, later)).unwrap(), (vec![], None));
    }

    #[test]
    fn a_change_during_an_attempt_is_tried_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let (database, target) = with_target(folder.path());
        let now = 10 * MINUTE_MS;
        let attempt = |is_changed: bool| {
            database.change(|sql| begin(sql, &target)).unwrap();
            if is_changed {
                database.change(|sql| hurry(sql, Some(&target))).unwrap();
            }
            database.change(|sql| failed(sql, &target, &[1], "no", now, 0)).unwrap();
            database.read(|sql| batch(sql, &target, now)).unwrap().len()
        };
        database.change(|sql| post(sql, &[message(1), message(2)], now)).unwrap();
        assert_eq!(attempt(true), 2, "the failed one had the old settings");
        assert_eq!(attempt(false), 0);
    }

    #[test]
    fn a_clock_that_was_set_back_delays_no_message() {
        let folder = tempfile::tempdir().unwrap();
        let (database, target) = with_target(folder.path());
        let later = 24 * 60 * MINUTE_MS;
        database.change(|sql| post(sql, &[message(1)], later)).unwrap();
        assert_eq!(database.read(|sql| due(sql, 0)).unwrap().0, [target]);
    }
}
