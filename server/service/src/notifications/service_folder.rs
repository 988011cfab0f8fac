//! The room for the service's own folder. Without it logins fail, and neither changes nor alarms are stored.
//!
//! So the warning comes early, and the alarm of a drive that is full is kept in memory until there is room again.

use std::path::Path;

use super::alarms::Alarm;
use super::condition::{Condition, Severity, Topic};
use super::space::Drive;
use crate::database::FREE_SPACE;
use crate::events::What;
use crate::service::Service;

/// The key of the alarm.
pub(super) const KEY: &str = "service-folder";
/// Warn and fail below these, in bytes: the service needs some MiB, runs and their logs more.
const WARN_BYTES: i64 = 256 << 20;
const FAIL_BYTES: i64 = 32 << 20;

/// Less than this is full: the database may still find room in its own files for a while.
const FULL_BYTES: i64 = 1 << 20;

pub(super) fn is_full(drive: Drive) -> bool {
    drive.available_bytes < FULL_BYTES
}

fn alarm(folder: &Path, severity: Severity, what: &str) -> Condition {
    let text = format!("the drive of the service's folder {} is {what}", folder.display());
    let mut condition = Condition::new(KEY, Topic::Space, severity, text);
    condition.details =
        "On a full drive users cannot log in, and no change, run or message is stored. Backups that \
        are due wait."
            .to_owned();
    condition.advise(FREE_SPACE, Some(format!("df -h {}", folder.display())))
}

/// The condition of the service's `folder`, on `drive`. `held` is the severity of the alarm that holds: it ends
/// only at a tenth more than its limit.
pub(super) fn condition(folder: &Path, drive: Drive, held: Option<Severity>) -> Option<Condition> {
    let is_below = |limit: i64, severity: Severity| {
        let margin = if held >= Some(severity) { limit / 10 } else { 0 };
        drive.available_bytes < limit + margin
    };
    if is_below(FAIL_BYTES, Severity::Fail) {
        Some(alarm(folder, Severity::Fail, "almost full: less than 32 MiB are free"))
    } else if is_below(WARN_BYTES, Severity::Warn) {
        Some(alarm(folder, Severity::Warn, "filling up: less than 256 MiB are free"))
    } else {
        None
    }
}

/// Notes whether the database has no room for alarms, and tells of a change.
pub(super) fn note(service: &Service, is_full: bool, now_ms: i64) {
    let mut unstored = service.messenger.unstored.lock();
    if unstored.is_some() == is_full {
        return;
    }
    *unstored = is_full
        .then(|| Alarm::unstored(alarm(&service.options.state, Severity::Fail, "full"), now_ms));
    drop(unstored);
    service.events.send(What::Alarm { key: KEY.to_owned(), machine: None });
}

#[cfg(test)]
mod tests {
    use super::{Drive, Severity, condition};
    use std::path::Path;

    #[test]
    fn severity_changes_at_the_limits_with_hysteresis() {
        let severity = |available_mib: i64, held: Option<Severity>| {
            let drive = Drive { used_bytes: 0, available_bytes: available_mib << 20 };
            condition(Path::new("/var/lib/coldrise"), drive, held).map(|found| found.severity)
        };
        assert_eq!(severity(256, None), None);
        assert_eq!(severity(255, None), Some(Severity::Warn));
        assert_eq!(severity(270, Some(Severity::Warn)), Some(Severity::Warn));
        assert_eq!(severity(282, Some(Severity::Warn)), None);
        assert_eq!(severity(31, Some(Severity::Warn)), Some(Severity::Fail));
        assert_eq!(severity(34, Some(Severity::Fail)), Some(Severity::Fail));
        assert_eq!(severity(36, Some(Severity::Fail)), Some(Severity::Warn));
    }
}
