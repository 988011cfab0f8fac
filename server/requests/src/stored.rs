//! Requests that store, check, read and fold data.

use clap::Args;
use coldrise_inventory::BootStage;
use coldrise_store::{Address, MachineName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::value::{pairs, rate, text, Pair, Pairs};

/// Back up disks of a machine as one restore point.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Backup {
    /// The machine's name: 1 to 63 of the characters a-z 0-9 . _ -, starting with a letter or digit.
    #[arg(value_name = "MACHINE", value_parser = text::<MachineName>)]
    pub machine: String,

    /// A disk's name and its source: an image file or an NBD URI, such as vda=raw:/dev/vg0/web01.
    ///
    /// FORMAT is raw, qcow2, vmdk, vhd or vhdx. Without it, the file's extension decides.
    /// Content is never probed for the format.
    ///
    /// With --from: DISK=DEVICE; DEVICE is libvirt's target, such as vda, or QEMU's id of the device or
    /// the drive, or the block node's name. Default: all writable disks, with their existing names.
    #[arg(value_name = "DISK=[FORMAT:]SOURCE", required_unless_present = "from")]
    #[serde(with = "pairs")]
    #[schema(value_type = std::collections::BTreeMap<String, String>)]
    pub disks: Pairs,

    /// Read at most this many bytes per second from the sources, such as 20M.
    ///
    /// All disks share the rate. Only data that is read counts: neither holes nor, with --bitmap,
    /// unchanged data. The reads of 100 ms at a time are even. At least 64K.
    #[arg(long = "rate", value_name = "BYTES", value_parser = rate)]
    #[schema(minimum = 65536)]
    pub rate_bytes_per_second: Option<u64>,
}

/// Boot a point in isolation, and store the evidence with it.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CheckBoot {
    /// MACHINE/POINT.
    #[arg(value_name = "MACHINE/POINT", value_parser = text::<Address>)]
    pub address: String,

    /// The stage to reach. Default: login, or service with --check-port or --check.
    #[arg(long, value_enum, value_name = "STAGE")]
    pub until: Option<BootStage>,

    /// A TCP port of the machine that has to accept connections. The machine has to use DHCP.
    ///
    /// During the check a port of this host's loopback leads to it.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    #[schema(minimum = 1)]
    pub check_port: Option<u16>,
}

/// Check stored data: of an address, or of everything.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Verify {
    /// Verify only this address: MACHINE/POINT or live/SESSION, with or without /DISK.
    #[arg(value_name = "ADDRESS", value_parser = text::<Address>)]
    pub address: Option<String>,

    /// Read only about this percentage of the chunks, chosen at random, but at least a few.
    ///
    /// Captured blocks, chunk maps and documents are read completely.
    #[arg(long, value_name = "PERCENT", value_parser = crate::value::percent)]
    #[arg(conflicts_with = "address")]
    pub sample: Option<f64>,
}

/// Write a disk to an image file.
#[derive(Clone, Debug, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Restore {
    /// MACHINE/POINT/DISK or live/SESSION/DISK; /DISK is optional if there is only one disk.
    #[arg(value_name = "ADDRESS", value_parser = text::<Address>)]
    pub address: String,

    /// A new file, a block device, or an NBD URI.
    ///
    /// A service takes a file name, which appears in its folder for restored images; the others only from
    /// administrators.
    #[arg(value_name = "TARGET")]
    pub target: String,

    /// Format of the image. Default: from the file's extension (raw, img, qcow2, vhd, vhdx,
    /// vmdk); raw for devices and NBD servers.
    #[arg(long, value_name = "FORMAT", value_parser = ["raw", "qcow2", "vhd", "vhdx", "vmdk"])]
    pub format: Option<String>,

    /// Replace an existing file, or both files of the format.
    #[arg(long = "force")]
    #[serde(default)]
    pub replace: bool,
}

/// Free the space of removed points.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Gc {}

/// Fold captured writes of sealed points into chunks: of an address, or of all.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Fold {
    /// Fold only this restore point. Default: all synthetic restore points.
    #[arg(value_name = "MACHINE/POINT", value_parser = text::<Address>)]
    pub address: Option<String>,
}
