//! Requests that make, check, read, publish and remove restore points.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser};
use coldrise_block::Result;
use coldrise_formats::Format;
use coldrise_hosts::parse_host_name;
use coldrise_ingest::{RestoreTarget, is_ova};
use coldrise_inventory::{BootStage, Retention};
use coldrise_store::{Address, DisplayName, MachineName, MarkRules, SessionName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::value::{
    only, pairs, parse_backup_machine, parse_percent, parse_point, parse_rate, parse_target,
    sealable, session_name, text,
};

/// Disks of a machine to back up.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Backup {
    /// The machine's name: 1 to 63 of the characters a-z 0-9 . _ -, starting with a letter or
    /// digit. With --from libvirt also another name of a domain: "Web Server 01" is stored as
    /// web-server-01, and the name is kept as the display name.
    #[arg(value_name = "MACHINE", value_parser = text(parse_backup_machine))]
    pub machine: String,
    /// Display name of the machine, if it differs from MACHINE: printable text of at most 255
    /// characters. Lists show it; searches and jobs accept it. Default: the title or name in
    /// libvirt's configuration, displayName in a .vmx file, display_name in Coldrise's own; else that
    /// of the latest point. Give MACHINE itself to remove it, until a configuration sets it again.
    #[arg(long, value_name = "NAME", value_parser = text(DisplayName::parse))]
    pub display_name: Option<String>,
    /// A disk's name and its source: an image file or an NBD URI.
    ///
    /// FORMAT is raw, qcow2, vmdk, vhd or vhdx. Without it, the file's extension decides.
    /// Content is never probed for the format.
    ///
    /// An .ova or .ovf file alone is a whole machine: its disks become vda, vdb and so on, and its
    /// hardware is stored. Its manifest is checked first.
    ///
    /// With --from: DISK=DEVICE; DEVICE is libvirt's target, such as vda, or QEMU's id of the device or
    /// the drive, or the block node's name. Default: all writable disks, with their existing names.
    #[arg(value_name = "DISK=[FORMAT:]SOURCE", required_unless_present = "from")]
    #[serde(with = "pairs")]
    #[schema(value_type = std::collections::BTreeMap<String, String>)]
    pub disks: Vec<String>,
    /// Read at most this many bytes per second from the sources, such as 20M.
    ///
    /// All disks share the rate. Only data that is read counts; holes and, with --bitmap, unchanged
    /// data do not. At most the bytes of 100 ms are read at once. The minimum is 64K.
    #[arg(long = "rate", value_name = "BYTES", value_parser = parse_rate, display_order = 100)]
    #[schema(minimum = 65536)]
    pub rate_bytes_per_second: Option<u64>,
}

