//! `coldrise serve nbd`: serves the repository over NBD.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::default_cache_bytes;
use serde_json::json;

use crate::invocation::Invocation;
use crate::report::{Report, print_line};
use crate::units::parse_size;
use coldrise_host::{SocketAccess, SocketOwner, parse_mode};
use coldrise_hosting::nbdkit::{Endpoint, Nbdkit, ServeOptions, Tls};
use coldrise_hosting::signals::ChildSignals;

/// The default address.
pub(crate) const DEFAULT_ADDRESS: &str = "127.0.0.1:10809";

/// Serve every restore point and session over NBD, until Ctrl-C.
///
/// Exports are MACHINE/POINT/DISK, read-only, and live/SESSION/DISK, writable. Each disk of a
/// point is also exported as image files: MACHINE/POINT/DISK.raw, .vhd, .vhdx, .vmdk and
/// .qcow2, the compact .dynamic.vhd, .dynamic.vhdx, .sparse.vmdk and .sparse.qcow2, and
/// .hosted.vmdk and .external.qcow2. New points and sessions are served at once. A line that
/// starts with "ready" says that the server accepts connections.
#[derive(Debug, Args)]
pub(super) struct NbdArguments {
    /// IP address and port to listen on. Addresses other than loopback need TLS.
    #[arg(long, value_name = "ADDR:PORT", default_value = DEFAULT_ADDRESS)]
    #[arg(conflicts_with = "socket")]
    listen: SocketAddr,

    /// Listen on a Unix socket instead. By default only this user can connect; see the next two
    /// options.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Owner of the socket, such as libvirt-qemu, and its group. Needs root.
    #[arg(long, value_name = "USER[:GROUP]", requires = "socket")]
    #[arg(conflicts_with = "listen")]
    socket_owner: Option<SocketOwner>,

    /// Octal permissions of the socket. Default: 600, or 660 if a group is given.
    #[arg(long, value_name = "MODE", requires = "socket", value_parser = parse_mode)]
    #[arg(conflicts_with = "listen")]
    socket_mode: Option<u32>,

    /// Memory for decoded chunks, such as 64M or 2G; 0 disables the cache. Default: one eighth
    /// of the memory. The cache shrinks while little memory is available.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    cache: Option<u64>,

    /// Serve sessions read-only, too.
    #[arg(long)]
    read_only: bool,

    /// Include image files in the list of exports. Without this option clients can open them,
    /// but the list contains only the disks.
    #[arg(long)]
    list_formats: bool,

    /// Require TLS with ca-cert.pem, server-cert.pem and server-key.pem from this directory.
    /// Clients must present a certificate of the same CA.
    #[arg(long, value_name = "DIR", conflicts_with = "tls_psk")]
    tls_certificates: Option<PathBuf>,

    /// Require TLS with the pre-shared keys in this file (lines of NAME:HEXKEY, see psktool).
    #[arg(long, value_name = "FILE")]
    tls_psk: Option<PathBuf>,
}

pub(super) fn run(invocation: &Invocation, arguments: NbdArguments) -> Result<Report> {
    let tls = match (arguments.tls_certificates, arguments.tls_psk) {
        (Some(directory), _) => Some(Tls::Certificates(directory)),
        (None, Some(file)) => Some(Tls::SharedKeys(file)),
        (None, None) => None,
    };
    let endpoint = match arguments.socket {
        Some(path) => Endpoint::Socket(
            path,
            SocketAccess { owner: arguments.socket_owner, mode: arguments.socket_mode },
        ),
        None => Endpoint::Tcp(check_address(arguments.listen, tls.is_some())?),
    };
    let options = ServeOptions {
        endpoint,
        tls,
        cache_bytes: arguments.cache.unwrap_or_else(default_cache_bytes),
        is_read_only: arguments.read_only,
        lists_formats: arguments.list_formats,
        disconnects_at_end: true,
        only: Vec::new(),
    };
    let mut signals = ChildSignals::catch()?;
    // Report errors of the repository or the passphrase here, with our own message.
    drop(invocation.open()?);
    let mut nbdkit = Nbdkit::start(invocation.caller()?, &options, &mut signals)?;
    let uri = nbdkit.uri("");
    if invocation.is_json() {
        print_line(&json!({ "event": "ready", "uri": uri }).to_string());
    } else {
        print_line(&format!("ready: {uri} (Ctrl-C ends it)"));
    }
    nbdkit.serve(invocation.caller()?, &mut signals)?;
    let object = json!({ "uri": uri, "elapsed_ms": invocation.elapsed_ms() });
    Ok(Report::done(&object, "ended"))
}

/// Refuses to serve a network without TLS.
fn check_address(address: SocketAddr, has_tls: bool) -> Result<SocketAddr> {
    if address.port() == 0 {
        return Err(Error::new(ErrorKind::InvalidInput, "port 0 is not a port: give another one"));
    }
    if !has_tls && !address.ip().is_loopback() {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            format!(
                "{address} is reached from other machines, where NBD is served with TLS only: \
                 give --tls-certificates DIR or --tls-psk FILE, or listen on 127.0.0.1 or a \
                 --socket"
            ),
        ));
    }
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::check_address;

    #[test]
    fn only_tls_leaves_the_machine() {
        for (address, has_tls, is_accepted) in [
            ("127.0.0.1:10809", false, true),
            ("127.9.9.9:1", false, true),
            ("[::1]:10809", false, true),
            ("0.0.0.0:10809", false, false),
            ("[::]:10809", false, false),
            ("192.168.1.5:10809", false, false),
            ("[::ffff:127.0.0.1]:10809", false, false),
            ("0.0.0.0:10809", true, true),
            ("127.0.0.1:0", false, false),
        ] {
            let checked = check_address(address.parse().unwrap(), has_tls);
            assert_eq!(checked.is_ok(), is_accepted, "{address}");
        }
    }
}
