//! The machines of jobs of kind protect-live, and how each is followed now.

use axum::Json;
use axum::extract::State;
use coldrise_block::Result;
use coldrise_inventory::{Followed, SessionDetails, SiteDetails};
use serde::{Deserialize, Serialize};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::input::Fields;
use super::problem::{Answer, Problem, blocking};
use crate::access::Permission;
use crate::clock::now_ms;
use crate::jobs::{Job, Outcome, QueueRow, RowState};
use crate::service::{Service, SharedService};

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new().routes(routes!(followed))
}

/// How a machine is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "kebab-case")]
enum FollowState {
    /// A process follows it, and its session is within the limit of the job.
    Follows,
    /// A process follows it, and its session is further behind than the limit of the job.
    Behind,
    /// A run begins: its session has no complete state yet, or its process does not follow yet.
    Starting,
    /// The last run failed, and the next one waits.
    Retrying,
    /// No run follows it: the job is disabled, or a user cancelled the run.
    Stopped,
    /// The machine does not run from Coldrise, as the job says: it has no session.
    Absent,
}

impl FollowState {
    /// `lag_s`: that of the session, or of the site if the machine runs from Coldrise, while a process works; the inner value is
    /// `None` without a state there.
    fn of(
        job: &Job,
        lag_s: Option<Option<u64>>,
        row: Option<&QueueRow>,
        is_left_alone: bool,
        now_ms: i64,
    ) -> FollowState {
        match (lag_s, row) {
            (Some(None), _) => FollowState::Starting,
            (Some(Some(lag_s)), _) if lag_s > u64::from(job.lag_limit_s()) => FollowState::Behind,
            (Some(Some(_)), _) => FollowState::Follows,
            (None, None) if is_left_alone || !job.enabled => FollowState::Stopped,
            (None, Some(row)) if row.state == RowState::Waiting && row.due_ms > now_ms => {
                FollowState::Retrying
            }
            (None, _) => FollowState::Starting,
        }
    }
}

/// A machine that a job follows.
#[derive(Serialize, utoipa::ToSchema)]
struct FollowedMachine {
    /// The job.
    job: String,
    machine: String,
    state: FollowState,
    /// The run that follows it, or waits to do that.
    run: Option<String>,
    /// When that run may start, if it waits, in milliseconds since 1970.
    due_ms: Option<i64>,
    /// The session that has its changes; absent before its first one.
    session: Option<String>,
    /// What the session has; absent without one, and if that cannot be read now.
    follows: Option<Followed>,
    /// The sites that get the marks of the session.
    sites: Vec<SiteDetails>,
    /// Why that cannot be read.
    problem: Option<String>,
    /// The last of its runs that ended.
    last_run: Option<Outcome>,
}

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct FollowedFilter {
    /// This machine only.
    machine: Option<String>,
}

/// List the machines of jobs of kind protect-live, with how each is followed now.
#[utoipa::path(get, path = "/followed", tag = "jobs", params(FollowedFilter), responses((status = 200, body = [FollowedMachine]), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn followed(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Fields(filter): Fields<FollowedFilter>,
) -> Answer<Json<Vec<FollowedMachine>>> {
    caller.allow(Permission::View)?;
    let found = blocking(move || {
        read(&service, &|machine| {
            caller.sees(machine) && filter.machine.as_deref().is_none_or(|only| only == machine)
        })
    });
    found.await.map(Json)
}

