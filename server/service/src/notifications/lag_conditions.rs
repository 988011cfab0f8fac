//! Machines of jobs of kind protect-live whose session is behind, or that no process follows.

use std::collections::HashMap;

use coldrise_block::Result;
use coldrise_inventory::{Followed, MarksDetails, SessionDetails};

use super::condition::{Condition, Severity, Topic};
use crate::jobs::{Outcome, QueueRow, RowState, StoredJob};
use crate::service::Service;

/// What earlier looks at a machine found. A process that has just begun does not know yet how far the one before it came.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Looked {
    first_ms: i64,
    /// The session has everything until then; 0 if unknown.
    current_ms: i64,
}

/// What is known of a machine now.
struct Now<'a> {
    stored: &'a StoredJob,
    machine: &'a str,
    session: Option<&'a SessionDetails>,
    /// How the session follows it, or why that is unknown.
    follows: Result<Option<Followed>>,
    /// A run works on it, or starts just now.
    has_run: bool,
    /// Why its last run ended.
    message: Option<String>,
}

/// Reads the conditions, and the keys of alarms of which nothing is known now.
///
/// # Errors
/// Errors of the database and of reading the sessions.
pub(super) fn read(service: &Service, now_ms: i64) -> Result<(Vec<Condition>, Vec<String>)> {
    let mut jobs = service.database.jobs()?;
    jobs.retain(|stored| stored.job.enabled && stored.job.protects_live());
    let (mut found, mut undecided) = (Vec::new(), Vec::new());
    if jobs.is_empty() {
        return Ok((found, undecided));
    }
    let rows = service.database.queue_rows()?;
    let repository = service.inventory()?.repository()?;
    for stored in &jobs {
        let sessions = service.followed(&stored.job)?;
        let outcomes = service.database.outcomes(Some(&stored.job.name))?;
        for machine in &stored.job.followed() {
            let session = sessions.get(machine);
            let read = |session: &SessionDetails| {
                MarksDetails::read(&repository, &session.session.parse()?)
            };
            let marks = session.map(read).transpose();
            if let Ok(Some(marks)) = &marks {
                found.extend(site_condition(stored, machine, marks, now_ms));
            }
            if stored.job.runs_here() {
                continue;
            }
            let is_of = |outcome: &&Outcome| {
                outcome.machine.as_ref() == Some(machine) && outcome.kind == stored.job.kind.word()
            };
            let now = Now {
                stored,
                machine,
                session,
                follows: marks.map(|marks| marks.and_then(|marks| marks.follows)),
                has_run: rows.iter().any(|row| is_at_work(row, stored, machine, now_ms)),
                message: outcomes.iter().find(is_of).and_then(|outcome| outcome.message.clone()),
            };
            let mut looked = service.messenger.followed.lock();
            match now.condition(&mut looked, now_ms) {
                Some(Some(condition)) => found.push(condition),
                Some(None) => {}
                None => undecided.push(now.key()),
            }
        }
    }
    Ok((found, undecided))
}

/// Whether the site that gets the marks of a machine's session is behind.
fn site_condition(
    stored: &StoredJob,
    machine: &str,
    marks: &MarksDetails,
    now_ms: i64,
) -> Option<Condition> {
    let to = stored.job.to.as_ref()?;
    let site = marks.sites.iter().find(|site| site.link == *to);
    let current_ms = site.and_then(|site| i64::try_from(site.current_ms).ok());
    // Until the site has a state, the time counts from that of the session's first mark.
    let first_ms = marks.marks.first().and_then(|mark| i64::try_from(mark.marked_at_ms).ok())?;
    let since_ms = current_ms.filter(|ms| *ms > 0).unwrap_or(first_ms);
    // A new job has its time to begin.
    let lag_s = (now_ms - since_ms.max(stored.created_ms)) / 1000;
    if lag_s <= i64::from(stored.job.lag_limit_s()) {
        return None;
    }
    let key = format!("lag:{}:{machine}:{to}", stored.job.name);
    let text = format!("site {to} is {} behind {machine}", shown(lag_s));
    let mut found = Condition::new(key, Topic::Lag, Severity::Fail, text);
    let limit = shown(stored.job.lag_limit_s().into());
    found.details = format!("The limit of job {} is {limit}.", stored.job.name);
    if let Some(problem) = site.and_then(|site| site.problem.as_ref()) {
        found.details += &format!("\n{problem}");
    }
    let command = Some(format!("coldrise marks {}", marks.session));
    let advice = match site.is_some_and(|site| site.is_running) {
        true => "bring the line or the other site back",
        false => "no process sends: start the job if its run was cancelled",
    };
    Some(found.of_machine(machine).advise(advice, command))
}

fn is_at_work(row: &QueueRow, stored: &StoredJob, machine: &str, now_ms: i64) -> bool {
    let is_due = row.state == RowState::Waiting && row.due_ms <= now_ms;
    row.job.as_ref() == Some(&stored.job.name)
        && row.kind == stored.job.kind.word()
        && row.machine.as_deref() == Some(machine)
        && (is_due || matches!(row.state, RowState::Starting | RowState::Started))
}

