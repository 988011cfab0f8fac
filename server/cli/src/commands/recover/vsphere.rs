//! `coldrise recover --to vcenter:HOST` and `--to esxi:HOST`.

mod answer;

use std::cell::{Cell, RefCell};
use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;
use coldrise_block::Result;
use coldrise_hosting::ganesha::Client;
use coldrise_hosting::signals::ChildSignals;
use coldrise_hosting::Origin;
use coldrise_https::Thumbprint;
use coldrise_hypervisors::vsphere::AccessOptions;
use coldrise_recovery::vsphere::{of_session, publish, start, VsphereRequest};
use coldrise_session::check_offered;
use coldrise_store::Address;

use super::{no_single_disk, RecoverArguments};
use crate::invocation::Invocation;
use crate::report::Report;
use answer::{report, tell_running};

/// Options for vCenter and ESXi.
#[derive(Debug, Args)]
#[command(next_help_heading = "vCenter and ESXi")]
pub(super) struct VsphereOptions {
    /// Host that runs the machine, by its name in the inventory. Further ones get the datastore, too. Not
    /// needed if there is one host only.
    #[arg(long, value_name = "NAME")]
    host: Vec<String>,

    /// User of vCenter or ESXi, such as backup@vsphere.local.
    #[arg(long, value_name = "USER")]
    user: Option<String>,

    /// Read the user's password from FILE; without it, COLDRISE_VSPHERE_PASSWORD from the environment.
    #[arg(long, value_name = "FILE")]
    password_file: Option<PathBuf>,

    /// Trust this certificate of vCenter or ESXi, or of its authority (PEM), instead of the system's authorities.
    #[arg(long, value_name = "FILE")]
    certificate: Option<PathBuf>,

    /// Trust exactly the certificate of vCenter or ESXi with this SHA-256 thumbprint, as its console shows it: 32
    /// bytes in hexadecimal, with or without colons. Its names and dates do not matter then.
    #[arg(long, value_name = "SHA256", conflicts_with = "certificate")]
    thumbprint: Option<Thumbprint>,

    /// Address of this machine by which the hosts reach it. Default: the one on the route to the first host.
    #[arg(long, value_name = "ADDRESS")]
    nfs_server: Option<IpAddr>,

    /// Clients that the NFS server accepts, if this command starts it: addresses or networks, such as
    /// 10.0.0.0/24. Can be repeated. Default: the VMkernel addresses of the hosts.
    #[arg(long, value_name = "CIDR")]
    allow: Vec<Client>,

    /// With --undo: the server is gone for good, so change nothing there and only end the session.
    #[arg(long, requires = "undo")]
    pub(super) without_server: bool,
}

impl VsphereOptions {
    /// What they say about the login.
    pub(super) fn access(&self) -> AccessOptions {
        AccessOptions {
            user: self.user.clone(),
            password_file: self.password_file.clone(),
            certificate: self.certificate.clone(),
            thumbprint: self.thumbprint,
        }
    }
}

pub(super) fn run(
    invocation: &Invocation,
    server: &str,
    arguments: &RecoverArguments,
) -> Result<Report> {
    let signals = RefCell::new(ChildSignals::catch()?);
    let was_cancelled = Cell::new(false);
    let is_cancelled = || {
        was_cancelled.set(was_cancelled.get() || signals.borrow_mut().was_asked_to_end());
        was_cancelled.get()
    };
    let (repository, caller) = (invocation.open()?, invocation.caller()?);
    let options = &arguments.vsphere;
    let request = VsphereRequest {
        server,
        access: options.access(),
        hosts: &options.host,
        nfs_server: options.nfs_server,
        allowed: &options.allow,
        network: &arguments.network,
        has_new_uuid: arguments.new_uuid,
        name: arguments.name.as_ref(),
    };
    let recovery = match &arguments.address {
        Address::Point { machine, selector, disk: None } => {
            let origin = Origin::find(caller, &repository, machine, selector)?;
            check_offered(origin.document().clone())?;
            publish(caller, &repository, &request, &origin, &is_cancelled)?
        }
        Address::Live { session, disk: None } => {
            of_session(&repository, &request, session, &is_cancelled)?
        }
        other => return Err(no_single_disk(other)),
    };
    let machine = start(caller, &repository, &request, recovery, &signals, &is_cancelled)?;
    tell_running(invocation, &machine.session, &machine.note, machine.is_served_here());
    let ((session, note), end) = machine.serve(caller, &repository, &mut signals.borrow_mut())?;
    Ok(report(invocation, &session, &note, end.map_or("running", |end| end.word())))
}
