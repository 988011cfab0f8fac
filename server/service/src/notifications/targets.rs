//! Targets: where messages go.
//!
//! Only administrators make them, because the service connects to any address in them. A secret is
//! stored in the database (mode 0600), or better: lies in a file of `STATE/secrets`. The API never
//! returns one. Other files cannot be named, so that a target cannot send the repository's passphrase away.

use coldrise_block::{Error, ErrorKind, Result};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};
use serde::{Deserialize, Serialize};

use super::condition::{Severity, Topic};
use super::mail::{SendmailTarget, SmtpTarget};
use super::message::{Message, Occasion};
use super::webhook::WebhookTarget;
use crate::access::random_id;
use crate::clock::now_ms;
use crate::database::{Database, SqlResult};
use crate::pattern::{self, Pattern};

/// Maximum number of targets.
const MAX_TARGETS: i64 = 50;
/// Maximum length of a name, in characters.
const MAX_NAME_CHARS: usize = 100;

/// A way to send messages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(crate) enum Way {
    /// Mail through a mail server.
    Smtp(SmtpTarget),
    /// Mail through the host's sendmail program.
    Sendmail(SendmailTarget),
    /// An HTTP POST.
    Webhook(WebhookTarget),
}

impl Way {
    fn check(&self) -> Result<()> {
        match self {
            Way::Smtp(way) => way.check(),
            Way::Sendmail(way) => way.check(),
            Way::Webhook(way) => way.check(),
        }
    }

    /// The same without secrets.
    fn redacted(&self) -> Way {
        match self {
            Way::Smtp(way) => Way::Smtp(way.redacted()),
            Way::Sendmail(way) => Way::Sendmail(way.clone()),
            Way::Webhook(way) => Way::Webhook(way.redacted()),
        }
    }

    /// The same with the stored secrets where this has none.
    fn with_secrets_of(self, stored: &Way) -> Way {
        match (self, stored) {
            (Way::Smtp(new), Way::Smtp(old)) => Way::Smtp(new.with_secrets_of(old)),
            (Way::Webhook(new), Way::Webhook(old)) => Way::Webhook(new.with_secrets_of(old)),
            (new, _) => new,
        }
    }
}

/// What an administrator sets of a target.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TargetSettings {
    /// What it is, in a few words. No two targets have the same name.
    #[schema(min_length = 1, max_length = 100)]
    pub(crate) name: String,
    /// Messages that arise while it is off never go there. Switching it off drops what waits for it.
    #[serde(default = "yes")]
    pub(crate) is_enabled: bool,
    pub(crate) way: Way,
    /// The topics that it wants; all but `run_succeeded` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_items = 20)]
    pub(crate) topics: Option<Vec<Topic>>,
    /// Alarms less severe than this do not go there.
    #[serde(default = "warn")]
    pub(crate) min_severity: Severity,
    /// Patterns of machines. Messages about no machine go only to targets with `*`.
    #[serde(default = "all_machines")]
    #[schema(min_items = 1, max_items = 256)]
    pub(crate) machines: Vec<Pattern>,
}

fn yes() -> bool {
    true
}

fn warn() -> Severity {
    Severity::Warn
}

fn all_machines() -> Vec<Pattern> {
    vec![Pattern::all()]
}

impl TargetSettings {
    /// Whether a message goes there.
    pub(super) fn wants(&self, message: &Message) -> bool {
        let condition = &message.condition;
        let is_seen = match &condition.machine {
            Some(machine) => pattern::any_matches(&self.machines, machine),
            None => self.machines.contains(&Pattern::all()),
        };
        let is_success =
            condition.topic == Topic::RunSucceeded && message.occasion == Occasion::Event;
        let is_topic = match &self.topics {
            Some(topics) => topics.contains(&condition.topic),
            None => !is_success,
        };
        let is_severe = is_success || condition.severity >= self.min_severity;
        self.is_enabled && is_seen && is_topic && is_severe
    }

    fn check(&self) -> Result<()> {
        let length = self.name.chars().count();
        if length == 0 || length > MAX_NAME_CHARS || self.name.chars().any(char::is_control) {
            let text = format!("name: give 1 to {MAX_NAME_CHARS} characters");
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        pattern::check_list(&self.machines)?;
        self.way.check()
    }
}

/// A target, without secrets.
#[derive(Clone, Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct Target {
    pub(crate) id: String,
    #[serde(flatten)]
    pub(crate) settings: TargetSettings,
    /// Milliseconds since 1970.
    created_ms: i64,
    /// The last attempt; absent if there was none.
    last_result: Option<TargetResult>,
    /// Number of messages that wait for it.
    waiting: u64,
    /// Number of messages that were dropped, because it took none of them for a day.
    given_up: u64,
}

/// How an attempt ended.
#[derive(Clone, Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct TargetResult {
    /// Milliseconds since 1970.
    pub(crate) at_ms: i64,
    pub(crate) is_ok: bool,
    /// What happened.
    pub(crate) text: String,
}

