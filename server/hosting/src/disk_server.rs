//! Serves the disks of a machine that runs here, with nbdkit or nfs-ganesha.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_session::SessionDocument;
use coldrise_store::{DiskName, SessionName};
use serde_json::{Value, json};

use crate::caller::Caller;
use crate::ganesha::{self, Client, Ganesha, NfsOptions};
use crate::nbdkit::{Endpoint, Nbdkit, ServeOptions};
use crate::place::QemuPlace;
use crate::qemu;
use crate::signals::ChildSignals;
use coldrise_host::SocketAccess;

/// The machine keeps its disks open while it runs, also while it uses none.
const NO_IDLE_END: Duration = Duration::from_millis(u32::MAX as u64);

/// nbdkit's socket in the folder of sockets.
const SOCKET: &str = "nbd";

/// The protocol between a machine and its disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Protocol {
    /// NBD, on a Unix socket.
    Nbd,
    /// NFSv3, as from a datastore.
    Nfs,
}

/// A running server. Dropping it ends it.
pub enum DiskServer {
    /// nbdkit, and the path at which QEMU reaches its socket.
    Nbd(Box<Nbdkit>, PathBuf),
    /// nfs-ganesha.
    Nfs(Box<Ganesha>),
}

/// Checks that the server for that protocol is installed; nbdkit reports that itself at its
/// start.
///
/// # Errors
/// `ToolFailed`, `Unsupported`: the message says what is missing and what to install.
pub fn check(protocol: Protocol) -> Result<()> {
    match protocol {
        Protocol::Nbd => Ok(()),
        Protocol::Nfs => {
            ganesha::check_installed()?;
            ganesha::check_rpcbind()?;
            qemu::check_nfs_driver()
        }
    }
}

impl DiskServer {
    /// Starts a server for one machine on these sessions; `scratch` is a private folder. Over NBD
    /// it serves nothing else: the machine is not trusted.
    ///
    /// # Errors
    /// As [`Nbdkit::start`] and [`Ganesha::start`].
    pub fn start(
        protocol: Protocol,
        caller: &Caller,
        sessions: &[&SessionDocument],
        scratch: &Path,
        cache_bytes: u64,
        signals: &mut ChildSignals,
    ) -> Result<DiskServer> {
        match protocol {
            Protocol::Nbd => {
                let socket = scratch.join(SOCKET);
                let options = ServeOptions {
                    endpoint: Endpoint::Socket(socket.clone(), SocketAccess::default()),
                    tls: None,
                    cache_bytes,
                    is_read_only: false,
                    lists_formats: false,
                    disconnects_at_end: false,
                    only: sessions
                        .iter()
                        .flat_map(|session| {
                            session.disks.iter().map(|disk| export(&session.name, &disk.name))
                        })
                        .collect(),
                };
                Nbdkit::start(caller, &options, signals)
                    .map(|nbdkit| DiskServer::Nbd(Box::new(nbdkit), socket))
            }
            Protocol::Nfs => {
                let [listen, mount] = free_addresses()?;
                let options = NfsOptions {
                    listen,
                    mount_port: mount.port(),
                    allowed: Client::this_machine().to_vec(),
                    serves_v3: true,
                    serves_v4: false,
                    idle: NO_IDLE_END,
                    cache_bytes,
                    is_read_only: false,
                };
                Ganesha::start(caller, &options, signals)
                    .map(|ganesha| DiskServer::Nfs(Box::new(ganesha)))
            }
        }
    }

    /// Lets QEMU of another host reach the disks, over NBD.
    ///
    /// # Errors
    /// Those of [`QemuPlace::offer`].
    pub(crate) fn offer(&mut self, place: &QemuPlace) -> Result<()> {
        if let DiskServer::Nbd(_, socket) = self {
            *socket = place.offer(SOCKET)?;
        }
        Ok(())
    }

    /// A session's disk as QEMU opens it: a block node without its name.
    pub fn node(&self, session: &SessionName, disk: &DiskName) -> Value {
        match self {
            DiskServer::Nbd(_, socket) => json!({
                "driver": "nbd",
                "server": { "type": "unix", "path": socket },
                "export": export(session, disk),
                "reconnect-delay": qemu::RECONNECT_DELAY_S,
            }),
            // The driver asks rpcbind for the port.
            DiskServer::Nfs(_) => json!({
                "driver": "raw",
                "file": {
                    "driver": "nfs",
                    "server": { "type": "inet", "host": Ipv4Addr::LOCALHOST },
                    "path": format!("{}/live/{session}/{disk}.raw", ganesha::PATH),
                },
            }),
        }
    }

    /// Call this when a child may have ended.
    ///
    /// # Errors
    /// `ToolFailed` if the server has ended and cannot be restarted; `Interrupted` if this
    /// program receives a signal to end during a restart.
    pub fn look_after(&mut self, caller: &Caller, signals: &mut ChildSignals) -> Result<()> {
        let (name, ended) = match self {
            DiskServer::Nbd(nbdkit, _) => ("nbdkit", nbdkit.keep_up(caller, signals)?),
            DiskServer::Nfs(ganesha) => ("nfs-ganesha", ganesha.keep_up()?),
        };
        match ended {
            None => Ok(()),
            Some(status) => {
                let text = format!("{name} ended ({status}) while the machine was running");
                Err(Error::new(ErrorKind::ToolFailed, text))
            }
        }
    }

    /// Whether it has ended by itself and was started again.
    pub(crate) fn has_restarted(&self) -> bool {
        match self {
            DiskServer::Nbd(nbdkit, _) => nbdkit.has_restarted(),
            // It never is.
            DiskServer::Nfs(_) => false,
        }
    }

    /// Ends it in order: the session is flushed and closed.
    ///
    /// # Errors
    /// `ToolFailed` if it ends with an error.
    pub fn stop(&mut self) -> Result<()> {
        match self {
            DiskServer::Nbd(nbdkit, _) => nbdkit.stop(None),
            DiskServer::Nfs(ganesha) => ganesha.stop(None),
        }
    }
}

fn export(session: &SessionName, disk: &DiskName) -> String {
    format!("live/{session}/{disk}")
}

/// Two free ports of loopback.
fn free_addresses() -> Result<[SocketAddr; 2]> {
    let listen = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    // Both at the same time, so that they differ.
    let found = listen().and_then(|one| listen().map(|other| [one, other]));
    let [one, other] = found.context(|| "looking for free ports")?;
    let address = |listener: TcpListener| listener.local_addr().context(|| "asking for a port");
    Ok([address(one)?, address(other)?])
}
