//! Recovered machines whose host cannot be reached: they stand still when they need their disks.

use coldrise_block::Result;
use coldrise_runs::{RunRecord, RunsFolder};

use super::condition::{Condition, Severity, Topic};

/// A connection that is lost for less comes back by itself, in milliseconds.
const GRACE_MS: i64 = 15_000;

/// The conditions of all running recoveries, as they last recorded their machine's state.
///
/// # Errors
/// Those of reading runs.
pub(super) fn read(runs: &RunsFolder, now_ms: i64) -> Result<Vec<Condition>> {
    let running = runs.running("recover")?;
    Ok(running.iter().filter_map(|run| condition(run, now_ms)).collect())
}

fn condition(run: &RunRecord, now_ms: i64) -> Option<Condition> {
    let progress = run.progress.as_ref()?;
    let text = |name: &str| progress.get(name)?.as_str();
    let since_ms = progress.get("state_since_ms")?.as_i64()?;
    if text("state")? != "unreachable" || now_ms - since_ms < GRACE_MS {
        return None;
    }
    let (session, domain, host) = (text("session")?, text("domain")?, text("host")?);
    let summary = format!("host {host} cannot be reached, where {domain} runs from the backup");
    let mut found =
        Condition::new(format!("host:{host}:{session}"), Topic::Host, Severity::Fail, summary);
    found.machine = run.plan.as_ref().and_then(|plan| plan.machine.clone());
    found.run = Some(run.id.clone());
    found.details =
        format!("{domain} pauses when it needs its disks, and sees no error. Session: {session}.");
    Some(found.advise(
        "bring the host or its network back: the machine then continues by itself",
        Some(format!("coldrise host check {host}")),
    ))
}

#[cfg(test)]
mod tests {
    use coldrise_runs::{RunRecord, State};
    use serde_json::{Value, json};

    use super::{GRACE_MS, condition};

    fn run(progress: Value) -> RunRecord {
        RunRecord {
            id: "1-recover".to_owned(),
            state: State::Running,
            plan: None,
            result: None,
            ended_at_ms: None,
            machine: None,
            progress: Some(progress),
            problems: Vec::new(),
        }
    }

    #[test]
    fn a_host_that_stays_away_is_a_condition() {
        let of = |state: &str| {
            run(json!({ "session": "web01-1", "domain": "web01", "host": "hv1", "state": state,
                        "state_since_ms": 1000 }))
        };
        assert_eq!(condition(&of("running"), 1000 + GRACE_MS), None);
        assert_eq!(condition(&of("unreachable"), 999 + GRACE_MS), None, "it may come back");
        let found = condition(&of("unreachable"), 1000 + GRACE_MS).unwrap();
        assert_eq!(found.key, "host:hv1:web01-1");
        assert!(found.summary.contains("hv1 cannot be reached"), "{}", found.summary);
        // Recorded by an older program.
        assert_eq!(condition(&run(json!({ "state": "unreachable" })), i64::MAX), None);
    }
}
