//! `coldrise host`: hypervisors' hosts, reached over SSH.

use std::collections::BTreeSet;

use clap::{Args, Subcommand};
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::Host;
use coldrise_hosts::{
    Contact, HostAddress, HostReport, Hosts, KnownHost, Seen, add_host, check, connect,
    parse_host_name,
};
use coldrise_hypervisors::libvirt::{check_no_machines_on, remove_left};
use coldrise_live_backup::{Candidate, find_host};
use coldrise_store::MachineName;
use serde::Serialize;
use serde_json::json;

use super::copies::age;
use crate::invocation::Invocation;
use crate::report::{Report, table};
use crate::units::{now_ms, show_size};

/// Manage hosts of libvirt that this machine reaches over SSH.
///
/// coldrise host add NAME ssh://USER@HOST shows the host's key and remembers it, and shows the line that lets this
/// repository log in. Then --on NAME is an option of backup --from libvirt, and jobs take "hosts". Nothing is
/// installed on the host but a small program in its user's cache. See docs/hosts.md.
#[derive(Debug, Args)]
pub(crate) struct HostArguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Add a host and remember its SSH key.
    Add {
        /// Its name here.
        #[arg(value_parser = parse_host_name)]
        name: MachineName,
        /// Where it is: ssh://USER@HOST or ssh://USER@HOST:PORT. HOST may be a name of ~/.ssh/config.
        #[arg(value_name = "ADDRESS")]
        address: HostAddress,
        /// Accept this SSH key only: its fingerprint, as ssh-keygen -l shows it on the host. Default: the key that the host
        /// shows now.
        #[arg(long, value_name = "SHA256:…")]
        fingerprint: Option<String>,
    },
    /// Show the hosts.
    List,
    /// Connect to a host and report what works there.
    Check {
        /// The host. Default: all.
        #[arg(value_parser = parse_host_name)]
        name: Option<MachineName>,
    },
    /// Show the line for ~/.ssh/authorized_keys of a host's user.
    Key,
    /// Remove a host. Nothing changes on the host itself.
    Remove {
        /// The host.
        #[arg(value_parser = parse_host_name)]
        name: MachineName,
        /// Remove it even if recovered machines run there, to add it again with a new key. Their commands then reconnect.
        #[arg(long)]
        force: bool,
    },
}

#[derive(Serialize)]
struct ListedHost {
    name: String,
    address: String,
    fingerprint: String,
    added_at_ms: u64,
    /// The last login and check; absent without one.
    last_check: Option<Seen>,
}

/// The hosts of --on.
pub(crate) struct OnHosts {
    hosts: Hosts,
    known: Vec<KnownHost>,
}

impl OnHosts {
    /// `None` without --on.
    ///
    /// # Errors
    /// `NotFound` for one that the repository does not know.
    pub(crate) fn find(invocation: &Invocation, on: &[String]) -> Result<Option<OnHosts>> {
        if on.is_empty() {
            return Ok(None);
        }
        let hosts = Hosts::of(&invocation.open()?);
        // One that is named twice counts once.
        let names: BTreeSet<&String> = on.iter().collect();
        let known = names.into_iter().map(|name| hosts.find(&parse_host_name(name)?));
        let known = known.collect::<Result<_>>()?;
        Ok(Some(OnHosts { hosts, known }))
    }

    /// Connects to all, and returns the one that has the domain.
    ///
    /// # Errors
    /// As of `find_host`.
    pub(crate) fn connect(&self, uri: Option<&str>, domain: &str) -> Result<Host> {
        let OnHosts { hosts, known } = self;
        if let [host] = &known[..] {
            // What the backup asks there next says whether it has the domain.
            return connect(hosts, host);
        }
        let lost =
            |_| Err(Error::new(ErrorKind::Internal, "the thread of a connection has panicked"));
        let connected = std::thread::scope(|scope| {
            let connecting = known.iter().map(|host| scope.spawn(|| connect(hosts, host)));
            let connecting: Vec<_> = connecting.collect();
            connecting
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(lost))
                .collect::<Vec<_>>()
        });
        let candidates = connected.into_iter().zip(known).map(|(connected, host)| Candidate {
            host: connected,
            may_have: hosts.may_have(&host.name, domain),
        });
        let found = find_host(candidates.collect(), uri, domain)?;
        if let Some(host) = known.iter().find(|host| found.name() == Some(host.name.as_str())) {
            if let Err(error) = hosts.note_machine(&host.name, domain) {
                tracing::warn!("{}", error.full_message());
            }
        }
        Ok(found)
    }
}

pub(crate) fn run(invocation: &Invocation, arguments: HostArguments) -> Result<Report> {
    let hosts = Hosts::of(&invocation.open()?);
    match arguments.action {
        Action::Add { name, address, fingerprint } => add(&hosts, name, address, fingerprint),
        Action::List => list(&hosts),
        Action::Check { name } => check_hosts(invocation, &hosts, name.as_ref()),
        Action::Key => {
            let line = hosts.authorized_keys_line()?;
            Ok(Report::done(&json!({ "authorized_keys": line }), line))
        }
        Action::Remove { name, force } => {
            if !force {
                check_no_machines_on(&invocation.open()?, &name)?;
            }
            hosts.remove(&name)?;
            let text = format!(
                "removed {name}; jobs that name it now fail. On the host, delete the coldrise line from ~/.ssh/authorized_keys"
            );
            Ok(Report::done(&json!({ "name": name }), text))
        }
    }
}