fn target(row: &Row<'_>) -> SqlResult<Target> {
    let settings: String = row.get("target")?;
    let (at_ms, text): (Option<i64>, Option<String>) = (row.get("result_ms")?, row.get("result")?);
    let is_ok = row.get("is_ok")?;
    Ok(Target {
        id: row.get("id")?,
        settings: serde_json::from_str(&settings).map_err(|_| rusqlite::Error::InvalidQuery)?,
        created_ms: row.get("created_ms")?,
        last_result: at_ms.zip(text).map(|(at_ms, text)| TargetResult { at_ms, is_ok, text }),
        waiting: row.get("waiting")?,
        given_up: row.get("given_up")?,
    })
}

const SELECT: &str = "SELECT *, (SELECT count(*) FROM outbox WHERE target = targets.id) AS waiting
    FROM targets";

/// All targets with their secrets, by name.
pub(super) fn all(sql: &Connection) -> SqlResult<Vec<Target>> {
    let mut found = sql.prepare_cached(&format!("{SELECT} ORDER BY name"))?;
    let found = found.query_map([], target)?;
    found.collect()
}

/// One target with its secrets.
pub(super) fn one(sql: &Connection, id: &str) -> SqlResult<Option<Target>> {
    sql.query_row(&format!("{SELECT} WHERE id = ?1"), [id], target).optional()
}

/// Records the result of an attempt.
pub(super) fn note(
    sql: &Transaction<'_>,
    id: &str,
    now_ms: i64,
    is_ok: bool,
    text: &str,
) -> SqlResult<()> {
    sql.execute(
        "UPDATE targets SET result_ms = ?2, is_ok = ?3, result = ?4 WHERE id = ?1",
        params![id, now_ms, is_ok, text],
    )?;
    Ok(())
}

fn no_target() -> Error {
    Error::new(ErrorKind::NotFound, "there is no such target")
}

impl Database {
    /// All targets without their secrets, by name.
    pub(crate) fn targets(&self) -> Result<Vec<Target>> {
        let mut found = self.read(all)?;
        for target in &mut found {
            target.settings.way = target.settings.way.redacted();
        }
        Ok(found)
    }

    /// One target with its secrets.
    ///
    /// # Errors
    /// `NotFound`.
    pub(crate) fn target_with_secrets(&self, id: &str) -> Result<Target> {
        self.read(|sql| one(sql, id))?.ok_or_else(no_target)
    }

    fn shown_target(&self, id: &str) -> Result<Target> {
        let mut found = self.target_with_secrets(id)?;
        found.settings.way = found.settings.way.redacted();
        Ok(found)
    }

    /// Adds a target.
    ///
    /// # Errors
    /// `InvalidInput`; `AlreadyExists`.
    pub(crate) fn add_target(&self, new: &TargetSettings) -> Result<Target> {
        new.check()?;
        let id = random_id()?;
        let added = self.change(|sql| {
            sql.execute(
                "INSERT INTO targets (id, name, target, created_ms)
                 SELECT ?1, ?2, ?3, ?4 WHERE (SELECT count(*) FROM targets) < ?5
                 ON CONFLICT (name) DO NOTHING",
                params![id, new.name, stored(new)?, now_ms(), MAX_TARGETS],
            )
        })?;
        if added == 0 {
            let text = format!(
                "there is a target named {} already, or there are {MAX_TARGETS} targets",
                new.name
            );
            return Err(Error::new(ErrorKind::AlreadyExists, text));
        }
        self.shown_target(&id)
    }

    /// Changes a target. Secrets that are absent stay. What waits for it is sent at once.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput`; `AlreadyExists`.
    pub(crate) fn change_target(&self, id: &str, new: TargetSettings) -> Result<Target> {
        let old = self.target_with_secrets(id)?;
        let way = new.way.with_secrets_of(&old.settings.way);
        let new = TargetSettings { way, ..new };
        new.check()?;
        let changed = self.change(|sql| {
            match new.is_enabled {
                true => super::outbox::hurry(sql, Some(id))?,
                false => super::outbox::drop_all(sql, id)?,
            }
            sql.execute(
                "UPDATE OR IGNORE targets SET name = ?2, target = ?3 WHERE id = ?1",
                params![id, new.name, stored(&new)?],
            )
        })?;
        if changed == 0 {
            let text = format!("there is a target named {} already", new.name);
            return Err(Error::new(ErrorKind::AlreadyExists, text));
        }
        self.shown_target(id)
    }

    /// Removes a target and what waits for it.
    ///
    /// # Errors
    /// `NotFound`.
    pub(crate) fn remove_target(&self, id: &str) -> Result<()> {
        match self.change(|sql| sql.execute("DELETE FROM targets WHERE id = ?1", [id]))? {
            0 => Err(no_target()),
            _ => Ok(()),
        }
    }

    /// Records the result of a test.
    pub(crate) fn note_target(&self, id: &str, result: &TargetResult) -> Result<()> {
        self.change(|sql| note(sql, id, result.at_ms, result.is_ok, &result.text))
    }
}

fn stored(settings: &TargetSettings) -> SqlResult<String> {
    serde_json::to_string(settings).map_err(|_| rusqlite::Error::InvalidQuery)
}
