//! `coldrise recover --to vcenter:HOST` and `--to esxi:HOST`.

mod answer;

use std::cell::{Cell, RefCell};

use clap::Args;
use coldrise_block::Result;
use coldrise_hosting::Origin;
use coldrise_hosting::ganesha::Client;
use coldrise_hosting::signals::ChildSignals;
use coldrise_hypervisors::vsphere::AccessOptions;
use coldrise_recovery::vsphere::{VsphereRequest, of_session, publish, start};
use coldrise_requests::VsphereLogin;
use coldrise_session::check_offered;
use coldrise_store::Address;

use super::{RecoverArguments, no_single_disk, whole_point};
use crate::commands::marks::{mark_rules, set_rules};
use crate::invocation::Invocation;
use crate::report::Report;
use answer::{report, tell_running};

/// Options for vCenter and ESXi.
#[derive(Debug, Args)]
#[command(next_help_heading = "vCenter and ESXi")]
pub(super) struct VsphereOptions {
    #[command(flatten)]
    login: VsphereLogin,

    /// Clients that the NFS server accepts, if this command starts it: addresses or networks, such as
    /// 10.0.0.0/24. Can be repeated. Default: the VMkernel addresses of the hosts.
    #[arg(long, value_name = "CIDR")]
    allow: Vec<Client>,
}

impl VsphereOptions {
    /// What they say about the login.
    pub(super) fn access(&self) -> AccessOptions {
        AccessOptions {
            user: self.login.user.clone(),
            password_file: self.login.password_file.clone(),
            certificate: self.login.certificate.clone(),
            thumbprint: self.login.thumbprint,
        }
    }
}

pub(super) fn run(
    invocation: &Invocation,
    server: &str,
    address: &Address,
    arguments: &RecoverArguments,
) -> Result<Report> {
    let signals = RefCell::new(ChildSignals::catch()?);
    let was_cancelled = Cell::new(false);
    let is_cancelled = || {
        was_cancelled.set(was_cancelled.get() || signals.borrow_mut().was_asked_to_end());
        was_cancelled.get()
    };
    let (repository, caller) = (invocation.open()?, invocation.caller()?);
    let (options, name) = (&arguments.vsphere, arguments.name()?);
    let network = arguments.network()?;
    let marks = mark_rules(arguments.request.marks.as_deref())?;
    let request = VsphereRequest {
        server,
        access: options.access(),
        hosts: &arguments.request.hosts,
        nfs_server: options.login.nfs_server,
        allowed: &options.allow,
        network: &network,
        has_new_uuid: arguments.request.new_uuid,
        name: name.as_ref(),
        marks: marks.as_ref(),
    };
    let point = whole_point(invocation, &repository, address)?;
    let recovery = match &point.address {
        Address::Point { machine, selector, disk: None } => {
            let origin = Origin::find(caller, &repository, machine, selector)?;
            check_offered(origin.document().clone())?;
            publish(caller, &repository, &request, &origin, &is_cancelled)?
        }
        Address::Live { session, disk: None } => {
            let recovery = of_session(&repository, &request, session, &is_cancelled)?;
            set_rules(&repository, session, marks.clone())?;
            recovery
        }
        other => return Err(no_single_disk(other)),
    };
    point.keep();
    let machine = start(caller, &repository, &request, recovery, &signals, &is_cancelled)?;
    tell_running(invocation, &machine.session, &machine.note, machine.is_served_here());
    let ((session, note), end) = machine.serve(caller, &repository, &mut signals.borrow_mut())?;
    Ok(report(invocation, &session, &note, end.map_or("running", |end| end.word())))
}
