//! A job: what is done, with which machines, and when.

use std::collections::{BTreeMap, BTreeSet};

use coldrise_block::{Error, Result};
use coldrise_hosts::parse_host_name;
use coldrise_inventory::{BootStage, Retention};
use coldrise_schedule::{Calendar, Window};
use coldrise_store::{DiskName, MachineName};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::commands::{check_device, check_rate, check_source};
use super::protect_live::DEFAULT_EVERY_SECONDS;
use crate::invalid::invalid;
use crate::jobs::pattern::JobPattern;
use crate::pattern::check_list;

/// Bounds of a job's document.
const MAX_MACHINES: usize = 1000;
const MAX_DISKS: usize = 64;
const MAX_HOSTS: usize = 64;
const MAX_SCHEDULE_LINES: usize = 16;
const MAX_RETRIES: u32 = 20;
const MAX_RETRY_SECONDS: u32 = 3600;
const MAX_AGE_LIMIT_HOURS: u32 = 24 * 366;
const MAX_PARALLEL: u32 = 64;
const MAX_BEHIND_LIMIT_MINUTES: u32 = 366 * 24 * 60;
const MAX_EVERY_SECONDS: u32 = 3600;
const MAX_CONSISTENT_MINUTES: u32 = 24 * 60;
const MAX_LAG_LIMIT_SECONDS: u32 = 7 * 24 * 3600;

/// What a job does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum JobKind {
    /// A new restore point of each machine.
    Backup,
    /// Read stored data: the whole repository, or the latest point of each named machine.
    Verify,
    /// Remove restore points by the rules of `retention`.
    Prune,
    /// Free the space of unreferenced data.
    Gc,
    /// Boot the latest point of each machine.
    CheckBoot,
    /// Copy points to another repository.
    Copy,
    /// Follow machines while they run elsewhere, as `coldrise protect-live` does: one run per machine is kept running.
    ProtectLive,
}

/// When a backup is followed by a boot check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum BootCheckTime {
    #[default]
    Never,
    /// After each backup.
    Always,
    /// After a backup, if the machine's last check by this job is a day (at least 20 hours) ago.
    Daily,
    /// After a backup, if the machine's last check by this job is 7 days ago.
    Weekly,
}

/// What starts copies in addition to the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CopyFollows {
    /// A machine is copied after each of its backups by a job.
    Backups,
    /// A machine is copied whenever it has a point that is not there, from any source.
    Points,
}

/// How points are booted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = JobBootCheck)]
pub(crate) struct BootCheck {
    /// For jobs of kind backup.
    #[serde(default)]
    pub(crate) when: BootCheckTime,
    /// The stage to reach; login if absent, or service with `check_port`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) until: Option<BootStage>,
    /// A TCP port of the machine that has to accept connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub(crate) check_port: Option<u16>,
    /// The host that runs the machines, as `coldrise host add` has named it; the service's own if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) on: Option<String>,
}

