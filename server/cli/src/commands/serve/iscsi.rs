//! `coldrise serve iscsi`: serves sessions and restore points as iSCSI targets.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result, ScratchKind};
use coldrise_hosting::mount_server::iscsi::{Chap, Lun, Target, check_names, lines};
use coldrise_inventory::find_disk;
use coldrise_session::{Catalog, PointOfMark};
use coldrise_store::{Address, DiskName, Repository, SessionName, default_cache_bytes};
use serde_json::{Map, Value, json};

use super::nfs::host;
use super::secret_file;
use crate::invocation::Invocation;
use crate::report::{Report, print_line};
use crate::units::parse_size;
use coldrise_hosting::ganesha::Client;
use coldrise_hosting::mount_server::{IscsiOptions, MountServer, MountedAs, Tgtd, check_tgtd};
use coldrise_hosting::signals::ChildSignals;
use coldrise_hosting::tell_newer;

/// The default address.
const DEFAULT_ISCSI_ADDRESS: &str = "127.0.0.1:3260";

/// A point, a session, or one disk of them.
#[derive(Clone, Debug)]
struct Served(Address);

impl FromStr for Served {
    type Err = Error;

    /// An address, or a session's name alone.
    fn from_str(text: &str) -> Result<Served> {
        if text.contains('/') {
            return Address::parse(text).map(Served);
        }
        let session = SessionName::parse(text)?;
        Ok(Served(Address::Live { session, disk: None }))
    }
}

/// Serve sessions and restore points as iSCSI targets, until Ctrl-C.
///
/// One target per address, one LUN per disk, from 1 on. Sessions are writable, restore points
/// read-only. iSCSI is not encrypted: use a storage network. Needs tgt; the host's own tgtd is
/// unchanged. A line that starts with "ready" says that initiators can connect; the commands for them
/// follow. See docs/recovery-hyperv.md.
#[derive(Debug, Args)]
pub(super) struct IscsiArguments {
    /// SESSION, live/SESSION[/DISK] or MACHINE/POINT[/DISK]; several are several targets.
    #[arg(value_name = "ADDRESS", required = true)]
    served: Vec<Served>,

    /// IP address and port to listen on. Addresses other than loopback need CHAP.
    #[arg(long, value_name = "ADDR:PORT", default_value = DEFAULT_ISCSI_ADDRESS)]
    listen: SocketAddr,

    /// Name that initiators must give (CHAP).
    #[arg(long, value_name = "NAME", requires = "chap_secret_file")]
    chap_user: Option<String>,

    /// File whose first line is the secret for that name: 12 to 16 characters.
    #[arg(long, value_name = "FILE", requires = "chap_user")]
    chap_secret_file: Option<PathBuf>,

    /// Initiators that may connect: addresses or networks, such as 10.0.0.0/24. Can be repeated.
    /// Default: all.
    #[arg(long, value_name = "CIDR")]
    allow: Vec<Client>,

    /// Memory for decoded chunks, such as 64M or 2G; 0 disables the cache. Default: one eighth
    /// of the memory. The cache shrinks while little memory is available.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    cache: Option<u64>,

    /// Serve sessions read-only, too.
    #[arg(long)]
    read_only: bool,
}

pub(super) fn run(invocation: &Invocation, arguments: IscsiArguments) -> Result<Report> {
    let chap = match (&arguments.chap_user, &arguments.chap_secret_file) {
        (Some(user), Some(file)) => Some(Chap::new(user, &secret_file::first_line(file)?)?),
        _ => None,
    };
    check_address(arguments.listen, chap.is_some())?;
    check_tgtd()?;
    let allowed = arguments.allow.iter().map(ToString::to_string);
    // A network of all addresses is shown as two.
    let allowed = allowed.flat_map(|c| c.split(", ").map(str::to_owned).collect::<Vec<_>>());
    let options =
        IscsiOptions { listen: arguments.listen, chap: chap.clone(), allowed: allowed.collect() };
    let mounted = MountedAs {
        kind: ScratchKind::Iscsi,
        cache_bytes: arguments.cache.unwrap_or_else(default_cache_bytes),
        is_read_only: arguments.read_only,
    };
    let mut signals = ChildSignals::catch()?;
    let repository = invocation.access()?.open(mounted.cache_bytes)?;
    let mut targets = Vec::new();
    for served in &arguments.served {
        targets.push(resolve(invocation, &repository, &served.0, arguments.read_only)?);
    }
    check_names(&targets)?;
    let announced = targets.clone();
    let make = |mount: &Path, state: &Path| {
        for lun in targets.iter_mut().flat_map(|target| &mut target.luns) {
            lun.path = mount.join(&lun.path);
        }
        Tgtd::new(options, targets, state)
    };
    let mut server = MountServer::start(&repository, &mounted, make, &mut signals)?;
    announce(invocation, &announced, arguments.listen, chap.as_ref());
    let ended = server.serve(&mut signals);
    let finished = server.finish(Some(&mut signals));
    ended.and(finished)?;
    let object = json!({
        "address": arguments.listen.to_string(),
        "elapsed_ms": invocation.elapsed_ms(),
    });
    Ok(Report::done(&object, "ended"))
}

