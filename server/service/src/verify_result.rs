//! The findings of a verify, from the result of its run.

use std::collections::BTreeSet;

use coldrise_block::ErrorKind;
use coldrise_runs::{RunRecord, State};
use serde_json::Value;

/// Maximum number of disks and of damaged things that a message names.
const MAX_NAMED: usize = 20;
/// The lists of the answer of `coldrise verify`, and what they count.
const LISTS: [(&str, &str); 6] = [
    ("damaged_pages", "page"),
    ("damaged_documents", "document"),
    ("damaged_layers", "layer"),
    ("damaged_markers", "marker"),
    ("damaged_files", "file"),
    ("affected", "affected disk"),
];

/// Damage that a verify has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FoundDamage {
    /// One line: how much of what.
    pub(crate) summary: String,
    /// The affected disks and the damaged documents, one per line.
    pub(crate) details: String,
    /// The machines and sessions of the affected disks: `web01`, `live/trial`.
    pub(crate) affected: BTreeSet<String>,
}

impl FoundDamage {
    /// The damage that this run has found; `None` if it is not a verify, has found none, or could not
    /// read.
    pub(crate) fn of(run: &RunRecord) -> Option<FoundDamage> {
        let is_verify = run.plan.as_ref().is_some_and(|plan| plan.command == "verify");
        let result = run.result.as_ref().filter(|_| is_verify && run.state == State::Failed)?;
        // Damage is an answer and no error.
        if result.exit_code != coldrise_runs::exit_code(ErrorKind::Corrupt)
            || result.error.is_some()
        {
            return None;
        }
        // Very long answers are not kept.
        let answer = result.counts.as_ref().unwrap_or(&Value::Null);
        let list = |name: &str| answer.get(name).and_then(Value::as_array).map_or(&[][..], |v| v);
        let chunks = answer.get("damaged_chunks").and_then(Value::as_u64).unwrap_or(0);
        let counts = LISTS.iter().map(|(name, what)| (list(name).len() as u64, *what));
        let counted: Vec<String> = std::iter::once((chunks, "chunk"))
            .chain(counts)
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}{}", if count == 1 { "" } else { "s" }))
            .collect();
        let text = |item: &Value, name: &str| {
            item.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
        };
        let disks: Vec<String> = list("affected").iter().map(|item| text(item, "disk")).collect();
        let affected = disks.iter().map(|disk| owner(disk)).collect();
        let mut lines: Vec<String> = disks.iter().map(|disk| format!("affected: {disk}")).collect();
        for (name, _) in LISTS.iter().filter(|(name, _)| *name != "affected") {
            let damaged = list(name).iter();
            lines.extend(damaged.map(|item| {
                let what = Some(text(item, "what")).filter(|what| !what.is_empty());
                let what = what.map_or_else(String::new, |what| format!("{what}: "));
                format!("damaged: {what}{}", text(item, "reason"))
            }));
        }
        if lines.len() > MAX_NAMED {
            let more = lines.len() - MAX_NAMED;
            lines.truncate(MAX_NAMED);
            lines.push(format!("and {more} more: see the run"));
        }
        Some(FoundDamage {
            summary: match counted.is_empty() {
                true => "the verify found damage".to_owned(),
                false => format!("the verify found damage: {}", counted.join(", ")),
            },
            details: lines.join("\n"),
            affected,
        })
    }
}

/// `web01` of `web01/POINT/vda`, `live/trial` of `live/trial/vda`.
fn owner(disk: &str) -> String {
    let parts = if disk.starts_with("live/") { 2 } else { 1 };
    disk.split('/').take(parts).collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::FoundDamage;
    use coldrise_runs::RunRecord;
    use serde_json::{Value, json};

    fn verify(exit_code: u8, error: Value, counts: Value) -> RunRecord {
        let plan = json!({
            "command": "verify", "arguments": ["verify"], "repository": null, "machine": null,
            "point": null, "started_at_ms": 1, "job": "check",
            "who": {"uid": 0, "user": null, "pid": 1, "host": "h", "boot_id": "b"},
        });
        let result =
            json!({"exit_code": exit_code, "error": error, "counts": counts, "ended_at_ms": 2});
        RunRecord {
            id: "20261123T014500Z-8001-verify".to_owned(),
            state: coldrise_runs::State::Failed,
            plan: serde_json::from_value(plan).unwrap(),
            result: serde_json::from_value(result).unwrap(),
            ended_at_ms: Some(2),
            progress: None,
            machine: None,
            problems: Vec::new(),
        }
    }

    #[test]
    fn damage_lists_the_affected_machines_and_disks() {
        let disks = |machines: &[&str]| -> Vec<Value> {
            machines.iter().map(|m| json!({"disk": format!("{m}/x/vda"), "ranges": []})).collect()
        };
        let answer = json!({"is_clean": false, "damaged_chunks": 2, "damaged_files": [
            {"what": "db/000012.sst", "reason": "its checksum is wrong"}], "affected": disks(&["web01"])});
        let found = FoundDamage::of(&verify(1, Value::Null, answer)).unwrap();
        let of_one = ["web01".to_owned()].into();
        assert_eq!(found.summary, "the verify found damage: 2 chunks, 1 file, 1 affected disk");
        let details = "affected: web01/x/vda\ndamaged: db/000012.sst: its checksum is wrong";
        assert_eq!((found.details.as_str(), found.affected), (details, of_one));
        let answer = json!({"affected": [{"disk": "live/trial/vda"}, {"disk": "db01/x/vda"}]});
        let found = FoundDamage::of(&verify(1, Value::Null, answer)).unwrap();
        assert_eq!(found.affected, ["db01".to_owned(), "live/trial".to_owned()].into());
        let many: Vec<&str> = vec!["web01"; 1000];
        let found = FoundDamage::of(&verify(1, Value::Null, json!({"affected": disks(&many)})));
        assert!(found.unwrap().details.ends_with("\nand 980 more: see the run"));
        // An answer that was too long to be kept.
        let found = FoundDamage::of(&verify(1, Value::Null, Value::Null)).unwrap();
        assert_eq!(found.summary, "the verify found damage");
    }

    #[test]
    fn runs_without_findings_are_not_reported_as_damage() {
        let error = json!({"kind": "io", "message": "cannot be read"});
        assert_eq!(FoundDamage::of(&verify(1, error, Value::Null)), None);
        assert_eq!(FoundDamage::of(&verify(3, Value::Null, json!({}))), None, "could not be read");
        let mut other = verify(1, Value::Null, json!({"is_clean": false}));
        other.plan.as_mut().unwrap().command = "backup".to_owned();
        assert_eq!(FoundDamage::of(&other), None);
    }
}
