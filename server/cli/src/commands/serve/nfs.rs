//! `coldrise serve nfs`: serves the repository as an NFS datastore.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use clap::{Args, ValueEnum};
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::default_cache_bytes;
use serde_json::json;

use crate::invocation::Invocation;
use crate::report::{Report, print_line};
use crate::units::parse_size;
use coldrise_hosting::ganesha::{Client, Ganesha, NfsOptions, PATH};
use coldrise_hosting::signals::ChildSignals;

/// The default address.
const DEFAULT_NFS_ADDRESS: &str = "127.0.0.1:2049";

/// Serve every restore point and session over NFS, until Ctrl-C.
///
/// Clients mount /coldrise. It contains MACHINE/POINT/, read-only, with one file per disk and
/// image format, and live/SESSION/, writable. New points and sessions are served at once. A
/// line that starts with "ready" says that clients can connect.
#[derive(Debug, Args)]
pub(super) struct NfsArguments {
    /// IP address and port to listen on. Addresses other than loopback need --allow.
    #[arg(long, value_name = "ADDR:PORT", default_value = DEFAULT_NFS_ADDRESS)]
    listen: SocketAddr,

    /// Port of the NFSv3 mount protocol.
    #[arg(long, value_name = "PORT", default_value_t = 20048)]
    mount_port: u16,

    /// Clients that may connect, with root's rights: addresses or networks, such as
    /// 10.0.0.0/24. Can be repeated. Default: this machine.
    #[arg(long, value_name = "CIDR")]
    allow: Vec<Client>,

    /// NFS versions: 3, or 4 for 4.0 and 4.1. ESXi must not mount the same datastore with both.
    #[arg(long, value_name = "VERSIONS", value_delimiter = ',', default_value = "3,4")]
    versions: Vec<NfsVersion>,

    /// Close a file that no NFSv3 client has used for this many seconds. Until then its session
    /// cannot be ended or written by another process.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=86400))]
    idle: u32,

    /// Memory for decoded chunks, such as 64M or 2G; 0 disables the cache. Default: one eighth
    /// of the memory. The cache shrinks while little memory is available.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    cache: Option<u64>,

    /// Serve sessions read-only, too.
    #[arg(long)]
    read_only: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum NfsVersion {
    #[value(name = "3")]
    Three,
    #[value(name = "4")]
    Four,
}

pub(super) fn run(invocation: &Invocation, arguments: NfsArguments) -> Result<Report> {
    check_address(arguments.listen, &arguments.allow)?;
    if arguments.mount_port == 0 || arguments.mount_port == arguments.listen.port() {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            format!("--mount-port needs a port other than {}", arguments.mount_port),
        ));
    }
    let allowed =
        if arguments.allow.is_empty() { Client::this_machine().to_vec() } else { arguments.allow };
    let options = NfsOptions {
        listen: arguments.listen,
        mount_port: arguments.mount_port,
        allowed,
        serves_v3: arguments.versions.contains(&NfsVersion::Three),
        serves_v4: arguments.versions.contains(&NfsVersion::Four),
        idle: Duration::from_secs(u64::from(arguments.idle)),
        cache_bytes: arguments.cache.unwrap_or_else(default_cache_bytes),
        is_read_only: arguments.read_only,
    };
    let mut signals = ChildSignals::catch()?;
    // Report errors of the repository or the passphrase here, with our own message.
    drop(invocation.open()?);
    let mut ganesha = Ganesha::start(invocation.caller()?, &options, &mut signals)?;
    announce(invocation, &options);
    ganesha.serve(&mut signals)?;
    let object = json!({
        "address": options.listen.to_string(),
        "elapsed_ms": invocation.elapsed_ms(),
    });
    Ok(Report::done(&object, "ended"))
}

fn announce(invocation: &Invocation, options: &NfsOptions) {
    let lines = mount_lines(options);
    if invocation.is_json() {
        let lines: serde_json::Map<_, _> =
            lines.into_iter().map(|(client, line)| (client.to_owned(), json!(line))).collect();
        let object = json!({
            "event": "ready",
            "address": options.listen.to_string(),
            "path": PATH,
            "mount": lines,
        });
        print_line(&object.to_string());
        return;
    }
    print_line(&format!("ready: {}:{PATH} (Ctrl-C ends it)", host(options.listen.ip())));
    for (client, line) in lines {
        print_line(&format!("  {client:<6} {line}"));
    }
}

