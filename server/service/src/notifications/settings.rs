//! Settings of the messages, and the table of all settings.

use coldrise_block::{Error, ErrorKind, Result};
use rusqlite::{Connection, OptionalExtension, params};
use serde::{Deserialize, Serialize};

use crate::arguments::Options;
use crate::database::{Database, SqlResult};

/// The name of the setting.
const PUBLIC_URL: &str = "public_url";

/// Settings of the messages.
#[derive(Debug, Deserialize, Serialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct MessageSettings {
    /// The address of the service for links in messages, such as `https://backup.example:8480`. Without it,
    /// links have the name of the host and the port.
    #[schema(max_length = 500)]
    pub(crate) public_url: Option<String>,
}

/// Reads a setting.
pub(super) fn get(sql: &Connection, name: &str) -> SqlResult<Option<String>> {
    sql.query_row("SELECT value FROM settings WHERE name = ?1", [name], |row| row.get(0)).optional()
}

/// Writes or removes a setting.
pub(super) fn set(sql: &Connection, name: &str, value: Option<&str>) -> SqlResult<()> {
    match value {
        Some(value) => sql.execute(
            "INSERT INTO settings (name, value) VALUES (?1, ?2)
             ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            params![name, value],
        ),
        None => sql.execute("DELETE FROM settings WHERE name = ?1", [name]),
    }
    .map(|_| ())
}

/// The address of the service's page for links, with a slash at its end.
pub(super) fn link_base(sql: &Connection, options: &Options) -> SqlResult<String> {
    if let Some(url) = get(sql, PUBLIC_URL)? {
        return Ok(format!("{}/", url.trim_end_matches('/')));
    }
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = if host.trim().is_empty() { "localhost" } else { host.trim() };
    Ok(format!("https://{host}:{}/", options.listen.port()))
}

impl Database {
    /// The settings of the messages.
    pub(crate) fn message_settings(&self) -> Result<MessageSettings> {
        Ok(MessageSettings { public_url: self.read(|sql| get(sql, PUBLIC_URL))? })
    }

    /// Changes the settings of the messages.
    ///
    /// # Errors
    /// `InvalidInput`.
    pub(crate) fn set_message_settings(&self, new: &MessageSettings) -> Result<()> {
        let is_good = |url: &str| {
            let is_web = url.starts_with("https://") || url.starts_with("http://");
            is_web && url.len() <= 500 && url.bytes().all(|c| c.is_ascii_graphic())
        };
        if new.public_url.as_deref().is_some_and(|url| !is_good(url)) {
            let text = "public_url: give an address such as https://backup.example:8480";
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        self.change(|sql| set(sql, PUBLIC_URL, new.public_url.as_deref()))
    }
}
