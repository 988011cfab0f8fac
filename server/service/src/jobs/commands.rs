//! The commands of a job's runs, as vectors of arguments. No shell ever sees them.

use std::collections::BTreeMap;

use coldrise_block::Result;
use coldrise_hypervisors::virsh::Virsh;
use coldrise_inventory::Retention;
use coldrise_requests::{Backup, BackupOptions, CheckBoot, CommandLine, Prune, Verify};

use super::copy;
use super::job::{BootCheck, Job, JobKind};
use super::pattern::{JobPattern, MachineNames, any_matches, named};
use super::protect_live::seal;
use crate::invalid::invalid;

const MAX_SOURCE_BYTES: usize = 1024;
/// The lowest rate that `coldrise backup` takes, in bytes per second.
const MIN_RATE: u64 = 64 << 10;
const FORMATS: [&str; 5] = ["raw", "qcow2", "vmdk", "vhd", "vhdx"];
const NBD_SCHEMES: [&str; 6] = ["nbd", "nbds", "nbd+unix", "nbds+unix", "nbd+vsock", "nbds+vsock"];

/// Checks a source, which may have placeholders. Jobs are shown to every user who sees the machines, so
/// they hold no password.
///
/// # Errors
/// `InvalidInput`.
pub(crate) fn check_source(text: &str) -> Result<()> {
    if text.len() > MAX_SOURCE_BYTES || text.chars().any(char::is_control) {
        let text =
            format!("a source has at most {MAX_SOURCE_BYTES} bytes, and no control characters");
        return Err(invalid(text));
    }
    if expand(text, "m", "d").contains(['{', '}']) {
        return Err(invalid(format!("'{text}': the placeholders are {{machine}} and {{disk}}")));
    }
    if let Some((scheme, rest)) = text.split_once("://") {
        if !NBD_SCHEMES.contains(&scheme) {
            return Err(invalid(format!("'{scheme}://': only NBD URIs can be read")));
        }
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        let user = authority.rsplit_once('@').map_or("", |(user, _)| user);
        return match user.contains(':') {
            // The text itself is not repeated: it has the password.
            true => Err(invalid("the URI contains a password, which the job would show")
                .advise("use TLS with keys in files: tls-psk-file=FILE or tls-certificates=DIR")),
            false => Ok(()),
        };
    }
    let path = match text.split_once(':') {
        Some((word, path)) if FORMATS.contains(&word) => path,
        _ => text,
    };
    match path.starts_with('/') {
        true => Ok(()),
        false => Err(invalid(format!("'{text}' is neither an absolute path nor an NBD URI"))
            .advise("write [FORMAT:]/PATH, such as raw:/dev/vg/{machine}")),
    }
}

/// Checks the name of a device in QEMU, which may have placeholders.
///
/// # Errors
/// `InvalidInput`.
pub(crate) fn check_device(text: &str) -> Result<()> {
    let is_name = !text.is_empty() && !text.chars().any(char::is_control);
    if is_name && text.len() <= MAX_SOURCE_BYTES && !expand(text, "m", "d").contains(['{', '}']) {
        return Ok(());
    }
    Err(invalid(format!("'{}' is not a device name", text.escape_debug())))
}

/// Checks a rate, in bytes per second, as `coldrise backup --rate` does.
///
/// # Errors
/// `InvalidInput`.
pub(crate) fn check_rate(bytes_per_second: Option<u64>) -> Result<()> {
    match bytes_per_second {
        Some(rate) if rate < MIN_RATE => {
            let text =
                format!("rate_bytes_per_second: {rate} is too slow: give {MIN_RATE} or more");
            Err(invalid(text).advise("for no limit, leave the rate out"))
        }
        _ => Ok(()),
    }
}

pub(super) fn expand(template: &str, machine: &str, disk: &str) -> String {
    template.replace("{machine}", machine).replace("{disk}", disk)
}

/// The URI of this host's libvirt, if the job finds its machines there. A run does not have the service's environment.
pub(super) fn local_libvirt(job: &Job) -> Option<String> {
    let is_libvirt = job.from.as_deref().is_some_and(|from| from.starts_with("libvirt"));
    let virsh = Virsh::local(None).ok().filter(|_| is_libvirt && job.hosts.is_empty())?;
    Some(virsh.uri().to_owned())
}

/// The words of `coldrise backup`. `domain` is libvirt's name for the machine, or the machine's own.
pub(crate) fn backup(job: &Job, machine: &str, domain: &str) -> Vec<String> {
    let of_machine = |template: &String| expand(template, machine, "");
    let disks = job.disks_of(machine).iter();
    let request = Backup {
        machine: domain.to_owned(),
        display_name: None,
        disks: disks
            .map(|(disk, from)| format!("{disk}={}", expand(from, machine, disk)))
            .collect(),
        rate_bytes_per_second: job.rate_bytes_per_second,
    };
    let options = BackupOptions {
        from: job.from.as_ref().map(|from| expand(from, domain, "")),
        on: job.hosts.clone(),
        connect: local_libvirt(job),
        push: job.push,
        quiesce: job.quiesce || job.agent.is_some(),
        agent: job.agent.as_ref().map(of_machine).map(Into::into),
        config: job.config.as_ref().map(of_machine).map(Into::into),
        bitmap: job.bitmap.clone(),
    };
    CommandLine::new("backup").with(&request).with(&options).words()
}