/// Options of a backup that jobs have, too.
#[derive(Clone, Debug, Default, Args, Serialize)]
pub struct BackupOptions {
    /// Back up a machine while it runs: libvirt, libvirt:DOMAIN, or qmp:SOCKET with the monitor of its
    /// QEMU (-qmp unix:SOCKET,...). Default for DOMAIN: MACHINE.
    ///
    /// All writable disks are backed up as of one instant. Data that the machine overwrites during the
    /// backup is first saved in scratch files. Each backup creates checkpoints or dirty bitmaps that are
    /// named after its point, so that the next one reads only what has changed. See docs/recovery.md.
    #[arg(long, value_name = "SOURCE")]
    pub from: Option<String>,
    /// With --from libvirt: the hosts on which to look for the machine, by their names from coldrise host add. It is
    /// backed up on the host where it runs. Default: this host.
    #[arg(long, value_name = "HOST", requires = "from", value_delimiter = ',')]
    #[arg(value_parser = text(parse_host_name))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub on: Vec<String>,
    /// With --from libvirt: the URI of libvirt on its host. Default: $LIBVIRT_DEFAULT_URI on this host, else
    /// qemu:///system.
    #[arg(long, value_name = "URI", requires = "from")]
    pub connect: Option<String>,
    /// With --from: QEMU copies the disks, or what has changed, into scratch files before they are
    /// read.
    ///
    /// For disks with an iothread in a QEMU before 9.0, and if reading for a long time would slow the
    /// machine down. The scratch files need as much space as is copied; it is allocated first. During
    /// the copy, the machine's writes can wait for the scratch files.
    #[arg(long, requires = "from")]
    pub push: bool,
    /// With --from: freeze the guest's file systems for the instant through the guest agent, for at
    /// most 10 s. If the agent does not answer, the backup continues without the freeze.
    #[arg(long, requires = "from")]
    pub quiesce: bool,
    /// With --quiesce and qmp: the socket of the guest agent's port. libvirt knows its own.
    #[arg(long, value_name = "SOCKET", requires = "quiesce")]
    pub agent: Option<PathBuf>,
    /// Store the machine's configuration with the point: a libvirt .xml file, a .vmx file, or
    /// Coldrise's own .json. With --from libvirt the default is the domain's XML.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Read only the blocks that this dirty bitmap marks as written since the machine's latest
    /// backup. Every source must have the bitmap: NBD servers export it as
    /// qemu:dirty-bitmap:NAME, qcow2 files contain it as a persistent bitmap.
    #[arg(long, value_name = "NAME", conflicts_with = "from")]
    pub bitmap: Option<String>,
}

/// A point to boot in isolation.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CheckBoot {
    /// MACHINE/POINT, or live/SESSION@TIME.
    #[arg(value_name = "MACHINE/POINT", value_parser = text(Address::parse))]
    pub address: String,
    /// The stage to reach. Default: login, or service with --check-port or --check.
    #[arg(long, value_enum, value_name = "STAGE")]
    pub until: Option<BootStage>,
    /// A TCP port of the machine that has to accept connections. The machine has to use DHCP.
    ///
    /// During the check, a port on this host's loopback address is forwarded to it.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    #[schema(minimum = 1)]
    pub check_port: Option<u16>,
    /// The host that runs the machine (coldrise host add), instead of this one.
    #[arg(long, value_name = "HOST", value_parser = text(parse_host_name))]
    pub on: Option<String>,
}

/// Stored data to check.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Verify {
    /// Verify only this address: MACHINE/POINT or live/SESSION, with or without /DISK.
    #[arg(value_name = "ADDRESS", value_parser = text(Address::parse))]
    pub address: Option<String>,
    /// Read only about this percentage of the chunks, chosen at random, but at least a few.
    ///
    /// Captured blocks, chunk maps and documents are read completely.
    #[arg(long, value_name = "PERCENT", value_parser = parse_percent)]
    #[arg(conflicts_with = "address")]
    #[schema(exclusive_minimum = 0, maximum = 100)]
    pub sample: Option<f64>,
}

/// A point to publish for writing.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Publish {
    /// MACHINE/POINT, or live/SESSION@TIME.
    #[arg(value_name = "MACHINE/POINT", value_parser = text(Address::parse))]
    pub address: String,
    /// Name of the session. Default: the machine's name and the first unused number.
    #[arg(long = "name", value_name = "SESSION", value_parser = text(SessionName::parse))]
    pub session: Option<String>,
    /// Which time marks of the session are kept: off, or INTERVAL=AGE,…. Default:
    /// 1s=10m,10s=1h,1m=1d.
    #[arg(long, value_name = "RULE", value_parser = text(MarkRules::parse))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub marks: Option<String>,
}

/// A session to make a restore point of.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Seal {
    /// The session's name, live/SESSION, or live/SESSION@TIME for its state at a time mark.
    #[arg(value_name = "SESSION", value_parser = text(sealable))]
    pub session: String,
}

/// A session to end.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Unpublish {
    /// The session's name, or live/SESSION.
    #[arg(value_name = "SESSION", value_parser = text(session_name))]
    pub session: String,
    /// Discard everything captured since the last seal.
    #[arg(long)]
    #[serde(default)]
    pub discard: bool,
}

