//! When jobs run: the next times of a schedule, and what is due on each day.

use axum::Json;
use axum::extract::State;
use coldrise_block::Result;
use serde::{Deserialize, Serialize};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::input::Fields;
use super::problem::{Answer, Problem, blocking};
use crate::access::Permission;
use crate::clock::now_ms;
use crate::invalid::invalid;
use crate::jobs::{due_between, preview};
use crate::service::SharedService;

/// Number of next times that a preview has without `count`.
const USUAL_TIMES: usize = 5;
/// Maximum number of times of a preview.
const MAX_TIMES: usize = 100;
/// Maximum number of lines of a schedule in a preview.
const MAX_LINES: usize = 16;
/// Latest time that a bound of a day may be: 14 digits, as the parameter's pattern says.
const MAX_TIME_MS: i64 = 99_999_999_999_999;
/// Maximum number of bounds of days, and from the first to the last.
const MAX_BOUNDS: usize = 16;
const MAX_BOUNDS_MS: i64 = 15 * 24 * 3_600_000;

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new().routes(routes!(preview_schedule)).routes(routes!(schedule_days))
}

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct ScheduleQuestion {
    /// Calendar events as in systemd.time(7), one per line.
    calendar: String,
    /// Number of times, 1 to 100.
    #[param(minimum = 1, maximum = 100)]
    count: Option<usize>,
}

/// The next times of a schedule.
#[derive(Serialize, utoipa::ToSchema)]
struct ScheduleTimes {
    /// Milliseconds since 1970.
    next_ms: Vec<i64>,
}

/// Show the next times of a schedule.
#[utoipa::path(get, path = "/schedule/preview", tag = "jobs", params(ScheduleQuestion),
    responses((status = 200, body = ScheduleTimes), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn preview_schedule(
    Caller(caller): Caller,
    Fields(question): Fields<ScheduleQuestion>,
) -> Answer<Json<ScheduleTimes>> {
    caller.allow(Permission::View)?;
    let count = question.count.unwrap_or(USUAL_TIMES).clamp(1, MAX_TIMES);
    let times = blocking(move || {
        let lines: Vec<String> =
            question.calendar.lines().take(MAX_LINES).map(str::to_owned).collect();
        preview(&lines, now_ms(), count)
    });
    Ok(Json(ScheduleTimes { next_ms: times.await? }))
}

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct DaysQuestion {
    /// When each day begins, and when the last one ends: 2 to 16 times in milliseconds since 1970, ascending, separated by
    /// commas, at most 15 days from the first to the last. So the caller's time zone applies.
    #[param(pattern = "^[0-9]{1,14}(,[0-9]{1,14}){1,15}$")]
    bounds: String,
}

/// What is due on a day.
#[derive(Serialize, utoipa::ToSchema)]
struct ScheduleDay {
    /// When the day begins, in milliseconds since 1970.
    start_ms: i64,
    /// Jobs that are due on it; those that are due on the fewest days first, then by their number of times and their
    /// first time.
    jobs: Vec<DueJob>,
}

/// A job that is due on a day.
#[derive(Serialize, utoipa::ToSchema)]
struct DueJob {
    job: String,
    /// Its first time on this day, in milliseconds since 1970.
    first_ms: i64,
    /// Number of its times on this day.
    times: usize,
    /// Number of the days on which it is due.
    days: usize,
    /// Milliseconds from each of its times on this day to the next one; absent if they differ, or if there are fewer than
    /// three times.
    #[serde(skip_serializing_if = "Option::is_none")]
    step_ms: Option<i64>,
}

fn parse_bounds(text: &str) -> Result<Vec<i64>> {
    let bounds: std::result::Result<Vec<i64>, _> =
        text.split(',').take(MAX_BOUNDS + 1).map(str::parse).collect();
    let is_valid = |bounds: &Vec<i64>| {
        let ascends = bounds.is_sorted_by(|bound, next| bound < next);
        let in_range = bounds.iter().all(|bound| (0..=MAX_TIME_MS).contains(bound));
        let length = bounds.last().zip(bounds.first()).map(|(last, first)| last - first);
        in_range
            && ascends
            && (2..=MAX_BOUNDS).contains(&bounds.len())
            && length.is_some_and(|length| length <= MAX_BOUNDS_MS)
    };
    bounds.ok().filter(is_valid).ok_or_else(|| {
        invalid("bounds: give 2 to 16 ascending times in milliseconds since 1970, within 15 days")
    })
}

/// Show what is due on each day, from now on.
///
/// A job is listed once a day, also with several schedules. Times within one second count once.
#[utoipa::path(get, path = "/schedule/days", tag = "jobs", params(DaysQuestion),
    responses((status = 200, body = [ScheduleDay]), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn schedule_days(
    State(service): State<SharedService>,
    Caller(caller): Caller,
    Fields(question): Fields<DaysQuestion>,
) -> Answer<Json<Vec<ScheduleDay>>> {
    caller.allow_all(Permission::View)?;
    let days = blocking(move || {
        let bounds_ms = parse_bounds(&question.bounds)?;
        let now_ms = now_ms();
        let starts = bounds_ms.iter().take(bounds_ms.len() - 1);
        let mut days: Vec<ScheduleDay> =
            starts.map(|start_ms| ScheduleDay { start_ms: *start_ms, jobs: Vec::new() }).collect();
        for stored in service.database.jobs()? {
            let due = due_between(&stored, now_ms, &bounds_ms);
            let due_days = due.iter().flatten().count();
            for (day, due) in days.iter_mut().zip(due) {
                day.jobs.extend(due.map(|due| DueJob {
                    job: stored.job.name.clone(),
                    first_ms: due.first_ms,
                    times: due.times,
                    days: due_days,
                    step_ms: due.step_ms,
                }));
            }
        }
        for day in &mut days {
            day.jobs.sort_by(|a, b| {
                let rarity = |due: &DueJob| (due.days, due.times, due.first_ms);
                rarity(a).cmp(&rarity(b)).then_with(|| a.job.cmp(&b.job))
            });
        }
        Ok(days)
    });
    days.await.map(Json)
}
