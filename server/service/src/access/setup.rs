//! The first administrator: made with a one-time link, not with a default password.

use std::net::SocketAddr;
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};
use rusqlite::{OptionalExtension, params};

use super::{Secret, sha256};
use crate::arguments::Options;
use crate::clock::now_ms;
use crate::database::Database;
use crate::folders::make_state_folder;

/// The name of the setting that holds the hash of the link's secret and its time.
const SETTING: &str = "setup_link";
/// The name of the setting that holds the address of the last start.
pub(crate) const LISTEN: &str = "listen";
const LIFETIME: Duration = Duration::from_secs(24 * 3600);

impl Database {
    /// Makes a link's secret, which replaces earlier ones.
    pub(crate) fn new_setup_secret(&self) -> Result<Secret> {
        let secret = Secret::new()?;
        let value = format!("{} {}", now_ms(), coldrise_block::hex::encode(&secret.hash()));
        self.change(|sql| {
            sql.execute(
                "INSERT INTO settings (name, value) VALUES (?1, ?2)
                 ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                params![SETTING, value],
            )
        })?;
        Ok(secret)
    }

    /// Takes the link's secret: it works once. Returns whether it was right and in time.
    pub(crate) fn take_setup_secret(&self, secret: &str) -> Result<bool> {
        let given = coldrise_block::hex::encode(&sha256(&[secret.as_bytes()]));
        self.change(|sql| {
            let stored: Option<String> = sql
                .query_row("SELECT value FROM settings WHERE name = ?1", [SETTING], |row| {
                    row.get(0)
                })
                .optional()?;
            let Some((at_ms, hash)) = stored.as_deref().and_then(|value| value.split_once(' '))
            else {
                return Ok(false);
            };
            let age_ms = now_ms() - at_ms.parse::<i64>().unwrap_or(0);
            let is_in_time = (0..=LIFETIME.as_millis() as i64).contains(&age_ms);
            let is_right = aws_lc_rs::constant_time::verify_slices_are_equal(
                hash.as_bytes(),
                given.as_bytes(),
            )
            .is_ok();
            if is_right && is_in_time {
                sql.execute("DELETE FROM settings WHERE name = ?1", [SETTING])?;
            }
            Ok(is_right && is_in_time)
        })
    }
}

/// Prints a new link: `coldrised setup-link`.
///
/// # Errors
/// `AlreadyExists` if there is an administrator and `is_forced` is not given.
pub(crate) fn print_link(options: &Options, is_forced: bool) -> Result<()> {
    make_state_folder(&options.state)?;
    let database = Database::open(&options.state)?;
    if !is_forced && database.has_admin()? {
        return Err(Error::new(ErrorKind::AlreadyExists, "there is an administrator already")
            .advise("after a lost password: coldrised setup-link --force"));
    }
    let secret = database.new_setup_secret()?;
    // The address of the service's last start: this command may have other options.
    let listen = database.setting(LISTEN)?.and_then(|text| text.parse().ok());
    println!("{}", link(listen.unwrap_or(options.listen), &secret));
    if let Some(fingerprint) = crate::listener::fingerprint(options) {
        println!("certificate SHA-256: {fingerprint}");
    }
    std::io::Write::flush(&mut std::io::stdout()).context(|| "printing the link")
}

/// The link for a browser.
pub(crate) fn link(listen: SocketAddr, secret: &Secret) -> String {
    let listen = match listen.ip().is_unspecified() {
        true => format!("localhost:{}", listen.port()),
        false => listen.to_string(),
    };
    format!("https://{listen}/#/setup/{}", secret.text())
}

#[cfg(test)]
mod tests {
    use crate::database::Database;

    #[test]
    fn a_link_works_once_and_only_the_newest() {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(folder.path()).unwrap();
        let old = database.new_setup_secret().unwrap();
        let new = database.new_setup_secret().unwrap();
        assert!(!database.take_setup_secret(old.text()).unwrap());
        assert!(!database.take_setup_secret("").unwrap());
        assert!(database.take_setup_secret(new.text()).unwrap());
        assert!(!database.take_setup_secret(new.text()).unwrap());
    }
}
