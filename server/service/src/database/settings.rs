//! Settings: texts by name.

use coldrise_block::Result;
use rusqlite::{OptionalExtension, params};

use super::Database;

impl Database {
    /// The value of a setting, if it was set.
    pub(crate) fn setting(&self, name: &str) -> Result<Option<String>> {
        self.read(|sql| {
            let found = "SELECT value FROM settings WHERE name = ?1";
            sql.query_row(found, [name], |row| row.get(0)).optional()
        })
    }

    /// Sets a setting.
    pub(crate) fn set_setting(&self, name: &str, value: &str) -> Result<()> {
        self.change(|sql| {
            sql.execute(
                "INSERT INTO settings (name, value) VALUES (?1, ?2)
                 ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                params![name, value],
            )
        })?;
        Ok(())
    }
}