/// A job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Job {
    /// 1 to 63 of a-z, 0-9, and . _ -
    #[schema(pattern = "^[a-z0-9][a-z0-9._-]{0,62}$")]
    pub(crate) name: String,
    #[serde(default = "yes")]
    pub(crate) enabled: bool,
    pub(crate) kind: JobKind,
    /// Backup: the names of the machines, with libvirt also patterns. Protect-live: the names. Verify, prune, check-boot: patterns of machines that have
    /// points; all if absent. A pattern matches a machine's name, or its display name in any case.
    #[serde(default = "all_machines")]
    #[schema(max_items = 1000)]
    pub(crate) machines: Vec<JobPattern>,
    /// Backup: the source of each disk, as `coldrise backup` takes it: the absolute path of an image file
    /// or block device, or an NBD URI without a password. `{machine}` and `{disk}` stand for the
    /// names, so that one entry is enough for many machines: `"vda": "raw:/dev/vg/{machine}"`.
    #[serde(
        deserialize_with = "coldrise_requests::unique_names",
        default,
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub(crate) disks: BTreeMap<String, String>,
    /// Backup: machines whose disks differ from `disks`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) disks_of: BTreeMap<String, BTreeMap<String, String>>,
    /// Backup: the file with the machine's configuration; `{machine}` stands for its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) config: Option<String>,
    /// Backup: read only what this dirty bitmap marks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bitmap: Option<String>,
    /// Backup, protect-live (required): the machines are read while they run: `libvirt`, `libvirt:` and a domain's name,
    /// or `qmp:` and the absolute path of QEMU's monitor; `{machine}` stands for the name. Then `disks` names
    /// a device for each disk, or is absent for all writable disks. With libvirt `machines` of a backup can
    /// have patterns, such as `web*`: every domain that matches, running or not.
    /// Protect-live also: `live`, for machines that run from Coldrise, whose sessions are sent `to` another site.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) from: Option<String>,
    /// With `from` and libvirt: the hosts on which to look for the machines, by their names from `coldrise host add`; this host if absent.
    /// Each machine is backed up on the host where it runs. Protect-live: at most one.
    #[serde(deserialize_with = "some_hosts", default, skip_serializing_if = "Vec::is_empty")]
    #[schema(min_items = 1, max_items = 64)]
    pub(crate) hosts: Vec<String>,
    /// With `from`: QEMU copies the disks into scratch files first, as `coldrise backup --push` says.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) push: bool,
    /// With `from` and libvirt: freeze the guest's file systems for the instant through the guest agent.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) quiesce: bool,
    /// With `from` and qmp: the absolute path of the guest agent's socket, to freeze the file systems for the
    /// instant; `{machine}` stands for the name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) agent: Option<String>,
    /// Protect-live: how often the changes are read; 5 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 3600, default = json!(DEFAULT_EVERY_SECONDS))]
    pub(crate) every_seconds: Option<u32>,
    /// Protect-live: how often the guest's file systems are frozen for the instant through the guest agent; never if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1440)]
    pub(crate) consistent_every_minutes: Option<u32>,
    /// Protect-live: an alarm is raised if a machine's session is further behind; 60, or 10 times `every_seconds` if that is
    /// more, if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 604800)]
    pub(crate) lag_limit_seconds: Option<u32>,
    /// When: calendar events as in systemd.time(7), such as `Mon..Fri 22:00`. Without any, the job
    /// is started by hand. Protect-live: when a restore point of each machine is made.
    #[serde(default)]
    #[schema(max_items = 16)]
    pub(crate) schedule: Vec<String>,
    /// Its runs start only in this part of the day, such as `22:00-06:00 Mon..Fri`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) window: Option<String>,
    /// Maximum number of its runs at once. Copies with a limit on their rate: 1 if absent, because the limit is that of each run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 64)]
    pub(crate) parallel: Option<u32>,
    /// Copy: the target: the name of a link, the absolute path of a repository on this host, or a bucket, s3://BUCKET/PREFIX.
    /// Protect-live: a link whose site gets the time marks as they are made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) to: Option<String>,
    /// Copy: the file with the passphrase of a repository on this host; that of the service's repository if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) to_passphrase_file: Option<String>,
    /// Copy: the prefix that is added to the machines' names there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) prefix: Option<String>,
    /// Copy: only this many of the newest points of each machine that are missing there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub(crate) last: Option<u32>,
    /// Copy: also points that are older than the newest one there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) all: bool,
    /// Copy: what starts it in addition to the schedule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) follows: Option<CopyFollows>,
    /// Copy: rates by the time of day, as `coldrise copy --window` takes them, such as `Mon..Fri 08:00-18:00=5M`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 16)]
    pub(crate) rate_windows: Vec<String>,
    /// Copy: an alarm is raised if a point of a machine is not there after this time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 527040)]
    pub(crate) behind_limit_minutes: Option<u32>,
    /// Backup: maximum bytes per second that each of its runs reads from the sources; no limit if
    /// absent. Copy: maximum bytes per second that each of its runs sends, or reads if the other repository is on this host.
    /// Protect-live with `to`: maximum bytes per second that each of its runs sends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 65536)]
    pub(crate) rate_bytes_per_second: Option<u64>,
    /// Backup: the rules by which each machine is pruned after its backup. Prune: the rules.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) retention: Option<Retention>,
    /// Backup: the boot check that follows. Check-boot: how.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) boot_check: Option<BootCheck>,
    /// Backup: an alarm is raised if a machine's last good backup is older.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 8784)]
    pub(crate) age_limit_hours: Option<u32>,
    /// Number of further attempts after a failure. Protect-live: those of making a restore point; a machine is followed
    /// again and again.
    #[serde(default = "default_retries")]
    #[schema(maximum = 20)]
    pub(crate) retries: u32,
    /// Time before the first of them; it doubles with each, up to 60 times as long.
    #[serde(default = "default_retry_seconds")]
    #[schema(minimum = 1, maximum = 3600)]
    pub(crate) retry_seconds: u32,
    /// Verify: read about this percentage of the chunks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(exclusive_minimum = 0, maximum = 100)]
    pub(crate) sample_percent: Option<f64>,
}