/// The commands with which clients mount it.
fn mount_lines(options: &NfsOptions) -> Vec<(&'static str, String)> {
    let host = host(options.listen.ip());
    let (port, mount_port) = (options.listen.port(), options.mount_port);
    let mut lines = Vec::new();
    // ESXi uses only the standard port.
    if port == 2049 && options.serves_v3 {
        let line = format!("esxcli storage nfs add -H {host} -s {PATH} -v coldrise");
        lines.push(("ESXi", line));
    } else if port == 2049 {
        lines.push(("ESXi", format!("esxcli storage nfs41 add -H {host} -s {PATH} -v coldrise")));
    }
    let version = if options.serves_v4 {
        format!("vers=4.1,port={port}")
    } else {
        format!("vers=3,proto=tcp,nolock,port={port},mountport={mount_port}")
    };
    lines.push(("Linux", format!("mount -t nfs -o {version} {host}:{PATH} /mnt")));
    // QEMU asks rpcbind for the ports of NFSv3 and accepts no options.
    if options.serves_v3 {
        let line = format!("nfs://{host}{PATH}/live/SESSION/DISK.raw");
        lines.push(("QEMU", line));
    }
    lines
}

/// The server's address as clients write it.
pub(super) fn host(address: IpAddr) -> String {
    match address {
        address if address.is_unspecified() => "SERVER".to_owned(),
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => format!("[{address}]"),
    }
}

/// Refuses to serve a network without an allow list: NFS trusts its clients about user ids.
fn check_address(address: SocketAddr, allowed: &[Client]) -> Result<()> {
    if address.port() == 0 {
        return Err(Error::new(ErrorKind::InvalidInput, "port 0 is not a port: give another one"));
    }
    if !address.ip().is_loopback() && allowed.is_empty() {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            format!(
                "{address} is reached from other machines: name the clients that may connect with \
                 --allow CIDR, or listen on 127.0.0.1"
            ),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_network_needs_an_allow_list() {
        let allow: Client = "10.0.0.0/24".parse().unwrap();
        for (address, allowed, is_accepted) in [
            ("127.0.0.1:2049", vec![], true),
            ("[::1]:2049", vec![], true),
            ("0.0.0.0:2049", vec![], false),
            ("10.0.0.1:2049", vec![], false),
            ("[::ffff:127.0.0.1]:2049", vec![], false),
            ("0.0.0.0:2049", vec![allow], true),
            ("127.0.0.1:0", vec![], false),
        ] {
            let checked = check_address(address.parse().unwrap(), &allowed);
            assert_eq!(checked.is_ok(), is_accepted, "{address}");
        }
    }

    #[test]
    fn mount_lines_match_the_served_nfs_versions() {
        let options = |listen: &str, serves_v3, serves_v4| NfsOptions {
            listen: listen.parse().unwrap(),
            mount_port: 20048,
            allowed: Vec::new(),
            serves_v3,
            serves_v4,
            idle: Duration::from_secs(60),
            cache_bytes: 0,
            is_read_only: false,
        };
        let all = mount_lines(&options("10.0.0.1:2049", true, true));
        assert_eq!(
            all,
            [
                ("ESXi", "esxcli storage nfs add -H 10.0.0.1 -s /coldrise -v coldrise".to_owned()),
                ("Linux", "mount -t nfs -o vers=4.1,port=2049 10.0.0.1:/coldrise /mnt".to_owned()),
                ("QEMU", "nfs://10.0.0.1/coldrise/live/SESSION/DISK.raw".to_owned()),
            ]
        );
        let only_4 = mount_lines(&options("10.0.0.1:2049", false, true));
        assert!(only_4[0].1.starts_with("esxcli storage nfs41 add -H 10.0.0.1 "), "{only_4:?}");
        assert_eq!(only_4.len(), 2, "QEMU's driver speaks NFSv3");
        let other_port = mount_lines(&options("0.0.0.0:3049", true, false));
        assert_eq!(other_port[0].0, "Linux", "ESXi knows one port only");
        assert!(other_port[0].1.ends_with("port=3049,mountport=20048 SERVER:/coldrise /mnt"));
    }
}
