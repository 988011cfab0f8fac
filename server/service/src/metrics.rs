//! Metrics in the text format of OpenMetrics, collected for each request. Ages first: a backup that does not
//! run fails no run.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_inventory::{IncomingDetails, MachineSummary, MarksDetails};
use coldrise_replica::{MachineCopies, TargetCopies};
use coldrise_session::SiteProgress;
use coldrise_store::BootVerdict;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use crate::access::Identity;
use crate::clock::now_ms;
use crate::jobs::{JobKind, KnownMachine, RowState};
use crate::notifications::{Drive, Severity, all_alarms};
use crate::service::Service;

/// The stages of a boot check, the lowest first.
const BOOT_STAGES: [&str; 6] = ["started", "firmware", "kernel", "userspace", "login", "service"];

type Labels = Vec<(&'static str, String)>;

/// The text under construction.
#[derive(Default)]
struct Exposition(Registry);

impl Exposition {
    /// Adds a gauge with one value per set of labels.
    fn gauge(&mut self, name: &str, help: &str, values: impl IntoIterator<Item = (Labels, f64)>) {
        let family = Family::<Labels, Gauge<f64, AtomicU64>>::default();
        for (labels, value) in values {
            family.get_or_create(&labels).set(value);
        }
        self.0.register(name, help, family);
    }
}

fn seconds(ms: i64) -> f64 {
    ms as f64 / 1000.0
}

fn machine(name: &str) -> Labels {
    vec![("machine", name.to_owned())]
}

/// The metrics that the caller may see: of its machines, and those of the whole site if it sees all
/// machines.
///
/// # Errors
/// Errors of the database. A repository that is away leaves its last known ages.
pub(crate) fn text(service: &Service, caller: &Identity) -> Result<String> {
    let mut out = Exposition::default();
    machines(&mut out, service, caller);
    jobs(&mut out, service, caller)?;
    alarms(&mut out, service, caller)?;
    followed(&mut out, service, caller);
    copies(&mut out, service, caller);
    incoming(&mut out, service, caller);
    if caller.sees_all() {
        site(&mut out, service)?;
    }
    let version = vec![("version", env!("CARGO_PKG_VERSION"))];
    out.0.register("coldrise_build", "The version of the service", Info::new(version));
    out.gauge(
        "process_resident_memory_bytes",
        "Memory of the service",
        resident_bytes().map(|bytes| (Labels::new(), bytes)),
    );
    let mut text = String::new();
    encode(&mut text, &out.0)
        .map_err(|error| Error::with_source(ErrorKind::Internal, "writing the metrics", error))?;
    Ok(text)
}

/// VmRSS of this process.
fn resident_bytes() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024.0)
}

fn machines(out: &mut Exposition, service: &Service, caller: &Identity) {
    let mut found = service.inventory().map(|i| i.last_known_machines()).unwrap_or_default();
    found.retain(|summary| caller.sees(&summary.machine));
    let now = now_ms();
    let mut of_each = |name: &str, help: &str, value: &dyn Fn(&MachineSummary) -> Option<f64>| {
        let values = found.iter().filter_map(|one| Some((machine(&one.machine), value(one)?)));
        out.gauge(name, help, values.collect::<Vec<_>>());
    };
    of_each(
        "coldrise_machine_last_point_timestamp_seconds",
        "Time of the content of the newest good backup",
        &|one| {
            let point = one.last_good_backup.as_ref().or(one.last_good.as_ref())?;
            Some((seconds(now) - point.age_seconds as f64).floor())
        },
    );
    of_each(
        "coldrise_machine_last_verified_boot_timestamp_seconds",
        "End of the boot check of the newest point that booted",
        &|one| Some(one.last_verified_boot.as_ref()?.checked_at_ms as f64 / 1000.0),
    );
    of_each(
        "coldrise_machine_boot_stage",
        "Stage that the newest point reached in its boot check, 0 (started) to 5 (service), -1 if it failed",
        &|one| {
            let badge = one.boot.as_ref()?;
            if badge.verdict == BootVerdict::Failed {
                return Some(-1.0);
            }
            let stage = badge.stage.as_deref()?;
            BOOT_STAGES.iter().position(|known| *known == stage).map(|number| number as f64)
        },
    );
}