impl Now<'_> {
    fn key(&self) -> String {
        format!("lag:{}:{}", self.stored.job.name, self.machine)
    }

    /// The condition, if it holds; `None` if that is unknown.
    fn condition(
        &self,
        looked: &mut HashMap<String, Looked>,
        now_ms: i64,
    ) -> Option<Option<Condition>> {
        let first = Looked { first_ms: now_ms, current_ms: 0 };
        let looked = looked.entry(self.key()).or_insert(first);
        let ms = |ms: u64| i64::try_from(ms).unwrap_or(i64::MAX);
        let follows = self.follows.as_ref().map(Option::as_ref);
        if let Ok(Some(follows)) = follows {
            looked.current_ms = looked.current_ms.max(ms(follows.current_ms));
        }
        let since_ms = match (looked.current_ms, &follows, self.session) {
            (0, Err(_), _) => looked.first_ms,
            (0, _, Some(session)) => ms(session.created_at_ms),
            (0, _, None) => self.stored.created_ms,
            (current_ms, _, _) => current_ms,
        };
        let (machine, lag_s) = (self.machine, (now_ms - since_ms) / 1000);
        let is_late = lag_s > i64::from(self.stored.job.lag_limit_s());
        let is_running = matches!(follows, Ok(Some(follows)) if follows.is_running);
        let behind = shown(lag_s);
        let text = match follows {
            Err(_) if is_late => format!("the state of the session of {machine} cannot be read"),
            Err(_) => return None,
            Ok(_) if !is_running && !self.has_run => format!("no process follows {machine}"),
            Ok(_) if !is_late => return Some(None),
            Ok(None) => format!("{machine} is not followed yet, after {behind}"),
            Ok(Some(_)) => format!("the session of {machine} is {behind} behind it"),
        };
        let mut found = Condition::new(self.key(), Topic::Lag, Severity::Fail, text);
        let (job, limit) = (&self.stored.job, shown(self.stored.job.lag_limit_s().into()));
        found.details = format!("The limit of job {} is {limit}.", job.name);
        let why = match follows {
            Err(error) => Some(error.full_message()),
            Ok(follows) => {
                let problem = follows.and_then(|follows| follows.problem.clone());
                problem.or(self.message.clone().filter(|_| !is_running))
            }
        };
        if let Some(why) = why {
            found.details += &format!("\n{why}");
        }
        let command = self.session.map(|session| format!("coldrise marks {}", session.session));
        let advice =
            "bring the machine or its host back, or start the job if its run was cancelled";
        Some(Some(found.of_machine(machine).advise(advice, command)))
    }
}

fn shown(seconds: i64) -> String {
    match seconds {
        ..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min", seconds / 60),
        7200..=172_799 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use coldrise_block::{Error, ErrorKind, Result};
    use coldrise_inventory::Followed;

    use super::Now;
    use crate::jobs::{Job, StoredJob};

    const LIMIT_MS: i64 = 60_000;

    fn follows(is_running: bool, current_ms: u64) -> Result<Option<Followed>> {
        let source = "libvirt:web01".to_owned();
        Ok(Some(Followed {
            source,
            site: None,
            is_running,
            current_ms,
            lag_s: None,
            problem: None,
        }))
    }

    #[test]
    fn an_unknown_state_counts_as_behind_and_a_new_process_does_not() {
        let text =
            r#"{"name":"always","kind":"protect-live","machines":["web01"],"from":"libvirt"}"#;
        let job: Job = serde_json::from_str(text).unwrap();
        job.check().unwrap();
        let stored = StoredJob { job, created_ms: 1000, next_due_ms: None };
        let mut looked = HashMap::new();
        let mut found = |follows: Result<Option<Followed>>, has_run, now_ms| {
            let (machine, session, message) = ("web01", None, None);
            let now = Now { stored: &stored, machine, session, follows, has_run, message };
            now.condition(&mut looked, now_ms).map(|held| held.map(|held| held.summary))
        };
        let away = || Err(Error::new(ErrorKind::Busy, "no answer"));
        let (held, quiet) = (|text: &str| Some(Some(text.to_owned())), Some(None));
        assert_eq!(found(Ok(None), true, 1000 + LIMIT_MS), quiet);
        assert_eq!(
            found(Ok(None), true, 2000 + LIMIT_MS),
            held("web01 is not followed yet, after 61 s")
        );
        assert_eq!(found(away(), true, 1001 + LIMIT_MS), None, "it stays as it was");
        assert_eq!(
            found(away(), true, 2001 + 2 * LIMIT_MS),
            held("the state of the session of web01 cannot be read")
        );
        let now_ms = 10_000_000;
        assert_eq!(found(follows(true, 10_000_000), true, now_ms), quiet);
        // The new process has not ended its first round; the newest mark of an idle machine is old.
        assert_eq!(found(follows(true, 5_000_000), true, now_ms + LIMIT_MS), quiet);
        assert_eq!(
            found(follows(true, 5_000_000), true, now_ms + LIMIT_MS + 1000),
            held("the session of web01 is 61 s behind it")
        );
        assert_eq!(found(follows(false, 5_000_000), true, now_ms), quiet, "a run begins");
        assert_eq!(
            found(follows(false, 5_000_000), false, now_ms),
            held("no process follows web01")
        );
    }
}
