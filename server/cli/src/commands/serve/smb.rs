//! `coldrise serve smb`: serves the repository as an SMB share for Hyper-V.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result, ScratchKind};
use coldrise_hosting::mount_server::{SHARE, hyper_v};
use coldrise_store::{Repository, default_cache_bytes};
use serde_json::json;

use super::nfs::host;
use super::secret_file;
use crate::invocation::Invocation;
use crate::report::{Report, print_line};
use crate::units::parse_size;
use coldrise_hosting::ganesha::Client;
use coldrise_hosting::mount_server::{MountServer, MountedAs, SmbOptions, Smbd, check_smbd};
use coldrise_hosting::signals::ChildSignals;

/// The default address. Windows uses no other port.
const DEFAULT_SMB_ADDRESS: &str = "127.0.0.1:445";
const SMB_PORT: u16 = 445;
/// Shown in commands if no session is published.
const NO_SESSION: &str = "SESSION";

/// Serve every restore point and session as an SMB share for Hyper-V, until Ctrl-C.
///
/// The share is \\HOST\coldrise, with SMB 3.1.1, always encrypted. It contains live\SESSION\DISK.vhdx,
/// writable, and MACHINE\POINT\DISK.vhdx, read-only. One file of a session's disk can be open for
/// writing at a time. Needs Samba and root; the host's own Samba is unchanged. A line that starts with
/// "ready" says that clients can connect; the commands for a Hyper-V host follow. See
/// docs/recovery-hyperv.md.
#[derive(Debug, Args)]
pub(super) struct SmbArguments {
    /// IP address and port to listen on. Windows uses port 445 only.
    #[arg(long, value_name = "ADDR:PORT", default_value = DEFAULT_SMB_ADDRESS)]
    listen: SocketAddr,

    /// Name with which clients connect. It is not a user of this host.
    #[arg(long, value_name = "NAME", default_value = "coldrise")]
    user: String,

    /// File whose first line is the password for clients.
    #[arg(long, value_name = "FILE")]
    password_file: PathBuf,

    /// Clients that may connect: addresses or networks, such as 10.0.0.0/24. Can be repeated.
    /// Default: all that know the password.
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

pub(super) fn run(invocation: &Invocation, arguments: SmbArguments) -> Result<Report> {
    check(&arguments)?;
    let options = SmbOptions {
        listen: arguments.listen,
        user: arguments.user,
        password: secret_file::first_line(&arguments.password_file)?,
        allowed: arguments.allow.iter().map(ToString::to_string).collect(),
        is_read_only: arguments.read_only,
    };
    let mounted = MountedAs {
        kind: ScratchKind::Smb,
        cache_bytes: arguments.cache.unwrap_or_else(default_cache_bytes),
        is_read_only: arguments.read_only,
    };
    let mut signals = ChildSignals::catch()?;
    let repository = invocation.access()?.open(mounted.cache_bytes)?;
    let make = |mount: &std::path::Path, state: &std::path::Path| Smbd::new(&options, mount, state);
    let mut server = MountServer::start(&repository, &mounted, make, &mut signals)?;
    announce(invocation, &repository, &options)?;
    let served = server.serve(&mut signals);
    let finished = server.finish(Some(&mut signals));
    served.and(finished)?;
    let object = json!({
        "address": options.listen.to_string(),
        "elapsed_ms": invocation.elapsed_ms(),
    });
    Ok(Report::done(&object, "ended"))
}

fn check(arguments: &SmbArguments) -> Result<()> {
    if arguments.listen.port() == 0 {
        return Err(Error::new(ErrorKind::InvalidInput, "port 0 is not a port: give another one"));
    }
    if !rustix::process::geteuid().is_root() {
        let text = "serve smb needs root: smbd keeps its users apart by changing its own user";
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    check_smbd()
}

/// The end of the names of sessions that end with their command.
const THROWAWAY: &str = "-throwaway";

fn announce(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    options: &SmbOptions,
) -> Result<()> {
    let host = host(options.listen.ip());
    let share = format!(r"\\{host}\{SHARE}");
    let sessions = coldrise_session::sessions(repository)?;
    // The newest is the one to recover.
    // Those of machines that read files and of boot checks end by themselves.
    let own = sessions.iter().map(|state| &state.document);
    let own = own.filter(|session| !session.name.as_str().ends_with(THROWAWAY));
    let newest = own.max_by_key(|session| session.created_at_ms);
    let (session, disks) = match newest {
        Some(session) => {
            let disks = session.disks.iter().map(|disk| disk.name.to_string()).collect();
            (session.name.to_string(), disks)
        }
        None => (NO_SESSION.to_owned(), vec!["DISK".to_owned()]),
    };
    let lines = hyper_v::lines(&host, &options.user, &session, &disks);
    if invocation.is_json() {
        let object = json!({
            "event": "ready",
            "address": options.listen.to_string(),
            "share": share,
            "user": options.user,
            "hyper_v": lines,
        });
        print_line(&object.to_string());
        return Ok(());
    }
    print_line(&format!("ready: {share} (Ctrl-C ends it)"));
    if options.listen.port() != SMB_PORT {
        print_line(&format!("  port {}: Windows connects to port 445 only", options.listen.port()));
    }
    print_line(
        "On the Hyper-V host (untested with Hyper-V itself), the first line also as SYSTEM:",
    );
    lines.iter().for_each(|line| print_line(&format!("  {line}")));
    Ok(())
}
