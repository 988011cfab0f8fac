//! Requests that bring machines and disks back into production.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use coldrise_block::units::parse_size;
use coldrise_hosts::parse_host_name;
use coldrise_https::Thumbprint;
use coldrise_hypervisors::attach::Machine;
use coldrise_hypervisors::moves;
use coldrise_ingest::RestoreTarget;
use coldrise_ingest::rollback::RollbackDisk;
use coldrise_store::{Address, MarkRules, PointName, SessionName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::value::{Hypervisor, live_session, pairs, parse_network, text};

/// A machine to run under its own hypervisor.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Recover {
    /// MACHINE/POINT; or live/SESSION, to continue with a recovered machine.
    #[arg(value_name = "MACHINE/POINT|live/SESSION", value_parser = text(Address::parse))]
    pub address: String,
    /// The hypervisor: libvirt on the service's host or that of `on`; vcenter:NAME or esxi:NAME, a server of GET /hypervisors.
    /// Required for a point.
    #[arg(long, value_name = "HYPERVISOR", value_parser = text(Hypervisor::from_str))]
    #[arg(help = "For a point: libvirt; vcenter:HOST or esxi:HOST, with a port if it is not 443")]
    pub to: Option<String>,
    /// Stop the machine of live/SESSION immediately, and end its session. Its writes become a restore point,
    /// unless --discard is given.
    #[arg(long, conflicts_with_all = ["to", "name", "new_uuid", "network", "connect"])]
    #[serde(default)]
    pub undo: bool,
    /// With --undo: discard the machine's writes.
    #[arg(long, requires = "undo")]
    #[serde(default)]
    pub discard: bool,
    /// Under libvirt: the host that runs the machine (coldrise host add), instead of this one.
    #[arg(long, value_name = "HOST", value_parser = text(parse_host_name), conflicts_with = "undo")]
    pub on: Option<String>,
    /// URI of libvirt on that host.
    #[arg(long, value_name = "URI", default_value = "qemu:///system")]
    pub connect: Option<String>,
    /// Name of the machine, and of the session. Default: the stored name; under vCenter and ESXi with the
    /// ending -recovered.
    #[arg(long, value_name = "NAME", value_parser = text(SessionName::parse))]
    pub name: Option<String>,
    /// Which time marks of the session are kept: off, or INTERVAL=AGE,…. Default:
    /// 1s=10m,10s=1h,1m=1d.
    #[arg(long, conflicts_with = "undo", value_name = "RULE", value_parser = text(MarkRules::parse))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub marks: Option<String>,
    /// Give the machine a new UUID and new network addresses, so that it can run beside the original.
    /// Without --name its name gets the ending -recovered.
    #[arg(long)]
    #[serde(default)]
    pub new_uuid: bool,
    /// Network cards: none (no link), same (as stored), or the name of a network of libvirt.
    #[arg(long, value_name = "none|same|NETWORK", default_value = "none", value_parser = text(parse_network))]
    pub network: Option<String>,
    /// Host that runs the machine, by its name in the inventory. Can be repeated: the first host runs the
    /// machine, the others mount the datastore, too. Not needed if there is only one host.
    #[arg(long = "host", value_name = "NAME", help_heading = "vCenter and ESXi")]
    #[serde(default)]
    #[schema(max_items = 64)]
    pub hosts: Vec<String>,
    /// With --undo: the machine's host, or the server of vCenter or ESXi, is gone for good. Change nothing there and only end
    /// the session.
    #[arg(long, requires = "undo", display_order = 100)]
    #[serde(default)]
    pub without_server: bool,
}

/// How to log in to vCenter or ESXi, and how its hosts reach this machine. A service adds them from its configuration.
#[derive(Clone, Debug, Default, Args, Serialize)]
#[command(next_help_heading = "vCenter and ESXi")]
pub struct VsphereLogin {
    /// User of vCenter or ESXi, such as backup@vsphere.local.
    #[arg(long, value_name = "USER")]
    pub user: Option<String>,
    /// Read the user's password from FILE; without it, COLDRISE_VSPHERE_PASSWORD from the environment.
    #[arg(long, value_name = "FILE")]
    pub password_file: Option<PathBuf>,
    /// Trust this certificate of vCenter or ESXi, or of its authority (PEM), instead of the system's authorities.
    #[arg(long, value_name = "FILE")]
    pub certificate: Option<PathBuf>,
    /// Trust exactly the certificate of vCenter or ESXi with this SHA-256 thumbprint, as its console shows it: 32
    /// bytes in hexadecimal, with or without colons. Its names and validity dates are then not checked.
    #[arg(long, value_name = "SHA256", conflicts_with = "certificate")]
    pub thumbprint: Option<Thumbprint>,
    /// Address of this machine by which the hosts reach it. Default: the one on the route to the first host.
    #[arg(long, value_name = "ADDRESS")]
    pub nfs_server: Option<IpAddr>,
}

