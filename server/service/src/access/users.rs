//! Users: a name, a role, a password.

use coldrise_block::{Error, ErrorKind, Result};
use rusqlite::{OptionalExtension, Row, params};
use serde::Serialize;

use super::{Role, password};
use crate::clock::now_ms;
use crate::database::{Database, SqlResult};

/// A user, without the password.
#[derive(Clone, Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) role: Role,
    /// Milliseconds since 1970.
    created_ms: i64,
    last_login_ms: Option<i64>,
}

/// Checks a user's name: 1 to 64 characters of `[a-z0-9._@-]`.
///
/// # Errors
/// `InvalidInput`.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let is_allowed = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || b"._@-".contains(&c);
    if name.is_empty() || name.len() > 64 || !name.bytes().all(is_allowed) {
        let shown: String = name.chars().take(64).collect();
        let text = format!("{shown:?} is not a user name: give 1 to 64 of a-z, 0-9, and . _ @ -");
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    Ok(())
}

fn user(row: &Row<'_>) -> SqlResult<User> {
    let word: String = row.get("role")?;
    let role = Role::from_word(&word).ok_or(rusqlite::Error::InvalidQuery)?;
    Ok(User {
        name: row.get("name")?,
        role,
        created_ms: row.get("created_ms")?,
        last_login_ms: row.get("last_login_ms")?,
    })
}

impl Database {
    /// All users, by name.
    pub(crate) fn users(&self) -> Result<Vec<User>> {
        self.read(|sql| {
            let mut found = sql.prepare_cached("SELECT * FROM users ORDER BY name")?;
            let found = found.query_map([], user)?;
            found.collect()
        })
    }

    /// Whether there is an administrator who can log in.
    pub(crate) fn has_admin(&self) -> Result<bool> {
        self.read(|sql| {
            sql.query_row("SELECT EXISTS (SELECT 1 FROM users WHERE role = 'admin')", [], |row| {
                row.get(0)
            })
        })
    }

    /// Adds a user.
    ///
    /// # Errors
    /// `InvalidInput` for a bad name or password; `AlreadyExists`.
    pub(crate) fn add_user(&self, name: &str, role: Role, password: &str) -> Result<User> {
        check_name(name)?;
        let hashed = password::hash(password)?;
        let added = self.change(|sql| {
            sql.execute(
                "INSERT INTO users (name, role, password, created_ms) VALUES (?1, ?2, ?3, ?4)
                 ON CONFLICT DO NOTHING",
                params![name, role.word(), hashed, now_ms()],
            )
        })?;
        if added == 0 {
            let text = format!("there is a user {name} already");
            return Err(Error::new(ErrorKind::AlreadyExists, text));
        }
        self.user(name)
    }

    /// One user.
    ///
    /// # Errors
    /// `NotFound`.
    pub(crate) fn user(&self, name: &str) -> Result<User> {
        let found = self.read(|sql| {
            sql.query_row("SELECT * FROM users WHERE name = ?1", [name], user).optional()
        })?;
        found.ok_or_else(|| no_user(name))
    }

    /// Changes role or password. A new password ends all logins of the user.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if no administrator would remain.
    pub(crate) fn change_user(
        &self,
        name: &str,
        role: Option<Role>,
        password: Option<&str>,
    ) -> Result<User> {
        let hashed = password.map(password::hash).transpose()?;
        self.user(name)?;
        let is_changed = self.change(|sql| {
            if role.is_some_and(|role| role != Role::Admin) && is_last_admin(sql, name)? {
                return Ok(false);
            }
            if let Some(role) = role {
                sql.execute(
                    "UPDATE users SET role = ?2 WHERE name = ?1",
                    params![name, role.word()],
                )?;
            }
            if let Some(hashed) = &hashed {
                sql.execute(
                    "UPDATE users SET password = ?2 WHERE name = ?1",
                    params![name, hashed],
                )?;
                sql.execute("DELETE FROM logins WHERE user = ?1", [name])?;
            }
            Ok(true)
        })?;
        if is_changed { self.user(name) } else { Err(last_admin(name)) }
    }

    /// Removes a user, with all logins.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if no administrator would remain.
    pub(crate) fn remove_user(&self, name: &str) -> Result<()> {
        self.user(name)?;
        self.change(|sql| {
            if is_last_admin(sql, name)? {
                return Ok(false);
            }
            sql.execute("DELETE FROM users WHERE name = ?1", [name])?;
            Ok(true)
        })?
        .then_some(())
        .ok_or_else(|| last_admin(name))
    }

    /// Whether the password is the user's. Takes as long for an unknown user.
    pub(crate) fn is_password(&self, name: &str, password: &str) -> Result<bool> {
        let stored: Option<String> = self.read(|sql| {
            sql.query_row("SELECT password FROM users WHERE name = ?1", [name], |row| row.get(0))
                .optional()
        })?;
        Ok(password::is_right(password, stored.as_deref()))
    }
}

/// Whether this user is the only administrator.
fn is_last_admin(sql: &rusqlite::Connection, name: &str) -> SqlResult<bool> {
    sql.query_row(
        "SELECT NOT EXISTS (SELECT 1 FROM users WHERE role = 'admin' AND name <> ?1)",
        [name],
        |row| row.get(0),
    )
}

fn last_admin(name: &str) -> Error {
    Error::new(ErrorKind::Busy, format!("{name} is the last administrator"))
        .advise("make another user an administrator first")
}

fn no_user(name: &str) -> Error {
    let shown: String = name.chars().take(64).collect();
    Error::new(ErrorKind::NotFound, format!("there is no user {shown}"))
}

#[cfg(test)]
mod tests {
    use super::Role;
    use crate::database::Database;
    use coldrise_block::ErrorKind;

    #[test]
    fn the_last_administrator_stays() {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(folder.path()).unwrap();
        database.add_user("first", Role::Admin, "correct horse").unwrap();
        database.add_user("second", Role::Viewer, "battery staple").unwrap();
        assert_eq!(database.remove_user("first").unwrap_err().kind(), ErrorKind::Busy);
        let demoted = database.change_user("first", Some(Role::Viewer), None);
        assert_eq!(demoted.unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(database.user("first").unwrap().role, Role::Admin);
        database.change_user("second", Some(Role::Admin), None).unwrap();
        database.remove_user("first").unwrap();
        let again = database.add_user("second", Role::Admin, "battery staple");
        assert_eq!(again.unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert!(database.is_password("second", "battery staple").unwrap());
        database.change_user("second", None, Some("another one!")).unwrap();
        assert!(!database.is_password("second", "battery staple").unwrap());
    }
}