/// The target of an address, with paths below the mount.
fn resolve(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    address: &Address,
    is_read_only: bool,
) -> Result<Target> {
    let (folder, disk, there, is_read_only) = match address {
        Address::Marked { .. } => {
            let point = PointOfMark::of(repository, address)?;
            let target = resolve(invocation, repository, &point.address, is_read_only)?;
            point.keep();
            return Ok(target);
        }
        Address::Point { machine, selector, disk } => {
            let catalog = Catalog::new(repository);
            let point = catalog.point(machine, selector)?;
            tell_newer(invocation.caller()?, &catalog, selector, &point);
            if let Some(disk) = disk {
                find_disk(&point, disk)?;
            }
            let names: Vec<DiskName> = point.disks.iter().map(|d| d.name.clone()).collect();
            (format!("{machine}/{}", point.point), disk, names, true)
        }
        Address::Live { session, disk } => {
            let document = coldrise_session::session(repository, session)?.document;
            let names: Vec<DiskName> = document.disks.iter().map(|d| d.name.clone()).collect();
            (format!("live/{session}"), disk, names, is_read_only)
        }
    };
    let chosen: Vec<&DiskName> = match disk {
        None => there.iter().collect(),
        Some(disk) => there.iter().filter(|name| *name == disk).collect(),
    };
    if chosen.is_empty() {
        return Err(Error::new(ErrorKind::NotFound, format!("{address}: there is no such disk")));
    }
    let lun = |disk: &&DiskName| Lun {
        disk: disk.to_string(),
        path: PathBuf::from(format!("{folder}/{disk}.raw")),
    };
    let luns = chosen.iter().map(lun).collect();
    let address = disk.as_ref().map_or(folder.clone(), |disk| format!("{folder}/{disk}"));
    Ok(Target { address, is_read_only, luns })
}

fn announce(invocation: &Invocation, targets: &[Target], listen: SocketAddr, chap: Option<&Chap>) {
    let server = host(listen.ip());
    if invocation.is_json() {
        let targets: Vec<Value> = targets
            .iter()
            .map(|target| {
                let commands: Map<String, Value> = lines(target, &server, listen, chap)
                    .into_iter()
                    .map(|(client, line)| (client.to_owned(), json!(line)))
                    .collect();
                json!({
                    "address": target.address,
                    "name": target.name(),
                    "is_read_only": target.is_read_only,
                    "disks": target.luns.iter().map(|lun| &lun.disk).collect::<Vec<_>>(),
                    "connect": commands,
                })
            })
            .collect();
        let object = json!({ "event": "ready", "address": listen.to_string(), "targets": targets });
        print_line(&object.to_string());
        return;
    }
    print_line(&format!("ready: {server}:{} (Ctrl-C ends it)", listen.port()));
    for target in targets {
        let kind = if target.is_read_only { "read-only" } else { "writable" };
        let disks: Vec<&str> = target.luns.iter().map(|lun| lun.disk.as_str()).collect();
        print_line(&format!("{} ({kind}; LUNs from 1: {})", target.address, disks.join(", ")));
        for (client, line) in lines(target, &server, listen, chap) {
            print_line(&format!("  {client:<8} {line}"));
        }
    }
}

/// Refuses to serve a network without CHAP.
fn check_address(address: SocketAddr, has_chap: bool) -> Result<()> {
    if address.port() == 0 {
        return Err(Error::new(ErrorKind::InvalidInput, "port 0 is not a port: give another one"));
    }
    if !has_chap && !address.ip().is_loopback() {
        let text = format!(
            "{address} is reached from other machines: give --chap-user NAME --chap-secret-file FILE, \
             or listen on 127.0.0.1"
        );
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    Ok(())
}