/// A machine whose disks move to production storage while it runs. To paths of the service's host: administrators of
/// all machines only.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Move {
    /// live/SESSION.
    #[arg(value_name = "live/SESSION", value_parser = text(live_session))]
    pub address: String,
    /// DISK=PATH for each disk: a new file, or an empty block device. DISK=qcow2:PATH and
    /// DISK=raw:PATH give the format; otherwise .raw and .img files are raw, others qcow2.
    /// A folder takes all disks as MACHINE-DISK.qcow2.
    #[arg(value_name = "TARGET", value_parser = text(moves::parse_target))]
    #[serde(default)]
    #[schema(max_items = 256)]
    pub targets: Vec<String>,
    /// Datastore for a machine that was recovered under vCenter. vCenter copies, by Storage vMotion.
    #[arg(long, value_name = "DATASTORE")]
    #[arg(conflicts_with_all = ["targets", "rate_bytes_per_second", "replace"])]
    pub to: Option<String>,
    /// Copy at most this many bytes per second, such as 50M, all disks together. Without it, the
    /// copy yields to guest I/O.
    #[arg(long = "rate", value_name = "BYTES", value_parser = parse_size, display_order = 10)]
    #[schema(minimum = 65536)]
    pub rate_bytes_per_second: Option<u64>,
    /// Overwrite existing files, and block devices that are not empty.
    #[arg(long = "force", display_order = 11)]
    #[serde(default)]
    pub replace: bool,
}

/// Existing disks to make equal to a point. Administrators of all machines only.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rollback {
    /// MACHINE/POINT or MACHINE/POINT/DISK; or live/SESSION@TIME.
    #[arg(value_name = "ADDRESS", value_parser = text(Address::parse))]
    pub address: String,
    /// Disks of the point and their targets, such as vda=/dev/vg0/web01.
    #[arg(value_name = "DISK=TARGET", value_parser = text(RollbackDisk::parse), required_unless_present = "onto")]
    #[serde(default, with = "pairs")]
    #[schema(value_type = std::collections::BTreeMap<String, String>)]
    pub disks: Vec<String>,
    /// The target of the point's only disk, or of the one that ADDRESS names: a block device, a raw
    /// image file, or the NBD URI of a writable export.
    #[arg(long, value_name = "TARGET", value_parser = text(RestoreTarget::parse), conflicts_with = "disks")]
    pub onto: Option<String>,
    /// The host of the targets, which are absolute paths there (coldrise host add), instead of this one.
    #[arg(long, value_name = "HOST", value_parser = text(parse_host_name), conflicts_with = "since")]
    pub on: Option<String>,
    /// The targets export a dirty bitmap with all writes since this point of the machine.
    ///
    /// Only these writes and the differences between the points are then read. Without it, the
    /// targets are read completely.
    #[arg(long, value_name = "POINT", value_parser = text(PointName::parse))]
    pub since: Option<String>,
    /// The bitmap's name. Default: coldrise-POINT, with the point of --since.
    #[arg(long, value_name = "NAME", requires = "since")]
    pub bitmap: Option<String>,
    /// Show how much differs and in how many ranges; write nothing.
    #[arg(long)]
    #[serde(default)]
    pub dry_run: bool,
    /// Do not store the present state first. The rollback can then not be undone.
    #[arg(long)]
    #[serde(default)]
    pub no_safety_point: bool,
    /// At the end, compare the whole disks with the point, not only the ranges that were written.
    #[arg(long, conflicts_with = "dry_run")]
    #[serde(default)]
    pub verify: bool,
}

/// How the guest sees an attached disk.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum AttachedAs {
    /// virtio-blk-pci.
    #[default]
    Virtio,
    /// A disk of the machine's SCSI controller.
    Scsi,
}

/// A disk for a running machine. Administrators of all machines only.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Attach {
    /// MACHINE/POINT/DISK or live/SESSION/DISK; /DISK is optional if there is only one disk.
    #[arg(value_name = "ADDRESS", value_parser = text(Address::parse))]
    pub address: String,
    /// The machine: libvirt:DOMAIN, or qmp:SOCKET with the socket of QEMU's monitor. No other program may be
    /// connected to the monitor at the same time.
    #[arg(long, value_name = "MACHINE", value_parser = text(Machine::from_str))]
    pub to: String,
    /// Name of the disk: up to 20 letters, digits and '-', '_', '.'. Default: MACHINE-DISK or
    /// SESSION-DISK, cut to 20 characters.
    #[arg(long = "as", value_name = "NAME", display_order = 10)]
    pub name: Option<String>,
    /// With libvirt: the host on which the machine runs (coldrise host add), instead of this one.
    #[arg(long, value_name = "HOST", value_parser = text(parse_host_name))]
    pub on: Option<String>,
    /// How the guest sees the disk.
    #[arg(long, value_name = "KIND", default_value = "virtio", display_order = 11)]
    pub device: Option<AttachedAs>,
}

/// An attached disk to detach. Administrators of all machines only.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Detach {
    /// The disk's name, as `attach` printed it.
    #[arg(value_name = "NAME")]
    pub name: String,
    /// The machine: libvirt:DOMAIN, or qmp:SOCKET with the socket of QEMU's monitor.
    #[arg(long, value_name = "MACHINE", value_parser = text(Machine::from_str))]
    pub from: String,
    /// With libvirt: the host on which the machine runs (coldrise host add), instead of this one.
    #[arg(long, value_name = "HOST", value_parser = text(parse_host_name))]
    pub on: Option<String>,
}