/// Results, age limits and coverage: what jobs say of machines.
fn jobs(out: &mut Exposition, service: &Service, caller: &Identity) -> Result<()> {
    // A job runs several commands on a machine: all must be ok.
    let mut results = BTreeMap::new();
    for outcome in service.database.outcomes(None)? {
        // Such a run has no end but a bad one: its session's lag says how it is.
        if outcome.kind == JobKind::ProtectLive.word() {
            continue;
        }
        let is_seen = match &outcome.machine {
            Some(machine) => caller.sees(machine),
            None => caller.sees_all(),
        };
        if is_seen {
            let key = (outcome.job, outcome.machine.unwrap_or_default());
            *results.entry(key).or_insert(true) &= outcome.failures == 0;
        }
    }
    let values = results.into_iter().map(|((job, machine), is_ok)| {
        (vec![("job", job), ("machine", machine)], f64::from(u8::from(is_ok)))
    });
    let help = "Result of the last run of a job on a machine, 1 (ok) or 0 (failed or lost)";
    out.gauge("coldrise_run_last_result", help, values);
    let summaries = service.inventory().map(|i| i.last_known_machines()).unwrap_or_default();
    let known: Vec<_> = summaries
        .iter()
        .filter(|summary| caller.sees(&summary.machine))
        .map(KnownMachine::from)
        .collect();
    let limits = service.database.age_limits(&known)?;
    let limits = limits.iter().filter(|(name, _)| caller.sees(name));
    let values = limits.map(|(name, (hours, _))| (machine(name), f64::from(*hours) * 3600.0));
    let help = "Age of the last good backup from which an alarm is raised";
    out.gauge("coldrise_machine_age_limit_seconds", help, values.collect::<Vec<_>>());
    let uncovered = service.database.uncovered(&known)?;
    let values = known.iter().map(|known| {
        let is_uncovered = uncovered.contains(&known.names.machine);
        (machine(&known.names.machine), f64::from(u8::from(is_uncovered)))
    });
    let help = "1 if no job backs up the machine, else 0";
    out.gauge("coldrise_machine_without_job", help, values.collect::<Vec<_>>());
    Ok(())
}

fn alarms(out: &mut Exposition, service: &Service, caller: &Identity) -> Result<()> {
    let mut found = all_alarms(service)?;
    found.retain(|alarm| alarm.is_active() && alarm.is_seen_by(caller));
    let values = [Severity::Warn, Severity::Fail].map(|severity| {
        let count = found.iter().filter(|alarm| alarm.condition.severity == severity).count();
        (vec![("severity", severity.word().to_owned())], count as f64)
    });
    out.gauge("coldrise_alarms", "Active alarms", values);
    Ok(())
}

/// Sessions that follow machines. One that cannot be read, or has no state of its machine yet, has no value.
fn followed(out: &mut Exposition, service: &Service, caller: &Identity) {
    let (mut values, mut of_sites) = (Vec::new(), Vec::new());
    if let Ok((repository, listing)) =
        service.inventory().and_then(|i| Ok((i.repository()?, i.sessions()?)))
    {
        let sessions = listing.sessions.into_iter();
        for found in sessions.filter(|session| caller.sees(&session.machine)) {
            let Ok(name) = found.session.parse() else { continue };
            let labels =
                || vec![("session", found.session.clone()), ("machine", found.machine.clone())];
            for site in SiteProgress::all(&repository, &name).unwrap_or_default() {
                if let Some(lag_s) = site.lag_s() {
                    let labels = [labels(), vec![("link", site.link)]].concat();
                    of_sites.push((labels, lag_s as f64));
                }
            }
            if found.follows.is_none() {
                continue;
            }
            let marks = MarksDetails::read(&repository, &name).ok();
            let follows = marks.and_then(|marks| marks.follows);
            if let Some(lag_s) = follows.and_then(|follows| follows.lag_s) {
                values.push((labels(), lag_s as f64));
            }
        }
    }
    let help = "Time since the state of its machine, which runs elsewhere, that a session has";
    out.gauge("coldrise_session_lag_seconds", help, values);
    let help = "Time since the state of a session that another site has, which gets its time marks";
    out.gauge("coldrise_session_site_lag_seconds", help, of_sites);
}