fn yes() -> bool {
    true
}

/// An empty list would mean this host, as an absent one.
fn some_hosts<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Vec<String>, D::Error> {
    let hosts = Vec::deserialize(from)?;
    match hosts.is_empty() {
        true => Err(D::Error::custom(
            "the list is empty: name a host, or leave the field out for the machines of this host",
        )),
        false => Ok(hosts),
    }
}

fn all_machines() -> Vec<JobPattern> {
    vec![JobPattern::all()]
}

fn default_retries() -> u32 {
    3
}

fn default_retry_seconds() -> u32 {
    60
}

impl Job {
    /// The hosts that it names: those of its machines, and the one that boots their points.
    pub(crate) fn named_hosts(&self) -> impl Iterator<Item = &String> {
        self.hosts.iter().chain(self.boot_check.iter().filter_map(|check| check.on.as_ref()))
    }

    /// Whether it copies, and each of its runs keeps below a rate.
    pub(super) fn limits_a_line(&self) -> bool {
        let is_limited = self.rate_bytes_per_second.is_some() || !self.rate_windows.is_empty();
        self.kind == JobKind::Copy && is_limited
    }

    /// Checks a document that a caller gave.
    ///
    /// # Errors
    /// `InvalidInput`, with the field.
    pub(crate) fn check(&self) -> Result<()> {
        // The rules of machines' names suit jobs: safe in addresses, paths and metrics.
        MachineName::parse(&self.name).map_err(|_| {
            invalid("name: use 1 to 63 of a-z 0-9 . _ - and start with a letter or digit")
        })?;
        self.check_times()?;
        let is_backup = self.kind == JobKind::Backup;
        let only_live = [
            ("disks", !self.disks.is_empty()),
            ("from", self.from.is_some()),
            ("hosts", !self.hosts.is_empty()),
            ("push", self.push),
            ("agent", self.agent.is_some()),
        ];
        let is_read = is_backup || self.protects_live();
        if let Some((field, _)) = only_live.iter().find(|(_, given)| *given && !is_read) {
            return Err(invalid(format!(
                "{field}: only jobs of kind backup or protect-live have it"
            )));
        }
        let only_backup = [
            ("disks_of", !self.disks_of.is_empty()),
            ("config", self.config.is_some()),
            ("bitmap", self.bitmap.is_some()),
            ("quiesce", self.quiesce),
            ("age_limit_hours", self.age_limit_hours.is_some()),
        ];
        if let Some((field, _)) = only_backup.iter().find(|(_, given)| *given && !is_backup) {
            return Err(invalid(format!("{field}: only jobs of kind backup have it")));
        }
        let is_copy = self.kind == JobKind::Copy;
        let has_rate = is_backup || is_copy || (self.protects_live() && self.to.is_some());
        if self.rate_bytes_per_second.is_some() && !has_rate {
            return Err(invalid(
                "rate_bytes_per_second: only jobs of kind backup or copy have it, and protect-live with to",
            ));
        }
        if !is_copy {
            self.check_is_no_copy()?;
        }
        if !self.protects_live() {
            self.check_is_no_protect_live()?;
        }
        let has_rules = self.retention.as_ref().is_some_and(|rules| *rules != Retention::default());
        match self.kind {
            JobKind::Backup => self.check_backup()?,
            JobKind::Prune if !has_rules => {
                return Err(invalid("retention: a prune needs at least one rule"));
            }
            JobKind::Copy => self.check_copy()?,
            JobKind::ProtectLive => self.check_protect_live()?,
            JobKind::Gc if !self.concerns_all() || self.retention.is_some() => {
                return Err(invalid("machines, retention: a gc concerns the whole repository"));
            }
            _ => check_list(&self.machines)?,
        }
        if self.retention.is_some() && !has_rules {
            return Err(invalid("retention: give at least one rule, or leave it out"));
        }
        if self.sample_percent.is_some_and(|percent| !(percent > 0.0 && percent <= 100.0)) {
            return Err(invalid("sample_percent: above 0 and up to 100"));
        }
        if self.sample_percent.is_some() && !self.concerns_all() {
            return Err(invalid("sample_percent: only with all machines"));
        }
        if self.boot_check.as_ref().is_some_and(|check| check.check_port == Some(0)) {
            return Err(invalid("boot_check.check_port: 1 to 65535"));
        }
        if let Some(host) = self.boot_check.as_ref().and_then(|check| check.on.as_ref()) {
            parse_host_name(host).map_err(|error| error.context("boot_check.on"))?;
        }
        Ok(())
    }

