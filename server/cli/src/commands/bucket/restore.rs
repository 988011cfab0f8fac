//! `coldrise bucket restore`: a disk from a bucket, without a repository here.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_ingest::RestoreTarget;
use coldrise_store::Address;

use super::{find, open_for, parse_url};
use crate::commands::restore::{Written, choose_disk, restore_disk};
use crate::invocation::Invocation;
use crate::report::Report;

/// Write a disk of a restore point in a bucket to a file, a device or an NBD server.
///
/// As coldrise restore, without a repository on this host: it needs only the bucket's access keys and passphrase.
#[derive(Debug, Args)]
pub(crate) struct RestoreArguments {
    /// The bucket: s3://BUCKET/PREFIX.
    #[arg(value_name = "BUCKET", value_parser = parse_url)]
    bucket: String,

    /// MACHINE/POINT/DISK, such as web01/latest; /DISK is optional if there is only one disk.
    #[arg(value_name = "ADDRESS")]
    address: Address,

    /// A new file, a block device, or an NBD URI.
    #[arg(value_name = "TARGET", value_parser = RestoreTarget::parse)]
    target: RestoreTarget,

    #[command(flatten)]
    written: Written,
}

pub(super) fn run(
    invocation: &Invocation,
    arguments: &RestoreArguments,
    cancel: &Arc<AtomicBool>,
) -> Result<Report> {
    let Address::Point { machine, selector, disk } = &arguments.address else {
        let text = format!("{}: a bucket has no sessions", arguments.address);
        return Err(Error::new(ErrorKind::InvalidInput, text));
    };
    let bucket = open_for(invocation, &arguments.bucket, cancel)?;
    let point = find(&bucket, machine, selector)?;
    let names = point.disks.iter().map(|disk| &disk.name);
    let name = choose_disk(&arguments.address, disk.as_ref(), names)?;
    let address = format!("{machine}/{}/{name}", point.point);
    let disk = point.disk(&name).ok_or_else(|| {
        let text = format!("{machine}/{} has no disk {name}", point.point);
        Error::new(ErrorKind::NotFound, text)
    })?;
    let disk = bucket.disk(disk);
    restore_disk(invocation, address, &disk, &arguments.target, &arguments.written, cancel)
}
