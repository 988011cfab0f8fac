//! The host on which a machine is.

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::Host;
use coldrise_hypervisors::libvirt::{domains, PATIENCE};
use coldrise_hypervisors::virsh::Virsh;

/// The host on which a domain runs; if it runs nowhere, the first on which it is defined. A host that could not be reached
/// stands as an error.
///
/// # Errors
/// `NotFound` if all hosts answer and none has it; `AlreadyExists` if it runs on two; otherwise the error of a host that does not
/// answer: the domain may run there.
pub fn find_host(hosts: Vec<Result<Host>>, connect: Option<&str>, domain: &str) -> Result<Host> {
    let (mut running, mut off, mut names) = (None::<Host>, None, Vec::new());
    let mut unknown = None;
    for host in hosts {
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
            Err(error) => drop(unknown.get_or_insert(error)),
        }
    }
    match (running, unknown, off) {
        (Some(host), _, _) => Ok(host),
        (None, Some(error), _) => Err(error.context(format!("looking for domain {domain}"))),
        (None, None, Some(host)) => Ok(host),
        (None, None, None) => {
            let text = format!("no domain {domain} is on {}", names.join(", "));
            Err(Error::new(ErrorKind::NotFound, text)
                .advise("coldrise host check says what is there; or write libvirt:DOMAIN"))
        }
    }
}
