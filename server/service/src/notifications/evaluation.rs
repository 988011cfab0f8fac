//! The evaluation: which conditions hold now, and what follows from it.

use std::time::{Duration, Instant};

use coldrise_block::{ErrorKind, Result};
use coldrise_inventory::{Inventory, MachineSummary};
use coldrise_store::BootVerdict;

use super::alarms::{self, AlarmChange};
use super::condition::{Condition, Severity, Topic};
use super::message::{Message, Occasion};
use super::space::{self, Drive};
use super::{
    Figures, copy_conditions, ended_runs, found_damage, host_conditions, job_conditions,
    lag_conditions, outbox, service_folder, settings,
};
use crate::clock::now_ms;
use crate::events::What;
use crate::service::{Service, SharedService};

/// Longest time between two evaluations: ages grow without an event.
const INTERVAL: Duration = Duration::from_secs(20);
/// A repository that is away for less is not an alarm: such as at the start, before it is open.
const AWAY_GRACE: Duration = Duration::from_secs(15);
/// Events come in swarms; the evaluation comes after them.
const SETTLE: Duration = Duration::from_millis(200);

/// Evaluates until the service stops.
pub(crate) async fn evaluate(service: SharedService) {
    let mut stop = service.stop.clone();
    let mut events = service.events.subscribe(None).receiver;
    loop {
        let shared = service.clone();
        let done = tokio::task::spawn_blocking(move || evaluate_once(&shared)).await;
        match done {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!("alarms: {}", error.full_message()),
            Err(error) => tracing::error!("alarms: a defect in coldrised: {error}"),
        }
        let deadline = tokio::time::Instant::now() + INTERVAL;
        loop {
            tokio::select! {
                event = events.recv() => match event {
                    Ok(event) if !is_reason(&event.what) => {}
                    _ => break,
                },
                () = tokio::time::sleep_until(deadline) => break,
                _ = stop.wait_for(|stop| *stop) => return,
            }
        }
        tokio::time::sleep(SETTLE).await;
    }
}

/// Whether an event can change a condition.
fn is_reason(what: &What) -> bool {
    match what {
        What::Run { state, .. } => state != "running",
        What::Machine { .. } | What::Job { .. } | What::Copies { .. } | What::Settings => true,
        What::Session { .. } | What::Incoming { .. } | What::Activity(_) | What::Alarm { .. } => {
            false
        }
    }
}

/// The findings of all sources. Topics whose source could not be read are unknown.
#[derive(Default)]
struct Findings {
    conditions: Vec<Condition>,
    unknown: Vec<Topic>,
    /// Keys of alarms that stay as they are: their job is being tried again, or nothing is known now.
    undecided: Vec<String>,
}

impl Findings {
    fn is_unknown(&self, condition: &Condition) -> bool {
        self.unknown.contains(&condition.topic) || self.undecided.contains(&condition.key)
    }
}