/// A disk to write to an image file.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Restore {
    /// MACHINE/POINT/DISK, live/SESSION/DISK or live/SESSION@TIME/DISK; /DISK is optional if there is only one disk. An OVA
    /// has all disks without /DISK.
    #[arg(value_name = "ADDRESS", value_parser = text(Address::parse))]
    pub address: String,
    /// A file name, which appears in the service's folder for restored images; for administrators
    /// also an absolute path, a device or an NBD URI.
    #[arg(value_name = "TARGET", value_parser = text(RestoreTarget::parse))]
    #[arg(help = "A new file, a block device, or an NBD URI")]
    pub target: String,
    /// Format of the image. Default: from the file's extension (raw, img, qcow2, vhd, vhdx,
    /// vmdk, ova); raw for devices and NBD servers.
    #[arg(long, value_name = "FORMAT", value_parser = restore_words())]
    pub format: Option<String>,
    /// Replace an existing file, or both files of the format.
    #[arg(long = "force")]
    #[serde(default)]
    pub replace: bool,
}

impl Restore {
    /// Whether it writes all disks of a machine, as an OVA.
    ///
    /// # Errors
    /// `InvalidInput` for a target that cannot be written.
    pub fn is_ova(&self) -> Result<bool> {
        is_ova(&RestoreTarget::parse(&self.target)?, self.format.as_deref())
    }
}

/// The words of image formats, and that of a whole machine.
fn restore_words() -> PossibleValuesParser {
    let ova =
        PossibleValue::new("ova").help("all disks and the hardware of the machine, in one file");
    let words = Format::ALL.map(|format| PossibleValue::new(format.word()).help(format.summary()));
    words.into_iter().chain([ova]).into()
}

/// The words of image formats.
pub fn format_words() -> PossibleValuesParser {
    Format::ALL.map(|format| PossibleValue::new(format.word()).help(format.summary())).into()
}

/// Points to remove.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Forget {
    /// Restore points; with --all, whole machines.
    #[arg(value_name = "MACHINE/POINT", required = true, value_parser = text(parse_target))]
    #[schema(min_items = 1, max_items = 1000)]
    pub addresses: Vec<String>,
}

/// Points to protect.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Protect {
    /// The restore points.
    #[arg(value_name = "MACHINE/POINT", required = true, value_parser = text(parse_point))]
    #[schema(min_items = 1, max_items = 1000)]
    pub addresses: Vec<String>,
}

/// Points to set aside.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = QuarantineRequest)]
pub struct Quarantine {
    /// The restore points. Here latest counts quarantined points too, so that quarantine, release
    /// and a repeated command mean the same point.
    #[arg(value_name = "MACHINE/POINT", required = true, value_parser = text(parse_point))]
    #[schema(min_items = 1, max_items = 1000)]
    pub addresses: Vec<String>,
}

/// Points to take out of quarantine.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Release {
    /// The restore points, with the same address as for quarantine: here latest includes
    /// quarantined points.
    #[arg(value_name = "MACHINE/POINT", required = true, value_parser = text(parse_point))]
    #[schema(min_items = 1, max_items = 1000)]
    pub addresses: Vec<String>,
}

/// Rules that remove points.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Prune {
    /// Prune only these machines. Default: all machines. The rules apply to each machine
    /// separately.
    #[arg(value_name = "MACHINE", value_parser = text(MachineName::parse))]
    pub machines: Option<Vec<String>>,
    /// The rules.
    #[command(flatten)]
    pub rules: Retention,
}

/// The space of removed points, to be freed.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Gc {}

/// Captured writes of sealed points to fold into chunks.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Fold {
    /// Fold only these restore points: MACHINE/POINT. Default: all synthetic restore points.
    #[arg(id = "address", value_name = "ADDRESS", value_parser = text(Address::parse))]
    #[serde(default, rename = "address", with = "only")]
    #[schema(value_type = Option<String>)]
    pub addresses: Vec<String>,
}
