//! What works on a host.

use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result, now_ms};
use coldrise_host::{Facts, Host, ProgramStart, ScratchSpace};

use crate::connection::connection;
use crate::documents::{Contact, Hosts, KnownHost, Seen};
use crate::ssh::SshFolder;

const URI: &str = "qemu:///system";
const PATIENCE: Duration = Duration::from_secs(60);
/// Below this much free space in the folder of scratch files backups of machines of usual size fail, in bytes.
const LITTLE_BYTES: u64 = 4 << 30;

/// The result of [`check`].
pub struct HostReport {
    /// What was seen.
    pub contact: Contact,
    /// Names of the machines that run.
    pub running: Vec<String>,
}

/// Connects to a host, looks at it and records what was seen, with the shortcomings that `more` finds.
///
/// # Errors
/// Those of [`crate::connect`]; `ToolFailed` if its libvirt does not answer. They are recorded, too.
pub fn check(
    hosts: &Hosts,
    host: &KnownHost,
    more: impl FnOnce(&Host) -> Vec<String>,
) -> Result<HostReport> {
    let connection = connection(hosts, host)?;
    let connected = Host::over(connection.clone());
    let report = look(&connected).map(|mut report| {
        let shortcomings = &mut report.contact.shortcomings;
        shortcomings.extend(lacks_of_space(&connected, &connection.ssh));
        shortcomings.extend(more(&connected));
        report
    });
    let contact = match &report {
        Ok(report) => Some(report.contact.clone()),
        Err(_) => hosts.seen(&host.name)?.and_then(|seen| seen.contact),
    };
    let error = report.as_ref().err().map(Error::full_message);
    let check_error = error.clone();
    hosts.record(&host.name, &Seen { checked_at_ms: now_ms(), error, check_error, contact })?;
    report
}

fn look(host: &Host) -> Result<HostReport> {
    let facts = host.facts()?;
    let questions: [&[&str]; 3] = [&["version"], &["list", "--name"], &["list", "--all", "--name"]];
    let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    let answers = host.ask_virsh(URI, questions.map(owned).into(), PATIENCE)?;
    let answers = answers.into_iter().collect::<Result<Vec<String>>>().map_err(advise)?;
    let [versions, running, machines] = &answers[..] else {
        return Err(Error::new(ErrorKind::Internal, "an answer of virsh is missing"));
    };
    let names = |text: &str| -> Vec<String> {
        text.lines().map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
    };
    let contact = Contact {
        at_ms: now_ms(),
        libvirt: version(versions, "Using library: libvirt"),
        qemu: version(versions, "Running hypervisor: QEMU"),
        machines: names(machines),
        scratch: facts.scratch.display().to_string(),
        scratch_free_bytes: facts.scratch_free_bytes,
        shortcomings: shortcomings(&facts),
    };
    Ok(HostReport { contact, running: names(running) })
}

/// What does not work in a private folder there.
fn lacks_of_space(host: &Host, ssh: &SshFolder) -> Vec<String> {
    match ScratchSpace::new(host, None, None) {
        Ok(space) => lacks_forwarding(&space, ssh).into_iter().chain(lacks_tools(&space)).collect(),
        Err(error) => vec![error.full_message()],
    }
}

/// QEMU's tools, without which no machine is backed up.
fn lacks_tools(space: &ScratchSpace) -> Option<String> {
    let is_missing = |program: &&str| {
        let (program, words) = ((*program).to_owned(), vec!["--version".to_owned()]);
        space.start(ProgramStart { program, words, ..Default::default() }).is_err()
    };
    let missing: Vec<&str> = ["qemu-img", "qemu-nbd"].into_iter().filter(is_missing).collect();
    (!missing.is_empty()).then(|| {
        let missing = missing.join(" and ");
        format!("no machine can be backed up: {missing} cannot be started (Debian: apt install qemu-utils)")
    })
}

/// Makes a socket there that leads here, as `recover --on` does, and removes it. Returns what is missing.
fn lacks_forwarding(space: &ScratchSpace, ssh: &SshFolder) -> Option<String> {
    match ssh.try_back(&space.file("way"), &ssh.path("way")) {
        Ok(()) => None,
        Err(error) => {
            tracing::debug!("no forwarding: {}", error.full_message());
            Some(
                "its sshd does not forward sockets: recover, attach and check-boot --on need a session of SSH for each connection to a \
                 disk (MaxSessions); its sshd_config can allow them: AllowStreamLocalForwarding yes, AllowTcpForwarding yes, \
                 DisableForwarding no"
                    .to_owned(),
            )
        }
    }
}

fn advise(error: Error) -> Error {
    error.advise(
        "install libvirt there, and let its user be root or in the groups libvirt, kvm and libvirt-qemu",
    )
}

/// The version in a line such as `Running hypervisor: QEMU 7.2.11`.
fn version(text: &str, before: &str) -> String {
    let found = text.lines().find_map(|line| line.strip_prefix(before));
    found.map_or_else(|| "?".to_owned(), |rest| rest.trim().chars().take(40).collect())
}

fn shortcomings(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    if !facts.is_root {
        found.push(
            "its user is not root: what only root may read, such as firmware variables and the state of a TPM, is not in backups"
                .to_owned(),
        );
        let is_in = |group: &&str| facts.groups.iter().any(|own| own == group);
        let lacking = ["libvirt", "kvm"].into_iter().filter(|group| !is_in(group));
        found.extend(lacking.map(|group| format!("its user is not in the group {group}")));
        if !["libvirt-qemu", "qemu"].iter().any(is_in) {
            found.push("its user is in neither of the groups libvirt-qemu and qemu, which QEMU's files need".to_owned());
        }
    }
    if facts.scratch_free_bytes < LITTLE_BYTES {
        let mib = facts.scratch_free_bytes >> 20;
        found.push(format!(
            "{} has {mib} MiB free for scratch files: a backup needs up to the size of the machine's disks",
            facts.scratch.display()
        ));
    }
    if let Some(why) = &facts.lacks_kvm {
        found.push(format!("machines are slow there: {why}"));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::version;

    #[test]
    fn versions_are_read() {
        let text = "Compiled against library: libvirt 9.0.0\nUsing library: libvirt 9.0.0\nUsing API: QEMU 9.0.0\nRunning hypervisor: QEMU 7.2.11\n";
        assert_eq!(version(text, "Using library: libvirt"), "9.0.0");
        assert_eq!(version(text, "Running hypervisor: QEMU"), "7.2.11");
        assert_eq!(version("", "Running hypervisor: QEMU"), "?");
    }
}
