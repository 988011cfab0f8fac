//! The commands of a job's runs, as vectors of arguments. No shell ever sees them.

use std::collections::BTreeMap;

use coldrise_block::Result;
use coldrise_inventory::Retention;
use coldrise_recovery::virsh::Virsh;

use super::copy;
use super::job::{BootCheck, Job, JobKind};
use super::pattern::{any_matches, named, JobPattern, MachineNames};
use crate::invalid::invalid;

const MAX_SOURCE_BYTES: usize = 1024;
/// The lowest rate that `coldrise backup` takes, in bytes per second.
const MIN_RATE: u64 = 64 << 10;
const FORMATS: [&str; 5] = ["raw", "qcow2", "vmdk", "vhd", "vhdx"];
const NBD_SCHEMES: [&str; 6] = ["nbd", "nbds", "nbd+unix", "nbds+unix", "nbd+vsock", "nbds+vsock"];

/// Checks a source, which may have placeholders. Jobs are shown to everybody who sees the machines, so
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

fn expand(template: &str, machine: &str, disk: &str) -> String {
    template.replace("{machine}", machine).replace("{disk}", disk)
}

/// The words of `coldrise backup`. `domain` is libvirt's name for the machine, or the machine's own.
pub(crate) fn backup(job: &Job, machine: &str, domain: &str) -> Vec<String> {
    let mut words = vec!["backup".to_owned(), domain.to_owned()];
    for (disk, template) in job.disks_of(machine) {
        words.push(format!("{disk}={}", expand(template, machine, disk)));
    }
    words.extend(job.config.as_ref().map(|path| format!("--config={}", expand(path, machine, ""))));
    words.extend(job.bitmap.as_ref().map(|name| format!("--bitmap={name}")));
    words.extend(job.from.as_ref().map(|from| format!("--from={}", expand(from, domain, ""))));
    if job.from.as_deref().is_some_and(|from| from.starts_with("libvirt")) {
        // A run does not have the service's environment.
        words.extend(Virsh::local(None).ok().map(|virsh| format!("--connect={}", virsh.uri())));
    }
    words.extend(job.push.then(|| "--push".to_owned()));
    words.extend(job.quiesce.then(|| "--quiesce".to_owned()));
    if let Some(agent) = &job.agent {
        words.extend(["--quiesce".to_owned(), format!("--agent={}", expand(agent, machine, ""))]);
    }
    words.extend(job.rate_bytes_per_second.map(|rate| format!("--rate={rate}")));
    words
}

/// The words of `coldrise check-boot`.
pub(super) fn check_boot(check: Option<&BootCheck>, address: &str) -> Vec<String> {
    let mut words = vec!["check-boot".to_owned(), address.to_owned()];
    let rung = check.and_then(|check| check.until);
    words.extend(rung.map(|rung| format!("--until={}", rung.word())));
    let port = check.and_then(|check| check.check_port);
    words.extend(port.map(|port| format!("--check-port={port}")));
    words
}

/// The words of `coldrise prune`; without machines it concerns all.
pub(crate) fn prune<'a>(
    rules: &Retention,
    machines: impl IntoIterator<Item = &'a str>,
) -> Vec<String> {
    let counts = [
        ("last", rules.keep_last),
        ("hourly", rules.keep_hourly),
        ("daily", rules.keep_daily),
        ("weekly", rules.keep_weekly),
        ("monthly", rules.keep_monthly),
        ("yearly", rules.keep_yearly),
    ];
    let mut words = vec!["prune".to_owned()];
    let given = counts.iter().filter_map(|(name, count)| Some((name, (*count)?)));
    words.extend(given.map(|(name, count)| format!("--keep-{name}={count}")));
    words.extend(rules.keep_within.map(|span| format!("--keep-within={span}")));
    words.extend(machines.into_iter().map(str::to_owned));
    words
}

/// The runs of one occurrence: machine and words. `known` are the machines that have points, or those
/// that run under libvirt, as [`Job::known_by`] says.
pub(super) fn runs_of(job: &Job, known: &[MachineNames]) -> Vec<(Option<String>, Vec<String>)> {
    let found = || known.iter().filter(|names| any_matches(&job.machines, names));
    let matching = || found().map(|names| &names.machine);
    let verify =
        |more: Option<String>| std::iter::once("verify".to_owned()).chain(more).collect::<Vec<_>>();
    match job.kind {
        JobKind::Backup => {
            // A named machine that does not run fails, which is told; a pattern means those that run.
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
        JobKind::Gc => vec![(None, vec!["gc".to_owned()])],
        JobKind::Prune => {
            let rules = job.retention.clone().unwrap_or_default();
            if job.concerns_all() {
                return vec![(None, prune(&rules, []))];
            }
            let named: Vec<&str> = matching().map(String::as_str).collect();
            // Without names it would concern all.
            if named.is_empty() {
                Vec::new()
            } else {
                vec![(None, prune(&rules, named))]
            }
        }
        JobKind::Copy if job.concerns_all() => vec![(None, copy::words(job, None))],
        JobKind::Copy => {
            matching().map(|name| (Some(name.clone()), copy::words(job, Some(name)))).collect()
        }
        JobKind::Verify if job.concerns_all() => {
            vec![(None, verify(job.sample_percent.map(|percent| format!("--sample={percent}"))))]
        }
        JobKind::Verify => matching()
            .map(|name| (Some(name.clone()), verify(Some(format!("{name}/latest")))))
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
    /// libvirt: the domains that run.
    Libvirt,
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
            JobKind::Backup | JobKind::Gc => KnownBy::Nobody,
        }
    }
}