    fn check_times(&self) -> Result<()> {
        if self.schedule.len() > MAX_SCHEDULE_LINES {
            return Err(invalid(format!("schedule: at most {MAX_SCHEDULE_LINES} lines")));
        }
        for line in &self.schedule {
            let dates = Calendar::parse(line).map_err(|error| error.context("schedule"))?;
            if dates.next_after(jiff::Timestamp::now()).is_none() {
                return Err(invalid(format!("schedule: '{line}' never happens again")));
            }
        }
        self.window()?;
        let bounds = [
            ("parallel", self.parallel, 1, MAX_PARALLEL),
            ("age_limit_hours", self.age_limit_hours, 1, MAX_AGE_LIMIT_HOURS),
            ("behind_limit_minutes", self.behind_limit_minutes, 1, MAX_BEHIND_LIMIT_MINUTES),
            ("every_seconds", self.every_seconds, 1, MAX_EVERY_SECONDS),
            ("consistent_every_minutes", self.consistent_every_minutes, 1, MAX_CONSISTENT_MINUTES),
            ("lag_limit_seconds", self.lag_limit_seconds, 1, MAX_LAG_LIMIT_SECONDS),
            ("retries", Some(self.retries), 0, MAX_RETRIES),
            ("retry_seconds", Some(self.retry_seconds), 1, MAX_RETRY_SECONDS),
        ];
        for (field, value, least, most) in bounds {
            if value.is_some_and(|value| value < least || value > most) {
                return Err(invalid(format!("{field}: {least} to {most}")));
            }
        }
        Ok(())
    }

    /// The machines that it names.
    ///
    /// # Errors
    /// `InvalidInput` for too many, twice the same, and names that do not address a machine.
    pub(super) fn check_machines(&self) -> Result<BTreeSet<MachineName>> {
        let count = self.machines.len();
        if count == 0 || count > MAX_MACHINES {
            return Err(invalid(format!("machines: name 1 to {MAX_MACHINES} machines")));
        }
        let mut names = BTreeSet::new();
        let is_libvirt = self.from.as_deref().is_some_and(|from| from.starts_with("libvirt"));
        for machine in &self.machines {
            if is_libvirt && machine.has_wildcards() {
                continue;
            }
            // libvirt finds a domain by another name.
            let other =
                machine.stored_as().filter(|_| is_libvirt && !machine.as_str().starts_with('-'));
            let name = MachineName::parse(machine.as_str()).or_else(|error| {
                other.ok_or(error.context("machines").advise(
                    "a backup names each machine; patterns and display names are for other kinds, and for \"from\": \"libvirt\"",
                ))
            })?;
            if !names.insert(name) {
                return Err(invalid(format!("machines: {} is named twice", machine.as_str())));
            }
        }
        Ok(names)
    }

    pub(super) fn check_backup(&self) -> Result<()> {
        let names = self.check_machines()?;
        for machine in self.disks_of.keys() {
            if !names.iter().any(|name| name.as_str() == machine) {
                return Err(invalid(format!("disks_of: {machine} is not among machines")));
            }
        }
        if self.config.as_deref().is_some_and(|path| !path.starts_with('/')) {
            return Err(invalid("config: give an absolute path"));
        }
        if self.bitmap.as_deref().is_some_and(|name| name.is_empty() || name.len() > 1023) {
            return Err(invalid("bitmap: 1 to 1023 bytes"));
        }
        self.check_disks(&names)?;
        check_rate(self.rate_bytes_per_second)?;
        if let Some(config) = &self.config {
            check_source(config).map_err(|error| error.context("config"))?;
        }
        Ok(())
    }

