//! Tokens for programs: `cr_ID_SECRET`, sent as `Authorization: Bearer`.

use coldrise_block::{Error, ErrorKind, Result};
use rusqlite::{OptionalExtension, Row, params};
use serde::{Deserialize, Serialize};

use super::secret::random_id;
use super::{Identity, Proof, Role, Secret, sha256};
use crate::clock::now_ms;
use crate::database::{Database, SqlResult};
use crate::pattern::{self, Pattern};

/// The use of a token is recorded at most this often, in milliseconds.
const LAST_USE_INTERVAL_MS: i64 = 60_000;
/// Maximum length of a token's name, in characters.
const MAX_NAME_CHARS: usize = 100;

/// A token, without its secret.
#[derive(Clone, Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct Token {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) role: Role,
    machines: Vec<Pattern>,
    created_by: String,
    /// Milliseconds since 1970.
    created_ms: i64,
    expires_ms: Option<i64>,
    last_used_ms: Option<i64>,
}

impl Token {
    /// Whether it has not expired, and `is_same` holds for its role and machines.
    pub(super) fn is_valid(&self, is_same: impl Fn(Role, &[Pattern]) -> bool) -> bool {
        self.expires_ms.is_none_or(|at| at > now_ms()) && is_same(self.role, &self.machines)
    }
}

/// A token to be made.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewToken {
    /// What it is for, in a few words.
    #[schema(min_length = 1, max_length = 100)]
    pub(crate) name: String,
    pub(crate) role: Role,
    /// Patterns of the machines that it sees; all if absent.
    #[schema(min_items = 1, max_items = 256)]
    pub(crate) machines: Option<Vec<Pattern>>,
    /// When it expires, in milliseconds since 1970; never if absent.
    pub(crate) expires_ms: Option<i64>,
}

fn token(row: &Row<'_>) -> SqlResult<Token> {
    let (role, machines): (String, String) = (row.get("role")?, row.get("machines")?);
    Ok(Token {
        id: row.get("id")?,
        name: row.get("name")?,
        role: Role::from_word(&role).ok_or(rusqlite::Error::InvalidQuery)?,
        machines: serde_json::from_str(&machines).map_err(|_| rusqlite::Error::InvalidQuery)?,
        created_by: row.get("created_by")?,
        created_ms: row.get("created_ms")?,
        expires_ms: row.get("expires_ms")?,
        last_used_ms: row.get("last_used_ms")?,
    })
}

impl Database {
    /// All tokens, the newest first.
    pub(crate) fn tokens(&self) -> Result<Vec<Token>> {
        self.read(|sql| {
            let mut found =
                sql.prepare_cached("SELECT * FROM tokens ORDER BY created_ms DESC, id")?;
            let found = found.query_map([], token)?;
            found.collect()
        })
    }

    /// Makes a token. Its text is returned once and stored nowhere.
    ///
    /// # Errors
    /// `InvalidInput`.
    pub(crate) fn add_token(&self, new: &NewToken, created_by: &str) -> Result<(Token, String)> {
        let length = new.name.chars().count();
        if length == 0 || length > MAX_NAME_CHARS || new.name.chars().any(char::is_control) {
            let text = format!("name: give 1 to {MAX_NAME_CHARS} characters");
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        if new.expires_ms.is_some_and(|at| at <= now_ms()) {
            return Err(Error::new(ErrorKind::InvalidInput, "expires_ms is in the past"));
        }
        let machines = new.machines.clone().unwrap_or_else(|| vec![Pattern::all()]);
        pattern::check_list(&machines)?;
        let (id, secret) = (random_id()?, Secret::new()?);
        let added = Token {
            id: id.clone(),
            name: new.name.clone(),
            role: new.role,
            machines,
            created_by: created_by.to_owned(),
            created_ms: now_ms(),
            expires_ms: new.expires_ms,
            last_used_ms: None,
        };
        let patterns = serde_json::to_string(&added.machines)
            .map_err(|error| Error::with_source(ErrorKind::Internal, "patterns", error))?;
        self.change(|sql| {
            sql.execute(
                "INSERT INTO tokens (id, name, secret, role, machines, created_by, created_ms, expires_ms)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
                params![
                    id,
                    added.name,
                    secret.hash(),
                    added.role.word(),
                    patterns,
                    added.created_by,
                    added.created_ms,
                    added.expires_ms
                ],
            )
        })?;
        Ok((added, format!("cr_{id}_{}", secret.text())))
    }

    /// Removes a token. Requests that already run with it end as they are.
    ///
    /// # Errors
    /// `NotFound`.
    pub(crate) fn remove_token(&self, id: &str) -> Result<()> {
        match self.change(|sql| sql.execute("DELETE FROM tokens WHERE id = ?1", [id]))? {
            0 => Err(Error::new(ErrorKind::NotFound, "there is no such token")),
            _ => Ok(()),
        }
    }

    /// The identity that a token's text stands for; `None` if it is wrong, expired or revoked.
    pub(crate) fn token_identity(&self, text: &str, source: &str) -> Result<Option<Identity>> {
        let Some((id, secret)) = text.strip_prefix("cr_").and_then(|rest| rest.split_once('_'))
        else {
            return Ok(None);
        };
        let hash = sha256(&[secret.as_bytes()]);
        // Found by the public id; the hashes are compared in constant time.
        let found = self.read(|sql| {
            sql.query_row("SELECT * FROM tokens WHERE id = ?1", [id], |row| {
                Ok((token(row)?, row.get::<_, Vec<u8>>("secret")?))
            })
            .optional()
        })?;
        let Some((found, stored)) = found else { return Ok(None) };
        let is_right = aws_lc_rs::constant_time::verify_slices_are_equal(&stored, &hash).is_ok();
        if !is_right || found.expires_ms.is_some_and(|at| at <= now_ms()) {
            return Ok(None);
        }
        let now = now_ms();
        if found.last_used_ms.is_none_or(|at| (now - at).abs() > LAST_USE_INTERVAL_MS) {
            // A full disk must not lock its administrator out.
            let _ = self.change(|sql| {
                sql.execute("UPDATE tokens SET last_used_ms = ?2 WHERE id = ?1", params![id, now])
            });
        }
        Ok(Some(Identity {
            name: format!("token:{}", found.id),
            role: found.role,
            machines: found.machines,
            proof: Proof::Token,
            source: source.to_owned(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::{NewToken, Role};
    use crate::database::Database;

    #[test]
    fn a_token_works_until_it_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(folder.path()).unwrap();
        let new =
            NewToken { name: "ci".into(), role: Role::Backup, machines: None, expires_ms: None };
        let (token, text) = database.add_token(&new, "admin").unwrap();
        let found = database.token_identity(&text, "here").unwrap().unwrap();
        assert_eq!((found.role, found.name), (Role::Backup, format!("token:{}", token.id)));
        assert!(database.tokens().unwrap()[0].last_used_ms.is_some());
        for wrong in ["", "cr_", "cr__", &text[..text.len() - 1], &text.replace("cr_", "cr")] {
            assert!(database.token_identity(wrong, "here").unwrap().is_none(), "{wrong}");
        }
        let stored = std::fs::read(folder.path().join("coldrised.db-wal")).unwrap();
        let secret = text.rsplit('_').next().unwrap().as_bytes();
        assert!(!stored.windows(secret.len()).any(|part| part == secret));
        database.remove_token(&token.id).unwrap();
        assert!(database.token_identity(&text, "here").unwrap().is_none());
    }
}
