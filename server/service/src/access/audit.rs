//! The audit log: who changed what, from where, with what result.
//!
//! Each entry has a hash over the entry before and its own fields, so a changed or removed entry
//! breaks the chain from there on. The newest entries can still be cut off; a copy in the journal (each entry is
//! also a log line) shows that. Numbers of entries have no gaps.

use coldrise_block::Result;
use coldrise_block::hex;
use parking_lot::Mutex;
use rusqlite::{Connection, OptionalExtension, params};
use serde::Serialize;

use super::sha256;
use crate::clock::now_ms;
use crate::database::{Database, SqlResult};

/// Maximum length of a text in an entry, in characters.
const MAX_CHARS: usize = 500;

/// One entry.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct AuditEntry {
    /// From 1, without gaps.
    number: i64,
    /// Milliseconds since 1970.
    at_ms: i64,
    /// `admin`, `token:ID`, `unix:root`, "nobody" before a login, or `coldrised`.
    who: String,
    source: String,
    /// What was asked, such as `POST /api/v1/users`.
    action: String,
    subject: String,
    /// `ok`, or the error.
    result: String,
    /// SHA-256 over the hash of the entry before and the fields of this one, in hexadecimal.
    hash: String,
}

/// The state of the chain.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct AuditChain {
    /// Number of entries.
    entries: i64,
    /// The first entry that does not fit its hash or its number.
    broken_at: Option<i64>,
    /// The hash of the last entry. Kept elsewhere, it shows later that no entry was removed.
    last_hash: String,
}

/// An entry to be made.
#[derive(Debug)]
pub(crate) struct AuditNote<'a> {
    pub(crate) who: &'a str,
    pub(crate) source: &'a str,
    pub(crate) action: &'a str,
    pub(crate) subject: &'a str,
    pub(crate) result: &'a str,
}

fn hash(before: &[u8], number: i64, at_ms: i64, texts: &[&str; 5]) -> [u8; 32] {
    let (number, at_ms) = (number.to_be_bytes(), at_ms.to_be_bytes());
    let mut parts: Vec<&[u8]> = vec![before, &number, &at_ms];
    parts.extend(texts.iter().map(|text| text.as_bytes()));
    sha256(&parts)
}

fn last(sql: &Connection) -> SqlResult<(i64, Vec<u8>)> {
    let found =
        sql.query_row("SELECT number, hash FROM audit ORDER BY number DESC LIMIT 1", [], |row| {
            Ok((row.get(0)?, row.get(1)?))
        });
    Ok(found.optional()?.unwrap_or((0, vec![0; 32])))
}

/// Entries of changes that are done, but could not be stored: who, source, action, subject, result.
static UNRECORDED: Mutex<Vec<[String; 5]>> = Mutex::new(Vec::new());
/// Maximum number of them: requests that were under way at once.
const MAX_UNRECORDED: usize = 1000;

impl Database {
    /// Adds the entry of a change that is done. If it cannot be stored, it is kept in memory for
    /// [`Database::audit_unrecorded`].
    ///
    /// # Errors
    /// As [`Database::audit`].
    pub(crate) fn audit_done(&self, note: &AuditNote<'_>) -> Result<()> {
        self.audit(note).inspect_err(|_| {
            let texts = [note.who, note.source, note.action, note.subject, note.result];
            let mut unrecorded = UNRECORDED.lock();
            if unrecorded.len() < MAX_UNRECORDED {
                unrecorded.push(texts.map(str::to_owned));
            }
        })
    }

    /// Stores the entries that could not be stored before. Call this before each change: without its entry
    /// none is made.
    ///
    /// # Errors
    /// As [`Database::audit`]; entries that are not stored yet stay in memory.
    pub(crate) fn audit_unrecorded(&self) -> Result<()> {
        let mut unrecorded = UNRECORDED.lock();
        while let Some([who, source, action, subject, result]) = unrecorded.first() {
            self.audit(&AuditNote { who, source, action, subject, result })?;
            unrecorded.remove(0);
        }
        Ok(())
    }