fn evaluate_once(service: &Service) -> Result<()> {
    let now = now_ms();
    let mut findings = Findings::default();
    let database = &service.database;
    let sweep = match ended_runs::sweep(&service.runs, &database.read(ended_runs::known)?) {
        Ok(sweep) => sweep,
        Err(error) => {
            tracing::warn!("{}", error.full_message());
            ended_runs::Sweep { ended: Vec::new(), running: 0 }
        }
    };
    let drive = service.options.repo.as_deref().and_then(|path| Drive::of(path).ok());
    let own_drive = Drive::of(&service.options.state).ok();
    if let Ok(inventory) = service.inventory() {
        repository_conditions(service, inventory, &mut findings);
    }
    let machines = service.inventory().map(Inventory::last_known_machines).unwrap_or_default();
    let (of_jobs, undecided) = job_conditions::read(database, &machines, now)?;
    findings.conditions.extend(of_jobs);
    findings.undecided = undecided;
    match service.copies.targets() {
        Some(targets) => {
            findings.conditions.extend(copy_conditions::read(database, &targets, &machines, now)?);
        }
        None => findings.unknown.push(Topic::Copies),
    }
    match lag_conditions::read(service, now) {
        Ok((conditions, undecided)) => {
            findings.conditions.extend(conditions);
            findings.undecided.extend(undecided);
        }
        Err(error) => {
            tracing::warn!("machines that jobs follow: {}", error.full_message());
            findings.unknown.push(Topic::Lag);
        }
    }
    match host_conditions::read(&service.runs, now) {
        Ok(conditions) => findings.conditions.extend(conditions),
        Err(error) => {
            tracing::warn!("{}", error.full_message());
            findings.unknown.push(Topic::Host);
        }
    }
    if machines.is_empty() && service.inventory().is_ok_and(|i| i.machines().is_err()) {
        // Not seen since the start: the age of its points is unknown.
        let of_machines = [Topic::Age, Topic::Uncovered];
        findings.conditions.retain(|condition| !of_machines.contains(&condition.topic));
        findings.unknown.extend(of_machines);
    }
    // Only a verify's end needs them, and they are read from files.
    let has_verify = sweep.ended.iter().any(found_damage::is_verify);
    let sessions = service.inventory().ok().filter(|_| has_verify).map(Inventory::sessions);
    let sessions = sessions.and_then(Result::ok).unwrap_or_default().sessions;
    let machine_of = |session: &str| {
        let found = sessions.iter().find(|found| found.session == session)?;
        Some(found.machine.clone())
    };
    let updated = database.change(|sql| {
        let held = alarms::held(sql, service_folder::KEY)?;
        let folder = &service.options.state;
        let filling = |drive| service_folder::condition(folder, drive, held);
        findings.conditions.extend(own_drive.and_then(filling));
        let events = ended_runs::record(sql, &sweep.ended, &machine_of, now)?;
        found_damage::note(sql, &sweep.ended, service.options.repo.as_deref(), &machine_of)?;
        job_conditions::complete(sql, &mut findings.conditions)?;
        findings.conditions.extend(found_damage::read(sql)?);
        match (drive, &service.options.repo) {
            (Some(drive), Some(path)) => {
                let samples = space::sample(sql, drive, now)?;
                let (held, min_free) = (alarms::held(sql, "space")?, service.options.min_free);
                let filling = space::condition(&samples, drive, min_free, now, path, held);
                findings.conditions.extend(filling);
            }
            _ => findings.unknown.push(Topic::Space),
        }
        let changes = alarms::update(
            sql,
            &findings.conditions,
            &|condition| findings.is_unknown(condition),
            now,
        )?;
        let base = settings::link_base(sql, &service.options)?;
        let changed = changes.iter().map(|change| (&change.condition, change.occasion));
        let happened = events.iter().map(|condition| (condition, Occasion::Event));
        let messages = changed.chain(happened).map(|(condition, occasion)| {
            Message::new(condition, occasion, now, &base).map_err(|_| rusqlite::Error::InvalidQuery)
        });
        let messages: Vec<Message> = messages.collect::<rusqlite::Result<_>>()?;
        let is_posted = outbox::post(sql, &messages, now)?;
        let (warn, fail) = alarms::counts(sql)?;
        Ok((changes, is_posted, Figures { running: sweep.running, warn, fail }))
    });
    let has_no_room = updated.as_ref().is_err_and(|error| error.kind() == ErrorKind::NoSpace);
    let is_full = has_no_room || own_drive.is_some_and(service_folder::is_full);
    service_folder::note(service, is_full, now);
    let (changes, is_posted, figures) = updated?;
    *service.messenger.figures.lock() = figures;
    tell(service, &changes);
    if is_posted {
        service.messenger.wake();
    }
    Ok(())
}

