//! libvirt through its program `virsh`, on this host or on another one.

use std::ffi::OsStr;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_host::Host;

/// A connection by its URI, such as `qemu:///system`, on a host.
#[derive(Clone, Debug)]
pub struct Virsh {
    uri: String,
    host: Host,
}

impl Virsh {
    /// A connection by a URI that was checked before; nothing is started yet.
    pub fn at(host: &Host, uri: impl Into<String>) -> Virsh {
        Virsh { uri: uri.into(), host: host.clone() }
    }

    /// The URI that a user gave, else that of $LIBVIRT_DEFAULT_URI, else `qemu:///system`.
    ///
    /// # Errors
    /// As for [`Virsh::on`].
    pub fn local(uri: Option<&str>) -> Result<Virsh> {
        Virsh::on(Host::here(), uri)
    }

    /// libvirt on a host. Default for the URI: `qemu:///system`; on this host $LIBVIRT_DEFAULT_URI counts.
    ///
    /// # Errors
    /// `InvalidInput` unless it is a QEMU on that host: disks go through sockets and files there.
    pub fn on(host: Host, uri: Option<&str>) -> Result<Virsh> {
        let variable = || std::env::var("LIBVIRT_DEFAULT_URI").ok().filter(|uri| !uri.is_empty());
        let default = if host.name().is_none() { variable() } else { None };
        let uri = uri.map(str::to_owned).or(default).unwrap_or_else(|| "qemu:///system".to_owned());
        let rest = uri.split_once("://").map_or("?", |(_, rest)| rest);
        let is_qemu = uri.starts_with("qemu:") || uri.starts_with("qemu+unix:");
        if is_qemu && rest.starts_with('/') {
            return Ok(Virsh { uri, host });
        }
        let text = format!("{uri} is not a QEMU connection on this host");
        Err(Error::new(ErrorKind::InvalidInput, text).advise(
            "a machine on another host is backed up with --on HOST (coldrise host add); otherwise run the command on the \
             hypervisor's host, with qemu:///system or qemu:///session",
        ))
    }

    /// The URI.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// The host.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Runs one command of virsh within `patience` and returns its output.
    ///
    /// # Errors
    /// `ToolFailed` if virsh is not installed, fails, or does not end in time; the message has virsh's text.
    pub fn run<W: AsRef<OsStr>>(&self, words: &[W], patience: Duration) -> Result<String> {
        self.run_with(words, None, patience)
    }

    /// Runs commands of virsh that change nothing, each within `patience`: faster than one after the other. The results are in
    /// the order of the commands.
    ///
    /// # Errors
    /// Errors of the connection to the host.
    pub fn ask(&self, commands: &[&[&str]], patience: Duration) -> Result<Vec<Result<String>>> {
        let owned = |words: &&[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        self.host.ask_virsh(&self.uri, commands.iter().map(owned).collect(), patience)
    }

    /// The outputs of commands of virsh that change nothing.
    ///
    /// # Errors
    /// The first error of a command, and those of [`Virsh::ask`].
    pub fn ask_all<const N: usize>(
        &self,
        commands: [&[&str]; N],
        patience: Duration,
    ) -> Result<[String; N]> {
        let answers: Vec<String> =
            self.ask(&commands, patience)?.into_iter().collect::<Result<_>>()?;
        answers
            .try_into()
            .map_err(|_| Error::new(ErrorKind::Internal, "an answer of virsh is missing"))
    }

    /// Runs one command of virsh that reads `input` from the file `/dev/stdin`.
    ///
    /// # Errors
    /// As for [`Virsh::run`]; `InvalidInput` for words that are not UTF-8.
    pub fn run_with<W: AsRef<OsStr>>(
        &self,
        words: &[W],
        input: Option<&str>,
        patience: Duration,
    ) -> Result<String> {
        let word = |word: &W| {
            let text = word.as_ref().to_str().map(str::to_owned);
            text.ok_or_else(|| {
                let text = format!("{} is not UTF-8", word.as_ref().to_string_lossy());
                Error::new(ErrorKind::InvalidInput, text)
            })
        };
        let words = words.iter().map(word).collect::<Result<Vec<String>>>()?;
        self.host.virsh(&self.uri, words, input, patience)
    }
}