fn copy_labels(target: &TargetCopies, copies: &MachineCopies) -> Labels {
    vec![
        ("target", target.target.clone()),
        ("machine", copies.machine.clone()),
        ("far_machine", copies.far_machine.clone()),
    ]
}

/// Where copies are. Targets of which nothing is known have no values.
fn copies(out: &mut Exposition, service: &Service, caller: &Identity) {
    let targets = service.copies.targets().unwrap_or_default();
    let all: Vec<(&TargetCopies, &MachineCopies)> = targets
        .iter()
        .flat_map(|target| target.machines.iter().map(move |copies| (target, copies)))
        .filter(|(_, copies)| caller.sees(&copies.machine))
        .collect();
    let mut of_each = |name: &str, help: &str, value: &dyn Fn(&MachineCopies) -> Option<u64>| {
        let values = all.iter().filter_map(|(target, copies)| {
            Some((copy_labels(target, copies), value(copies)? as f64))
        });
        out.gauge(name, help, values.collect::<Vec<_>>());
    };
    let seconds = |ms: Option<u64>| ms.map(|ms| ms / 1000);
    of_each(
        "coldrise_copy_points_behind",
        "Points that are still to be copied to the target",
        &|copies| copies.points_behind,
    );
    of_each(
        "coldrise_copy_bytes_behind",
        "Bytes that a copy of these points has to read",
        &|copies| copies.bytes_behind,
    );
    of_each(
        "coldrise_copy_behind_since_timestamp_seconds",
        "Time of the oldest point that is missing at the target; absent if none is missing",
        &|copies| seconds(copies.behind_since_ms),
    );
    of_each(
        "coldrise_copy_last_cut_timestamp_seconds",
        "Time of the newest point at the target",
        &|copies| seconds(copies.last_cut.as_ref().map(|cut| cut.created_at_ms)),
    );
    of_each(
        "coldrise_copy_last_success_timestamp_seconds",
        "Time when no wanted point was missing at the target for the last time",
        &|copies| seconds(copies.succeeded_at_ms),
    );
    of_each("coldrise_copy_failing", "1 if the last copy failed, else 0", &|copies| {
        Some(u64::from(copies.failure.is_some()))
    });
    of_each("coldrise_copy_read_bytes", "Bytes that all copies have read here", &|copies| {
        Some(copies.total.read_bytes)
    });
    of_each(
        "coldrise_copy_sent_bytes",
        "Bytes that all copies have sent over the line",
        &|copies| Some(copies.total.line?.sent_bytes),
    );
    of_each(
        "coldrise_copy_bytes_per_second",
        "Rate of the running copy, in bytes of content",
        &|copies| Some(copies.running.as_ref().map_or(0, |running| running.bytes_per_second)),
    );
    of_each(
        "coldrise_copy_sent_bytes_per_second",
        "Rate of the running copy, in bytes sent over the line",
        &|copies| Some(copies.running.as_ref()?.sent_bytes_per_second.unwrap_or(0)),
    );
    let saved = all.iter().filter_map(|(target, copies)| {
        let line = copies.total.line?;
        let means = [
            ("base", line.unchanged_bytes),
            ("known", line.known_bytes),
            ("delta", line.delta_bytes),
            ("compression", line.compression_bytes()),
        ];
        Some(means.map(|(by, bytes)| {
            let by = std::iter::once(("by", by.to_owned()));
            (copy_labels(target, copies).into_iter().chain(by).collect(), bytes as f64)
        }))
    });
    let help = "Bytes that were not sent over the line, by the method that saved them";
    out.gauge("coldrise_copy_saved_bytes", help, saved.flatten().collect::<Vec<_>>());
}