/// The words of `coldrise check-boot`.
pub(super) fn check_boot(check: Option<&BootCheck>, address: &str) -> Vec<String> {
    let BootCheck { until, check_port, on, .. } = check.cloned().unwrap_or_default();
    let request = CheckBoot { address: address.to_owned(), until, check_port, on };
    CommandLine::new("check-boot").with(&request).words()
}

/// The words of `coldrise prune`; without machines it concerns all.
pub(super) fn prune(rules: &Retention, machines: &[&String]) -> Vec<String> {
    let machines = machines.iter().map(|name| (*name).clone()).collect();
    let request = Prune { machines: Some(machines), rules: rules.clone() };
    CommandLine::new("prune").with(&request).words()
}

/// The words of `coldrise verify`.
fn verify(address: Option<String>, sample: Option<f64>) -> Vec<String> {
    CommandLine::new("verify").with(&Verify { address, sample }).words()
}

/// The runs of one occurrence: machine and words. `known` are the machines that have points, or those
/// that libvirt has, as [`Job::known_by`] says.
pub(super) fn runs_of(job: &Job, known: &[MachineNames]) -> Vec<(Option<String>, Vec<String>)> {
    let found = || known.iter().filter(|names| any_matches(&job.machines, names));
    let matching = || found().map(|names| &names.machine);
    match job.kind {
        JobKind::Backup => {
            // A named machine that does not exist fails, which is reported.
            let mut machines: BTreeMap<String, &str> = named(&job.machines, known).collect();
            for names in found() {
                let domain = names.domain.as_ref().unwrap_or(&names.machine);
                machines.entry(names.machine.clone()).or_insert(domain);
            }
            let run = |(machine, domain): (String, &str)| {
                let words = backup(job, &machine, domain);
                (Some(machine), words)
            };
            machines.into_iter().map(run).collect()
        }
        // A restore point of each: its own runs are kept running.
        JobKind::ProtectLive => {
            let followed = job.followed();
            let found = known.iter().filter(|names| followed.contains(&names.machine));
            let seal = |names: &MachineNames| {
                Some((Some(names.machine.clone()), seal(names.session.as_deref()?)))
            };
            found.filter_map(seal).collect()
        }
        JobKind::Gc => vec![(None, vec!["gc".to_owned()])],
        JobKind::Prune => {
            let rules = job.retention.clone().unwrap_or_default();
            if job.concerns_all() {
                return vec![(None, prune(&rules, &[]))];
            }
            let named: Vec<&String> = matching().collect();
            // Without names it would concern all.
            if named.is_empty() { Vec::new() } else { vec![(None, prune(&rules, &named))] }
        }
        JobKind::Copy if job.concerns_all() => vec![(None, copy::words(job, None))],
        JobKind::Copy => {
            matching().map(|name| (Some(name.clone()), copy::words(job, Some(name)))).collect()
        }
        JobKind::Verify if job.concerns_all() => {
            vec![(None, verify(None, job.sample_percent))]
        }
        JobKind::Verify => matching()
            .map(|name| (Some(name.clone()), verify(Some(format!("{name}/latest")), None)))
            .collect(),
        JobKind::CheckBoot => matching()
            .map(|name| {
                let words = check_boot(job.boot_check.as_ref(), &format!("{name}/latest"));
                (Some(name.clone()), words)
            })
            .collect(),
    }
}

impl JobKind {
    /// The command's word.
    pub(crate) fn word(self) -> &'static str {
        match self {
            JobKind::Backup => "backup",
            JobKind::Verify => "verify",
            JobKind::Prune => "prune",
            JobKind::Gc => "gc",
            JobKind::CheckBoot => "check-boot",
            JobKind::Copy => "copy",
            JobKind::ProtectLive => "protect-live",
        }
    }
}

/// Who knows the machines that the patterns of a job mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KnownBy {
    /// The job names its machines.
    Nobody,
    /// The repository: the machines that have points.
    Repository,
    /// libvirt: its domains, running or not.
    Libvirt,
    /// The sessions: the machines that they follow.
    Sessions,
}

impl Job {
    /// Who knows the machines.
    pub(super) fn known_by(&self) -> KnownBy {
        let is_machine = |pattern: &JobPattern| pattern.machine().is_some();
        match self.kind {
            JobKind::Verify | JobKind::Prune | JobKind::CheckBoot | JobKind::Copy => {
                KnownBy::Repository
            }
            JobKind::Backup if !self.machines.iter().all(is_machine) => KnownBy::Libvirt,
            JobKind::ProtectLive => KnownBy::Sessions,
            JobKind::Backup | JobKind::Gc => KnownBy::Nobody,
        }
    }
}
