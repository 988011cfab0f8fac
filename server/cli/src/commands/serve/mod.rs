//! `coldrise serve`: serves the repository over a network.

mod iscsi;
mod nbd;
mod nfs;
mod replica;
mod secret_file;
mod smb;

use clap::{Args, Subcommand};
use coldrise_block::Result;

use crate::invocation::Invocation;
use crate::report::Report;

pub(crate) use nbd::DEFAULT_ADDRESS;

/// Serve restore points and sessions.
#[derive(Debug, Args)]
pub(crate) struct ServeArguments {
    #[command(subcommand)]
    protocol: Protocol,
}

#[derive(Debug, Subcommand)]
enum Protocol {
    Nbd(nbd::NbdArguments),
    Nfs(nfs::NfsArguments),
    Smb(smb::SmbArguments),
    Iscsi(iscsi::IscsiArguments),
    Replica(replica::ReplicaArguments),
}

pub(crate) fn run(invocation: &Invocation, arguments: ServeArguments) -> Result<Report> {
    match arguments.protocol {
        Protocol::Nbd(arguments) => nbd::run(invocation, arguments),
        Protocol::Nfs(arguments) => nfs::run(invocation, arguments),
        Protocol::Smb(arguments) => smb::run(invocation, arguments),
        Protocol::Iscsi(arguments) => iscsi::run(invocation, arguments),
        Protocol::Replica(arguments) => replica::run(invocation, &arguments),
    }
}