/// The log and the event stream.
fn tell(service: &Service, changes: &[AlarmChange]) {
    for AlarmChange { condition, occasion } in changes {
        let (key, summary) = (&condition.key, &condition.summary);
        match (occasion, condition.severity) {
            (Occasion::Reminder, _) => continue,
            (Occasion::Cleared, _) => tracing::info!("alarm {key} is cleared: {summary}"),
            (_, Severity::Fail) => tracing::error!("alarm {key}: {summary}"),
            (_, _) => tracing::warn!("alarm {key}: {summary}"),
        }
        let (key, machine) = (key.clone(), condition.machine.clone());
        service.events.send(What::Alarm { key, machine });
    }
}

/// Conditions of the repository, its machines and its damage. While it is away, ages keep growing.
fn repository_conditions(service: &Service, inventory: &Inventory, findings: &mut Findings) {
    let machines = match inventory.machines() {
        Ok(machines) => {
            *service.messenger.away_since.lock() = None;
            machines
        }
        Err(error) => {
            findings.unknown.extend([Topic::Boot, Topic::Damage]);
            let since = *service.messenger.away_since.lock().get_or_insert_with(Instant::now);
            if since.elapsed() < AWAY_GRACE {
                findings.unknown.push(Topic::Repository);
                return;
            }
            let text = "the repository cannot be read";
            let mut away = Condition::new("repository", Topic::Repository, Severity::Fail, text);
            away.details = error.full_message();
            findings.conditions.push(away.advise(
                "bring it back; coldrised then continues",
                Some("coldrise doctor".to_owned()),
            ));
            return;
        }
    };
    findings.conditions.extend(machines.iter().filter_map(boot_condition));
    match inventory.damage() {
        Ok(damage) => {
            let lost = damage.damaged.iter().map(|damage| {
                let mut found = Condition::new(
                    format!("damage:{}", damage.what),
                    Topic::Damage,
                    Severity::Fail,
                    format!("{} is damaged", damage.what),
                );
                found.machine = damage
                    .what
                    .split_once('/')
                    .map(|(machine, _)| machine.to_owned())
                    .filter(|machine| machines.iter().any(|known| known.machine == *machine));
                found.details = damage.message.clone();
                found.command = damage.command.clone();
                found
            });
            findings.conditions.extend(lost);
            if damage.damaged_chunks > 0 {
                let text =
                    format!("{} chunks of the repository are damaged", damage.damaged_chunks);
                let chunks = Condition::new("damage", Topic::Damage, Severity::Fail, text);
                findings.conditions.push(chunks.advise(
                    "find out which disks they affect, and restore them from other sources",
                    Some("coldrise verify; coldrise repair".to_owned()),
                ));
            }
        }
        Err(error) => {
            if error.kind() != ErrorKind::NoRepository {
                tracing::warn!("damage: {}", error.full_message());
            }
            findings.unknown.push(Topic::Damage);
        }
    }
}

/// The newest checked point does not boot, or reaches an earlier stage than points before it. An unchecked newer point
/// proves nothing else.
fn boot_condition(machine: &MachineSummary) -> Option<Condition> {
    let badge = machine.last_boot_check.as_ref()?;
    let (name, address) = (&machine.machine, &badge.address);
    let (severity, text) = match badge.verdict {
        BootVerdict::Failed => (Severity::Fail, format!("{address} does not boot")),
        _ if badge.is_worse => (
            Severity::Warn,
            format!("{address} reaches an earlier stage than usual in its boot check"),
        ),
        _ => return None,
    };
    let mut condition = Condition::new(format!("boot:{name}"), Topic::Boot, severity, text);
    condition.details = match &badge.stage {
        Some(stage) => format!("The boot check reached the stage {stage}."),
        None => "The boot check reached no stage.".to_owned(),
    };
    if let Some(good) = &machine.last_verified_boot {
        condition.details += &format!("\nThe last point that booted: {}.", good.address);
    }
    let command = format!("coldrise show {address}");
    Some(condition.of_machine(name).advise("look at its screenshot and log", Some(command)))
}
