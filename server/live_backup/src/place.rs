//! The host on which a machine is.

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::Host;
use coldrise_hypervisors::libvirt::{PATIENCE, domains};
use coldrise_hypervisors::virsh::Virsh;

/// A host on which a domain is looked for.
pub struct Candidate {
    /// The host, or why it could not be reached.
    pub host: Result<Host>,
    /// Whether the domain may be there if the host does not answer.
    pub may_have: bool,
}

/// The host on which a domain runs; if it runs nowhere, the first on which it is defined.
///
/// # Errors
/// `NotFound` if all hosts answer and none has it; `AlreadyExists` if it runs on two; otherwise the error of a host that does not
/// answer and may have the domain.
pub fn find_host(hosts: Vec<Candidate>, connect: Option<&str>, domain: &str) -> Result<Host> {
    let (mut running, mut off, mut names) = (None::<Host>, None, Vec::new());
    let (mut unknown, mut absent) = (None, None);
    for Candidate { host, may_have } in hosts {
        let found = host.and_then(|host| {
            let virsh = Virsh::on(host.clone(), connect)?;
            let has = |all: Vec<(String, String)>| {
                all.iter().any(|(uuid, name)| uuid == domain || name == domain)
            };
            let is_running = has(domains(&virsh, false, PATIENCE)?);
            Ok((is_running, is_running || has(domains(&virsh, true, PATIENCE)?), host))
        });
        match found {
            Ok((true, _, host)) => {
                if let Some(other) = running.replace(host.clone()) {
                    let (one, two) = (other.name().unwrap_or("?"), host.name().unwrap_or("?"));
                    let text = format!("a domain {domain} runs on {one} and on {two}");
                    return Err(Error::new(ErrorKind::AlreadyExists, text)
                        .advise("name the one host with --on, and the machines differently"));
                }
            }
            Ok((_, true, host)) => drop(off.get_or_insert(host)),
            Ok((_, _, host)) => names.push(host.name().unwrap_or("?").to_owned()),
            Err(error) if may_have => drop(unknown.get_or_insert(error)),
            Err(error) => {
                tracing::warn!(
                    "{}; {domain} was not on this host at its last contact, and is looked for on the others",
                    error.message()
                );
                absent.get_or_insert(error);
            }
        }
    }
    let looking = |error: Error| Err(error.context(format!("looking for domain {domain}")));
    match (running, unknown, off, absent) {
        (Some(host), ..) => Ok(host),
        (None, Some(error), ..) => looking(error.context(
            "a host may have it that does not answer (if it has not, name the other hosts only)",
        )),
        (None, None, Some(host), _) => Ok(host),
        (None, None, None, Some(error)) => looking(error),
        (None, None, None, None) => {
            let text = format!("no domain {domain} is on {}", names.join(", "));
            Err(Error::new(ErrorKind::NotFound, text)
                .advise("coldrise host check says what is there; or write libvirt:DOMAIN"))
        }
    }
}