    fn check_disks(&self, names: &BTreeSet<MachineName>) -> Result<()> {
        let least = usize::from(self.from.is_none());
        for name in names {
            let disks = self.disks_of(name.as_str());
            if disks.len() < least || disks.len() > MAX_DISKS {
                return Err(invalid(format!(
                    "disks: give {least} to {MAX_DISKS} disks for {name}"
                )));
            }
        }
        for (disk, source) in self.disks.iter().chain(self.disks_of.values().flatten()) {
            DiskName::parse(disk).map_err(|error| error.context("disks"))?;
            let checked = match self.from {
                Some(_) => check_device(source),
                None => check_source(source),
            };
            checked.map_err(|error| error.context(format!("disks: {disk}")))?;
        }
        let is_one = matches!(&self.machines[..], [only] if !only.has_wildcards());
        let names_one = |from: &str| from != "libvirt" && !from.contains("{machine}");
        if self.from.as_deref().is_some_and(|from| !is_one && names_one(from)) {
            return Err(invalid(
                "from: it names one machine, and the job has several: write libvirt, or {machine} in the name",
            ));
        }
        if self.agent.as_deref().is_some_and(|agent| !is_one && !agent.contains("{machine}")) {
            return Err(invalid(
                "agent: it is of one guest, and the job has several: write {machine} in the name",
            ));
        }
        if self.hosts.len() > MAX_HOSTS {
            return Err(invalid(format!("hosts: at most {MAX_HOSTS}")));
        }
        for host in &self.hosts {
            parse_host_name(host).map_err(|error| error.context("hosts"))?;
        }
        let is_libvirt = self.from.as_deref().is_some_and(|from| from.starts_with("libvirt"));
        if !self.hosts.is_empty() && !is_libvirt {
            return Err(invalid("hosts: only with \"from\": \"libvirt\""));
        }
        let Some(from) = &self.from else {
            return match (self.push || self.quiesce, &self.agent) {
                (false, None) => Ok(()),
                _ => Err(invalid("push, quiesce, agent: only with from")),
            };
        };
        if self.bitmap.is_some() {
            return Err(invalid("bitmap: not with from, which makes its own"));
        }
        if let Some(rest) = from.strip_prefix("libvirt") {
            if self.agent.is_some() {
                return Err(invalid("agent: libvirt knows the agent's socket; write quiesce"));
            }
            return match rest.strip_prefix(':') {
                None if rest.is_empty() => Ok(()),
                Some(domain) => check_device(domain).map_err(|error| error.context("from")),
                None => Err(invalid("from: write libvirt, or libvirt:DOMAIN")),
            };
        }
        if self.quiesce {
            return Err(invalid("quiesce: only with libvirt; with qmp give the agent's socket"));
        }
        let Some(socket) = from.strip_prefix("qmp:").filter(|path| path.starts_with('/')) else {
            return Err(invalid(
                "from: write libvirt, or qmp:/PATH such as qmp:/run/qemu/{machine}.qmp",
            ));
        };
        check_source(&format!("raw:{socket}")).map_err(|error| error.context("from"))?;
        match &self.agent {
            Some(path) => check_source(&format!("raw:{path}")).map_err(|e| e.context("agent")),
            None => Ok(()),
        }
    }

    /// The sources of a machine's disks.
    pub(super) fn disks_of(&self, machine: &str) -> &BTreeMap<String, String> {
        self.disks_of.get(machine).unwrap_or(&self.disks)
    }

    /// Whether no machine is named.
    pub(super) fn concerns_all(&self) -> bool {
        self.machines.contains(&JobPattern::all())
    }

    /// The part of the day in which runs start.
    ///
    /// # Errors
    /// `InvalidInput` if it is malformed.
    pub(super) fn window(&self) -> Result<Option<Window>> {
        let window = self.window.as_deref().map(str::parse).transpose();
        window.map_err(|error: Error| error.context("window"))
    }
}
