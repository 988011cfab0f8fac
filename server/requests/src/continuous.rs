//! Requests of continuous protection.

use std::time::Duration;

use clap::Args;
use coldrise_block::units::parse_duration;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hosts::parse_host_name;
use coldrise_ingest::Rate;
use coldrise_replica::parse_link_name;
use coldrise_store::{DisplayName, MachineName, MarkRules, SessionName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::value::{pairs, parse_backup_machine, text};

/// A machine or a session whose writes are captured continuously: here, and at another site.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ProtectLive {
    /// The machine's name, as of coldrise backup; or live/SESSION: a machine that runs from Coldrise, with --to.
    #[arg(value_name = "MACHINE", value_parser = text(Protected::parse))]
    pub machine: String,
    /// The disks: DISK=DEVICE, as of coldrise backup --from. Default: all writable disks, with their existing names.
    #[arg(value_name = "DISK=DEVICE")]
    #[serde(default, with = "pairs")]
    #[schema(value_type = std::collections::BTreeMap<String, String>)]
    pub disks: Vec<String>,
    /// Where it runs: libvirt, libvirt:DOMAIN, or qmp:SOCKET with the monitor of its QEMU. Default for DOMAIN: MACHINE.
    #[arg(long, value_name = "SOURCE")]
    pub from: Option<String>,
    /// The link of another site (coldrise link add) that gets the time marks, too, as they are made.
    #[arg(long, value_name = "LINK", value_parser = text(parse_link_name))]
    pub to: Option<String>,
    /// With --to: limit what is sent there, in bytes per second, such as 5M.
    #[arg(long, value_name = "RATE", requires = "to", value_parser = text(str::parse::<Rate>))]
    pub rate: Option<String>,
    /// How often the changes are read: 1s to 1h. Default: 5s.
    #[arg(long, value_name = "TIME", value_parser = text(parse_every))]
    pub every: Option<String>,
    /// How often the guest's file systems are frozen for the instant through the guest agent, such as 15m. `marks` shows which
    /// marks these are. Default: never.
    #[arg(long, value_name = "TIME", value_parser = text(parse_duration))]
    pub consistent_every: Option<String>,
    /// Name of the session that takes the changes. Default: the one that follows the machine already; else the machine's name
    /// and the first unused number.
    #[arg(long = "name", value_name = "SESSION", value_parser = text(SessionName::parse))]
    pub session: Option<String>,
    /// Which time marks of a new session are kept: INTERVAL=AGE,…. Default: 1s=10m,10s=1h,1m=1d.
    #[arg(long, value_name = "RULE", value_parser = text(MarkRules::parse))]
    pub marks: Option<String>,
    /// With --from libvirt: the host that runs the machine (coldrise host add), instead of this one.
    #[arg(long, value_name = "HOST", value_parser = text(parse_host_name))]
    pub on: Option<String>,
    /// With --from libvirt: the URI of libvirt on its host. Default: $LIBVIRT_DEFAULT_URI on this host, else
    /// qemu:///system.
    #[arg(long, value_name = "URI")]
    pub connect: Option<String>,
    /// With --consistent-every and qmp: the socket of the guest agent's port. libvirt knows its own.
    #[arg(long, value_name = "SOCKET", requires = "consistent_every")]
    pub agent: Option<String>,
    /// QEMU copies what has changed into scratch files before it is read, as of coldrise backup --push.
    #[arg(long)]
    #[serde(default)]
    pub push: bool,
}

/// What is protected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Protected {
    /// A machine that runs elsewhere: its name here, and the one from which that was derived.
    Machine(MachineName, Option<DisplayName>),
    /// A machine that runs from Coldrise, on this session.
    Session(SessionName),
}

impl Protected {
    /// Reads `MACHINE` or `live/SESSION`.
    ///
    /// # Errors
    /// `InvalidInput` if it is neither.
    pub fn parse(text: &str) -> Result<Protected> {
        match text.strip_prefix("live/") {
            Some(session) => SessionName::parse(session).map(Protected::Session),
            None => parse_backup_machine(text)
                .map(|(machine, derived)| Protected::Machine(machine, derived)),
        }
    }
}

impl ProtectLive {
    /// What is protected.
    ///
    /// # Errors
    /// `InvalidInput` if an option is missing, or does not fit.
    pub fn protected(&self) -> Result<Protected> {
        let refuse = |text: &str| Err(Error::new(ErrorKind::InvalidInput, text));
        let protected = Protected::parse(&self.machine)?;
        let of_source =
            [&self.from, &self.every, &self.consistent_every, &self.session, &self.marks];
        let of_source = of_source.iter().any(|option| option.is_some())
            || [&self.on, &self.connect, &self.agent].iter().any(|option| option.is_some())
            || self.push
            || !self.disks.is_empty();
        match &protected {
            Protected::Session(_) if self.to.is_none() => refuse(
                "live/SESSION has its time marks already: name the site that gets them, too: --to LINK",
            ),
            Protected::Session(_) if of_source => refuse(
                "live/SESSION takes only --to and --rate: the other options are for machines that run elsewhere",
            ),
            Protected::Machine(..) if self.from.is_none() => refuse(
                "name where the machine runs: --from libvirt or --from qmp:SOCKET. A machine that runs from Coldrise is live/SESSION",
            ),
            _ => Ok(protected),
        }
    }
}

/// The time from one reading of changes to the next.
///
/// # Errors
/// `InvalidInput` if it is not 1 second to 1 hour.
pub fn parse_every(text: &str) -> Result<Duration> {
    let every = parse_duration(text)?;
    if every > Duration::from_secs(3600) {
        let text = format!("{text} is too long: use 1s to 1h; for more, coldrise backup");
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    Ok(every)
}
