//! Servers in the database, and their passwords in files.

use std::os::unix::fs::DirBuilderExt;

use coldrise_block::{Context, Error, ErrorKind, Result, remove_if_present, replace_file};
use parking_lot::Mutex;
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde::Serialize;

use super::login_test::{Found, TestResult};
use super::{HypervisorSettings, check_unused, secrets_folder};
use crate::access::random_id;
use crate::arguments::Options;
use crate::database::{Database, SqlResult};
use crate::invalid::invalid;
use crate::service::Service;

/// Maximum number of servers.
const MAX_HYPERVISORS: i64 = 100;

/// Changes touch a row and a file: one at a time.
static CHANGES: Mutex<()> = Mutex::new(());

/// A server, without its password.
#[derive(Clone, Serialize, utoipa::ToSchema)]
pub(crate) struct Hypervisor {
    /// As in `--to vcenter:NAME`.
    pub(crate) name: String,
    #[serde(flatten)]
    pub(crate) settings: HypervisorSettings,
    /// The service keeps its password.
    has_password: bool,
    /// Since its last change; `null` before the first.
    last_test: Option<TestResult>,
    /// The findings of the last successful test since its last change.
    found: Option<Found>,
    /// The name of the file with the password.
    #[serde(skip)]
    pub(super) secret: Option<String>,
}

fn hypervisor(row: &Row<'_>) -> SqlResult<Hypervisor> {
    let settings: String = row.get("settings")?;
    let (at_ms, text): (Option<i64>, Option<String>) = (row.get("tested_ms")?, row.get("result")?);
    let (is_ok, secret): (bool, Option<String>) = (row.get("is_ok")?, row.get("secret")?);
    let found: Option<String> = row.get("found")?;
    Ok(Hypervisor {
        name: row.get("name")?,
        settings: serde_json::from_str(&settings).map_err(|_| rusqlite::Error::InvalidQuery)?,
        has_password: secret.is_some(),
        last_test: at_ms.zip(text).map(|(at_ms, text)| TestResult { at_ms, is_ok, text }),
        // A value of an earlier version counts as before the first test.
        found: found.and_then(|found| serde_json::from_str(&found).ok()),
        secret,
    })
}

fn one(sql: &Connection, name: &str) -> SqlResult<Option<Hypervisor>> {
    sql.query_row("SELECT * FROM hypervisors WHERE name = ?1", [name], hypervisor).optional()
}

impl Database {
    /// All servers, by name.
    pub(crate) fn hypervisors(&self) -> Result<Vec<Hypervisor>> {
        self.read(|sql| {
            let mut found = sql.prepare_cached("SELECT * FROM hypervisors ORDER BY name")?;
            let found = found.query_map([], hypervisor)?;
            found.collect()
        })
    }

    /// One server.
    ///
    /// # Errors
    /// `NotFound`.
    pub(crate) fn hypervisor(&self, name: &str) -> Result<Hypervisor> {
        self.read(|sql| one(sql, name))?.ok_or_else(|| {
            let text = format!("no hypervisor {name} is configured in the service");
            Error::new(ErrorKind::NotFound, text)
                .advise("GET /hypervisors lists them; administrators add them on the page Access")
        })
    }

    /// Records the result of a test.
    pub(super) fn note_test(
        &self,
        name: &str,
        result: &TestResult,
        found: Option<&Found>,
    ) -> Result<()> {
        self.change(|sql| {
            let found = found.map(serde_json::to_string).transpose();
            sql.execute(
                "UPDATE hypervisors SET tested_ms = ?2, is_ok = ?3, result = ?4, found = coalesce(?5, found)
                 WHERE name = ?1",
                params![
                    name,
                    result.at_ms,
                    result.is_ok,
                    result.text,
                    found.map_err(|_| rusqlite::Error::InvalidQuery)?
                ],
            )
        })?;
        Ok(())
    }

