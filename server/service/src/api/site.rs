//! The whole site in one answer: the first line of the page.

use axum::Json;
use axum::extract::State;
use coldrise_replica::CopyState;
use serde::Serialize;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::problem::{Answer, Problem, blocking};
use crate::access::{Identity, Permission};
use crate::clock::now_ms;
use crate::notifications::{Drive, Severity, Topic, all_alarms};
use crate::service::{Service, SharedService};

/// A boot check proves a machine for this long.
const PROVEN_MS: u64 = 7 * 24 * 3600 * 1000;

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new().routes(routes!(site))
}

/// The machines that the caller sees, and the repository.
#[derive(Debug, Default, Serialize, utoipa::ToSchema)]
struct Site {
    /// Machines with restore points.
    machines: u64,
    /// Of these: an enabled job backs them up, they have a good point, and no alarm says that it is old,
    /// damaged, or that their last run failed.
    protected: u64,
    /// Of all: a boot check succeeded within the last 7 days.
    proven: u64,
    /// The machine whose newest good point is the oldest.
    oldest_machine: Option<String>,
    /// The age of this point, in seconds.
    oldest_age_seconds: Option<u64>,
    /// What can still be written to the repository's file system, in bytes; absent if it cannot be read, and
    /// for callers that are limited to some machines.
    available_bytes: Option<i64>,
    /// When it will be full at the growth of the last 14 days, in milliseconds since 1970; absent if it does not grow, or
    /// too little is known.
    full_at_ms: Option<i64>,
    /// Machines of which a copy is behind, has failed, was never made or is unknown; absent if no copies are made.
    copies_behind: Option<u64>,
    /// Alarms that hold, are not mere notes, and are not acknowledged.
    attention: u64,
}

/// Show the whole site: how many machines are protected and proven, space, copies, alarms.
#[utoipa::path(get, path = "/site", tag = "machines",
    responses((status = 200, body = Site), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn site(State(service): State<SharedService>, Caller(caller): Caller) -> Answer<Json<Site>> {
    caller.allow(Permission::View)?;
    blocking(move || look(&service, &caller)).await.map(Json)
}

fn look(service: &Service, caller: &Identity) -> coldrise_block::Result<Site> {
    let now = now_ms();
    let mut site = Site::default();
    let alarms: Vec<_> = all_alarms(service)?
        .into_iter()
        .filter(|alarm| alarm.is_active() && alarm.is_seen_by(caller))
        .filter(|alarm| alarm.condition.severity != Severity::Info)
        .collect();
    site.attention = alarms.iter().filter(|alarm| alarm.acknowledged_ms.is_none()).count() as u64;
    let is_bad = |topic: Topic| {
        matches!(topic, Topic::RunFailed | Topic::RunLost | Topic::Age | Topic::Damage)
    };
    let uncovered = service.database.uncovered(&service.known_machines()?)?;
    for machine in service.inventory()?.machines()? {
        if !caller.sees(&machine.machine) {
            continue;
        }
        site.machines += 1;
        let checked = machine.last_verified_boot.as_ref().map(|boot| boot.checked_at_ms);
        let since = u64::try_from(now).unwrap_or_default().saturating_sub(PROVEN_MS);
        site.proven += u64::from(checked.is_some_and(|at| at >= since));
        let Some(good) = &machine.last_good else { continue };
        if site.oldest_age_seconds.is_none_or(|age| good.age_seconds > age) {
            site.oldest_age_seconds = Some(good.age_seconds);
            site.oldest_machine = Some(machine.machine.clone());
        }
        let has_alarm = alarms.iter().any(|alarm| {
            is_bad(alarm.condition.topic) && alarm.condition.is_about(&machine.machine)
        });
        site.protected += u64::from(!has_alarm && !uncovered.contains(&machine.machine));
    }
    let repository = service.options.repo.as_deref().filter(|_| caller.sees_all());
    let drive = repository.and_then(|path| Drive::of(path).ok());
    site.available_bytes = drive.map(|drive| drive.available_bytes);
    site.full_at_ms = match drive {
        Some(drive) => service.database.full_at_ms(drive, now)?,
        None => None,
    };
    let targets = service.copies.targets().unwrap_or_default();
    let copies = targets.iter().flat_map(|target| &target.machines);
    let mut seen = copies.filter(|copies| caller.sees(&copies.machine)).peekable();
    site.copies_behind = seen.peek().is_some().then(|| {
        let behind =
            seen.filter(|one| !matches!(one.state, CopyState::Current | CopyState::Copying));
        let names: std::collections::BTreeSet<_> = behind.map(|copies| &copies.machine).collect();
        names.len() as u64
    });
    Ok(site)
}