fn add(
    hosts: &Hosts,
    name: MachineName,
    address: HostAddress,
    fingerprint: Option<String>,
) -> Result<Report> {
    let (host, refused) = add_host(hosts, &name, &address, fingerprint.as_deref())?;
    let (line, shown) = (hosts.authorized_keys_line()?, host.key.fingerprint());
    let mut text = format!("added {name}; its SSH key is {shown}");
    if let Some(error) = &refused {
        text.push_str(&match error.kind() {
            ErrorKind::Unauthorized => format!(
                "\nappend this line to ~/.ssh/authorized_keys of its user, then: coldrise host check {name}\n\n{line}\n"
            ),
            _ => format!("\nwarning: {}\nthe line for ~/.ssh/authorized_keys of its user:\n\n{line}\n", error.full_message()),
        });
    }
    let object = json!({
        "name": name,
        "address": host.address,
        "fingerprint": shown,
        "authorized_keys": line,
        "is_logged_in": refused.is_none(),
    });
    Ok(Report::done(&object, text.trim_end().to_owned()))
}

fn list(hosts: &Hosts) -> Result<Report> {
    let listed = |host: KnownHost| -> Result<ListedHost> {
        Ok(ListedHost {
            last_check: hosts.seen(&host.name)?,
            name: host.name.to_string(),
            address: host.address.to_string(),
            fingerprint: host.key.fingerprint(),
            added_at_ms: host.added_at_ms,
        })
    };
    let hosts = hosts.all()?.into_iter().map(listed).collect::<Result<Vec<ListedHost>>>()?;
    let now_ms = now_ms();
    let rows: Vec<Vec<String>> = hosts
        .iter()
        .map(|host| {
            let check = host.last_check.as_ref();
            let contact = check.and_then(|check| check.contact.as_ref());
            let of = |read: fn(&Contact) -> String| contact.map_or("-".to_owned(), read);
            let seen = check.map_or("never".to_owned(), |check| age(check.checked_at_ms, now_ms));
            let state = match check.map(|check| check.error.is_some()) {
                None => "not checked",
                Some(true) => "failed",
                Some(false) => "ok",
            };
            vec![
                host.name.clone(),
                host.address.clone(),
                state.to_owned(),
                of(|seen| seen.libvirt.clone()),
                of(|seen| seen.qemu.clone()),
                of(|seen| seen.machines.len().to_string()),
                of(|seen| show_size(seen.scratch_free_bytes)),
                seen,
            ]
        })
        .collect();
    let text = match rows.is_empty() {
        true => "no hosts: coldrise host add NAME ssh://USER@HOST".to_owned(),
        false => {
            let heads = [
                "HOST",
                "ADDRESS",
                "STATE",
                "LIBVIRT",
                "QEMU",
                ">MACHINES",
                ">SCRATCH FREE",
                ">LAST CONTACT",
            ];
            table(&heads, &rows)
        }
    };
    Ok(Report::done(&json!({ "hosts": hosts }), text))
}

fn check_hosts(
    invocation: &Invocation,
    hosts: &Hosts,
    name: Option<&MachineName>,
) -> Result<Report> {
    let wanted = match name {
        Some(name) => vec![hosts.find(name)?],
        None => hosts.all()?,
    };
    let (mut texts, mut checked, mut failed) = (Vec::new(), Vec::new(), None);
    for host in wanted {
        match check(hosts, &host, |connected| clear(invocation, connected)) {
            Ok(report) => {
                texts.push(describe(&host, &report));
                checked.push(json!({ "name": host.name, "contact": report.contact, "running": report.running }));
            }
            Err(error) => {
                texts.push(format!("{}: {}", host.name, error.full_message()));
                checked.push(json!({ "name": host.name, "error": error.full_message() }));
                failed.get_or_insert(error);
            }
        }
    }
    if checked.is_empty() {
        texts.push("no hosts: coldrise host add NAME ssh://USER@HOST".to_owned());
    }
    match failed {
        // One host: its own error says all.
        Some(error) if checked.len() == 1 => Err(error),
        Some(error) => {
            texts.iter().for_each(|text| invocation.remark(text));
            Err(Error::new(error.kind(), "some hosts do not work"))
        }
        None => Ok(Report::done(&json!({ "hosts": checked }), texts.join("\n"))),
    }
}

/// Removes what recoveries have left on a host. Returns what stays.
fn clear(invocation: &Invocation, host: &Host) -> Vec<String> {
    match invocation.open().and_then(|repository| remove_left(&repository, host)) {
        Ok(left) => {
            left.removed.iter().for_each(|text| invocation.remark(text));
            left.staying
        }
        Err(error) => vec![error.full_message()],
    }
}

fn describe(host: &KnownHost, report: &HostReport) -> String {
    let HostReport { contact, running } = report;
    let mut text = format!(
        "{}: libvirt {}, QEMU {}; {} machines, {} of them run; {} free in {}",
        host.name,
        contact.libvirt,
        contact.qemu,
        contact.machines.len(),
        running.len(),
        show_size(contact.scratch_free_bytes),
        contact.scratch
    );
    for shortcoming in &contact.shortcomings {
        text.push_str(&format!("\n  {shortcoming}"));
    }
    text
}