    fn put_hypervisor(
        &self,
        name: &str,
        settings: &HypervisorSettings,
        secret: Option<&str>,
    ) -> Result<()> {
        let put = self.change(|sql| {
            let text = serde_json::to_string(&settings.redacted())
                .map_err(|_| rusqlite::Error::InvalidQuery)?;
            sql.execute(
                "INSERT INTO hypervisors (name, settings, secret)
                 SELECT ?1, ?2, ?3 WHERE (SELECT count(*) FROM hypervisors WHERE name <> ?1) < ?4
                 ON CONFLICT (name) DO UPDATE SET settings = excluded.settings, secret = excluded.secret,
                     tested_ms = NULL, is_ok = 0, result = NULL, found = NULL",
                params![name, text, secret, MAX_HYPERVISORS],
            )
        })?;
        if put == 0 {
            let text = format!("there are {MAX_HYPERVISORS} hypervisors already");
            return Err(Error::new(ErrorKind::Busy, text).advise("remove one"));
        }
        Ok(())
    }
}

fn remove_secret(options: &Options, hypervisor: &Hypervisor) -> Result<()> {
    let Some(name) = &hypervisor.secret else { return Ok(()) };
    remove_if_present(&secrets_folder(options)?.join(name)).map(drop)
}

fn write_secret(options: &Options, name: &str, password: &str) -> Result<()> {
    let folder = secrets_folder(options)?;
    let made = std::fs::DirBuilder::new().mode(0o700).recursive(true).create(&folder);
    made.context(|| format!("creating {}", folder.display()))?;
    replace_file(&folder.join(name), password.as_bytes())
}

/// Adds a server, or changes it.
///
/// # Errors
/// `InvalidInput`; `Busy` if a session needs the address that changes.
pub(crate) fn put(
    service: &Service,
    name: &str,
    settings: &HypervisorSettings,
) -> Result<Hypervisor> {
    let _turn = CHANGES.lock();
    let options = &service.options;
    check_name(name)?;
    settings.check(options)?;
    let old = service.database.read(|sql| one(sql, name))?;
    let is_elsewhere = old.as_ref().is_none_or(|old| settings.is_elsewhere(&old.settings));
    let kept = old.as_ref().filter(|_| !is_elsewhere).and_then(|old| old.secret.clone());
    let is_stored = settings.password_file.is_none();
    if is_stored && settings.password.is_none() && kept.is_none() {
        let text = "password: give it; a stored one is kept only while address and user stay";
        return Err(invalid(text));
    }
    if let Some(old) = &old {
        if settings.address != old.settings.address {
            check_unused(service, old)?;
        }
        if is_elsewhere || !is_stored {
            remove_secret(options, old)?;
        }
    }
    let secret = match (is_stored, kept) {
        (false, _) => None,
        (true, Some(kept)) => Some(kept),
        (true, None) => Some(random_id()?),
    };
    service.database.put_hypervisor(name, settings, secret.as_deref())?;
    if let (Some(secret), Some(password)) = (&secret, &settings.password) {
        write_secret(options, secret, password)?;
    }
    service.database.hypervisor(name)
}

/// Removes a server and its password.
///
/// # Errors
/// `NotFound`; `Busy` if a session needs it.
pub(crate) fn remove(service: &Service, name: &str) -> Result<()> {
    let _turn = CHANGES.lock();
    let found = service.database.hypervisor(name)?;
    check_unused(service, &found)?;
    remove_secret(&service.options, &found)?;
    service
        .database
        .change(|sql| sql.execute("DELETE FROM hypervisors WHERE name = ?1", [name]))
        .map(drop)
}

/// A name is a word of the command line.
fn check_name(name: &str) -> Result<()> {
    let is_allowed = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || b"._-".contains(&c);
    let is_first = |c: &u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    let bytes = name.as_bytes();
    if bytes.len() <= 63 && bytes.first().is_some_and(is_first) && name.bytes().all(is_allowed) {
        return Ok(());
    }
    Err(invalid("a hypervisor's name has a-z 0-9 . _ - with a letter or digit first, at most 63"))
}