/// Points on their way here. Machines without one have no values.
fn incoming(out: &mut Exposition, service: &Service, caller: &Identity) {
    let all = service.copies.incoming();
    let mut by_machine: BTreeMap<&str, Vec<&IncomingDetails>> = BTreeMap::new();
    for one in all.iter().filter(|one| caller.sees(&one.machine)) {
        by_machine.entry(&one.machine).or_default().push(one);
    }
    let mut of_each = |name: &str, help: &str, value: &dyn Fn(&[&IncomingDetails]) -> u64| {
        let values = by_machine.iter().map(|(name, points)| (machine(name), value(points) as f64));
        out.gauge(name, help, values.collect::<Vec<_>>());
    };
    of_each(
        "coldrise_coming_points",
        "Incomplete points that are being copied from another site",
        &|points| points.len() as u64,
    );
    of_each(
        "coldrise_coming_missing_bytes",
        "Bytes of these points that have not arrived yet",
        &|points| points.iter().map(|one| one.missing_bytes).sum(),
    );
    // A point whose copy was abandoned for another one stays for its session, and no site sends it.
    of_each(
        "coldrise_coming_connected",
        "1 if the other site is connected for one of these points, else 0",
        &|points| u64::from(points.iter().any(|one| one.is_reachable)),
    );
}

/// Metrics of all machines.
fn site(out: &mut Exposition, service: &Service) -> Result<()> {
    let running = service.messenger.figures().running;
    let ended = service.database.count_ended_runs()?.into_iter();
    let states = ended.map(|(state, count)| (vec![("state", state)], count as f64));
    let running = (vec![("state", "running".to_owned())], running as f64);
    out.gauge("coldrise_runs", "Runs by state", states.chain([running]));
    let rows = service.database.queue_rows()?;
    let waiting = rows.iter().filter(|row| row.state == RowState::Waiting).count() as f64;
    out.gauge(
        "coldrise_queue_waiting",
        "Runs that are waiting in the queue",
        [(Labels::new(), waiting)],
    );
    if let Some(drive) = service.options.repo.as_deref().and_then(|path| Drive::of(path).ok()) {
        let kind = |kind: &str, bytes: i64| (vec![("kind", kind.to_owned())], bytes as f64);
        let help = "Space of the repository's file system: used, available, size";
        let values = [
            kind("used", drive.used_bytes),
            kind("available", drive.available_bytes),
            kind("size", drive.size_bytes()),
        ];
        out.gauge("coldrise_repository_bytes", help, values);
    }
    if let Ok(drive) = Drive::of(&service.options.state) {
        let help = "Free space for the service's own folder";
        let bytes = drive.available_bytes as f64;
        out.gauge("coldrise_service_folder_available_bytes", help, [(Labels::new(), bytes)]);
    }
    let Ok(inventory) = service.inventory() else { return Ok(()) };
    if let Ok(damage) = inventory.damage() {
        let count = damage.damaged.len() as f64;
        let help = "Lost or damaged restore points and sessions";
        out.gauge("coldrise_damaged_points", help, [(Labels::new(), count)]);
    }
    if let Ok(listing) = inventory.sessions() {
        let sessions = listing.sessions.into_iter();
        let values = sessions.map(|s| (vec![("session", s.session)], s.captured_bytes as f64));
        let help = "Space of a session's captured writes since its last seal";
        out.gauge("coldrise_session_captured_bytes", help, values);
    }
    Ok(())
}