fn read(service: &Service, is_wanted: &dyn Fn(&str) -> bool) -> Result<Vec<FollowedMachine>> {
    let mut jobs = service.database.jobs()?;
    jobs.retain(|stored| stored.job.protects_live());
    if jobs.is_empty() {
        return Ok(Vec::new());
    }
    let rows = service.database.queue_rows()?;
    let mut found = Vec::new();
    for stored in &jobs {
        let sessions = service.followed(&stored.job)?;
        let mut outcomes = service.database.outcomes(Some(&stored.job.name))?;
        outcomes.retain(|outcome| outcome.kind == stored.job.kind.word());
        let machines = stored.job.followed().into_iter().filter(|machine| is_wanted(machine));
        for machine in machines {
            let is_of = |name: &Option<String>| name.as_deref() == Some(machine.as_str());
            let row = rows.iter().find(|row| {
                row.job.as_ref() == Some(&stored.job.name)
                    && row.kind == stored.job.kind.word()
                    && row.state != RowState::Cancelled
                    && is_of(&row.machine)
            });
            let session = sessions.get(&machine);
            let read = |session: &SessionDetails| {
                service.inventory()?.session_marks(&session.session.parse()?)
            };
            let (marks, problem) = match session.map(read).transpose() {
                Ok(marks) => (marks, None),
                Err(error) => (None, Some(error.full_message())),
            };
            let (follows, sites) =
                marks.map(|marks| (marks.follows, marks.sites)).unwrap_or_default();
            let is_left_alone = service.database.is_left_alone(&stored.job.name, &machine)?;
            let job = &stored.job;
            let of_session = follows.as_ref().filter(|follows| follows.is_running);
            let lag_s = match job.runs_here() {
                false => of_session.map(|follows| follows.lag_s),
                true => {
                    let mut running = sites.iter().filter(|site| site.is_running);
                    running.find(|site| job.to.as_ref() == Some(&site.link)).map(|site| site.lag_s)
                }
            };
            let is_waiting = |row: &&QueueRow| row.state == RowState::Waiting;
            found.push(FollowedMachine {
                job: stored.job.name.clone(),
                state: match session {
                    None if job.runs_here() && row.is_none() => FollowState::Absent,
                    _ => FollowState::of(job, lag_s, row, is_left_alone, now_ms()),
                },
                run: row.map(|row| row.run.clone()),
                due_ms: row.filter(is_waiting).map(|row| row.due_ms),
                session: session.map(|session| session.session.clone()),
                last_run: outcomes.iter().find(|outcome| is_of(&outcome.machine)).cloned(),
                machine,
                follows,
                sites,
                problem,
            });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::FollowState;
    use crate::jobs::{Job, QueueRow, RowState};

    fn row(state: RowState, due_ms: i64) -> Option<QueueRow> {
        let (run, kind) = ("a".to_owned(), "protect-live".to_owned());
        Some(QueueRow {
            run,
            kind,
            machine: Some("web01".to_owned()),
            job: Some("always".to_owned()),
            arguments: Vec::new(),
            requested_by: None,
            attempt: 1,
            due_ms,
            created_ms: 0,
            state,
            reason: None,
            busy_since_ms: None,
        })
    }

    #[test]
    fn the_state_is_that_of_the_process_then_of_the_run() {
        use FollowState::{Behind, Follows, Retrying, Starting, Stopped};
        let text =
            r#"{"name":"always","kind":"protect-live","machines":["web01"],"from":"libvirt"}"#;
        let job: Job = serde_json::from_str(text).unwrap();
        let disabled = Job { enabled: false, ..job.clone() };
        let now_ms = 1000;
        let of = |job, lag_s, row: Option<QueueRow>, is_left_alone| {
            FollowState::of(job, lag_s, row.as_ref(), is_left_alone, now_ms)
        };
        for (lag_s, row, state) in [
            (Some(Some(60)), row(RowState::Started, 0), Follows),
            (Some(Some(61)), row(RowState::Started, 0), Behind),
            (Some(None), row(RowState::Started, 0), Starting),
            // A process of the command line.
            (Some(Some(2)), None, Follows),
            (None, row(RowState::Started, 0), Starting),
            (None, row(RowState::Waiting, 1000), Starting),
            (None, row(RowState::Waiting, 1001), Retrying),
            (None, row(RowState::Starting, 0), Starting),
            (None, None, Starting),
        ] {
            let case = format!("{lag_s:?} {row:?}");
            assert_eq!(of(&job, lag_s, row, false), state, "{case}");
        }
        assert_eq!(of(&job, None, None, true), Stopped);
        assert_eq!(of(&disabled, None, None, false), Stopped);
    }
}