    /// Adds an entry, to the database and to the service's log.
    ///
    /// # Errors
    /// Errors of the database. The log line is written in any case.
    pub(crate) fn audit(&self, note: &AuditNote<'_>) -> Result<()> {
        let short = |text: &str| -> String {
            let text = text.chars().take(MAX_CHARS);
            text.map(|c| if c.is_control() { ' ' } else { c }).collect()
        };
        let texts = [note.who, note.source, note.action, note.subject, note.result].map(short);
        let [who, source, action, subject, result] = &texts;
        let at_ms = now_ms();
        let added = self.change(|sql| {
            let (number, before) = last(sql)?;
            let number = number + 1;
            let hash = hash(&before, number, at_ms, &[who, source, action, subject, result]);
            sql.execute(
                "INSERT INTO audit (number, at_ms, who, source, action, subject, result, hash)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
                params![number, at_ms, who, source, action, subject, result, hash],
            )?;
            Ok((number, hash))
        });
        let (number, chain) = match &added {
            Ok((number, hash)) => (*number, hex::encode(&hash[..8])),
            Err(_) => (0, String::new()),
        };
        tracing::info!(number, who, source, action, subject, result, chain, "audit");
        added.map(|_| ())
    }

    /// Entries before `before` (of all if absent), the newest first, at most `count`.
    pub(crate) fn audit_entries(&self, before: Option<i64>, count: u32) -> Result<Vec<AuditEntry>> {
        self.read(|sql| {
            let mut found = sql.prepare_cached(
                "SELECT number, at_ms, who, source, action, subject, result, hash FROM audit
                 WHERE number < ?1 ORDER BY number DESC LIMIT ?2",
            )?;
            let found = found.query_map(params![before.unwrap_or(i64::MAX), count], |row| {
                Ok(AuditEntry {
                    number: row.get(0)?,
                    at_ms: row.get(1)?,
                    who: row.get(2)?,
                    source: row.get(3)?,
                    action: row.get(4)?,
                    subject: row.get(5)?,
                    result: row.get(6)?,
                    hash: hex::encode(&row.get::<_, Vec<u8>>(7)?),
                })
            })?;
            found.collect()
        })
    }

    /// Checks all entries.
    pub(crate) fn audit_chain(&self) -> Result<AuditChain> {
        self.read(|sql| {
            let mut found = sql.prepare(
                "SELECT number, at_ms, who, source, action, subject, result, hash FROM audit
                 ORDER BY number",
            )?;
            let mut rows = found.query([])?;
            let mut chain = AuditChain { entries: 0, broken_at: None, last_hash: String::new() };
            let mut before = vec![0; 32];
            while let Some(row) = rows.next()? {
                chain.entries += 1;
                let mut texts: Vec<String> = Vec::with_capacity(5);
                for column in 2..7 {
                    texts.push(row.get(column)?);
                }
                let texts: [&str; 5] = std::array::from_fn(|i| texts[i].as_str());
                let (number, at_ms, stored): (i64, i64, Vec<u8>) =
                    (row.get(0)?, row.get(1)?, row.get(7)?);
                let is_right = number == chain.entries
                    && hash(&before, number, at_ms, &texts).as_slice() == stored;
                if !is_right && chain.broken_at.is_none() {
                    chain.broken_at = Some(number);
                }
                before = stored;
            }
            chain.last_hash = hex::encode(&before);
            Ok(chain)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::AuditNote;
    use crate::database::Database;

    #[test]
    fn a_changed_or_removed_entry_breaks_the_chain() {
        for damage in [
            "UPDATE audit SET result = 'ok' WHERE number = 2",
            "DELETE FROM audit WHERE number = 2",
            "UPDATE audit SET at_ms = at_ms + 1 WHERE number = 2",
            "DELETE FROM audit WHERE number = 1",
        ] {
            let folder = tempfile::tempdir().unwrap();
            let database = Database::open(folder.path()).unwrap();
            for result in ["ok", "busy", "ok", "ok"] {
                let note = AuditNote {
                    who: "admin",
                    source: "192.0.2.1",
                    action: "DELETE /x",
                    subject: "web01",
                    result,
                };
                database.audit(&note).unwrap();
            }
            let whole = database.audit_chain().unwrap();
            assert_eq!((whole.entries, whole.broken_at), (4, None));
            database.change(|sql| sql.execute(damage, [])).unwrap();
            assert!(database.audit_chain().unwrap().broken_at.is_some(), "{damage}");
        }
    }
}
