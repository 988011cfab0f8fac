//! Logins: sessions of browsers, known by a cookie. They are kept on the server and can be revoked.

use coldrise_block::{Error, ErrorKind, Result};
use rusqlite::{OptionalExtension, params};
use serde::Serialize;

use super::secret::random_id;
use super::{Identity, Proof, Role, Secret, sha256};
use crate::clock::now_ms;
use crate::database::Database;
use crate::pattern::Pattern;

/// A login ends after this time, in milliseconds,
const MAX_AGE_MS: i64 = 12 * 3600 * 1000;
/// and after this time without use.
const MAX_IDLE_MS: i64 = 3600 * 1000;
/// A use is recorded at most this often, in milliseconds.
const LAST_USE_INTERVAL_MS: i64 = 60_000;

/// A login, as its user sees it.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct Login {
    pub(crate) id: String,
    user: String,
    /// The address that it was made from.
    source: String,
    /// Milliseconds since 1970.
    created_ms: i64,
    last_used_ms: i64,
}

impl Database {
    /// Makes a login and returns the cookie's secret. Removes expired ones.
    pub(crate) fn add_login(&self, user: &str, source: &str) -> Result<Secret> {
        let (secret, id, now) = (Secret::new()?, random_id()?, now_ms());
        self.change(|sql| {
            sql.execute(
                "DELETE FROM logins WHERE created_ms < ?1 OR last_used_ms < ?2 OR created_ms > ?3",
                params![now - MAX_AGE_MS, now - MAX_IDLE_MS, now + MAX_AGE_MS],
            )?;
            sql.execute(
                "INSERT INTO logins (secret, id, user, source, created_ms, last_used_ms)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?5)",
                params![secret.hash(), id, user, source, now],
            )?;
            sql.execute("UPDATE users SET last_login_ms = ?2 WHERE name = ?1", params![user, now])
        })?;
        Ok(secret)
    }

    /// The identity of a cookie; `None` if its login has ended.
    pub(crate) fn login_identity(&self, cookie: &str, source: &str) -> Result<Option<Identity>> {
        let (hash, now) = (sha256(&[cookie.as_bytes()]), now_ms());
        let found = self.read(|sql| {
            sql.query_row(
                "SELECT id, user, role, logins.created_ms, last_used_ms FROM logins
                 JOIN users ON users.name = logins.user WHERE secret = ?1",
                [hash],
                |row| {
                    Ok((
                        row.get::<_, String>(0)?,
                        row.get::<_, String>(1)?,
                        row.get::<_, String>(2)?,
                        row.get::<_, i64>(3)?,
                        row.get::<_, i64>(4)?,
                    ))
                },
            )
            .optional()
        })?;
        let Some((id, user, role, created_ms, last_used_ms)) = found else { return Ok(None) };
        let Some(role) = Role::from_word(&role) else { return Ok(None) };
        // A clock that jumped back must not prolong a login.
        let is_over =
            (now - created_ms).abs() > MAX_AGE_MS || (now - last_used_ms).abs() > MAX_IDLE_MS;
        if is_over {
            return Ok(None);
        }
        if now - last_used_ms > LAST_USE_INTERVAL_MS {
            let _ = self.change(|sql| {
                sql.execute("UPDATE logins SET last_used_ms = ?2 WHERE id = ?1", params![id, now])
            });
        }
        Ok(Some(Identity {
            name: user,
            role,
            machines: vec![Pattern::all()],
            proof: Proof::Login(id),
            source: source.to_owned(),
        }))
    }

    /// The role of a login's user; `None` if the login has ended.
    pub(super) fn login_role(&self, id: &str) -> Result<Option<Role>> {
        let word = self.read(|sql| {
            sql.query_row(
                "SELECT role FROM logins JOIN users ON users.name = logins.user
                 WHERE id = ?1 AND abs(?2 - logins.created_ms) <= ?3",
                params![id, now_ms(), MAX_AGE_MS],
                |row| row.get::<_, String>(0),
            )
            .optional()
        })?;
        Ok(word.and_then(|word| Role::from_word(&word)))
    }

    /// The logins of a user, or of all.
    pub(crate) fn logins(&self, user: Option<&str>) -> Result<Vec<Login>> {
        self.read(|sql| {
            let mut found = sql.prepare_cached(
                "SELECT id, user, source, created_ms, last_used_ms FROM logins
                 WHERE ?1 IS NULL OR user = ?1 ORDER BY last_used_ms DESC",
            )?;
            let found = found.query_map([user], |row| {
                Ok(Login {
                    id: row.get(0)?,
                    user: row.get(1)?,
                    source: row.get(2)?,
                    created_ms: row.get(3)?,
                    last_used_ms: row.get(4)?,
                })
            })?;
            found.collect()
        })
    }

    /// Ends a login, of this user if one is given.
    ///
    /// # Errors
    /// `NotFound`.
    pub(crate) fn remove_login(&self, id: &str, user: Option<&str>) -> Result<()> {
        let removed = self.change(|sql| {
            sql.execute(
                "DELETE FROM logins WHERE id = ?1 AND (?2 IS NULL OR user = ?2)",
                params![id, user],
            )
        })?;
        match removed {
            0 => Err(Error::new(ErrorKind::NotFound, "there is no such login")),
            _ => Ok(()),
        }
    }
}
