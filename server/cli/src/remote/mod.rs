//! Commands on another host's service: `coldrise --server URL --token-file FILE COMMAND`.
//!
//! Reads print what they print on that host. Commands that change or read disks become runs of that
//! service; this program follows them and ends with their exit code. Commands that only make sense beside the
//! repository are refused.

mod client;
mod runs;
mod starts;

use clap::ArgMatches;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_inventory::{
    IncomingDetails, Listing, PointDetails, SessionDetails, SessionListing, Stats,
};
use coldrise_requests::refuse;
use coldrise_store::{Address, MachineName, PointSelector};

use crate::arguments::Command;
use crate::commands::{list, sessions, show, stats};
use crate::incoming;
use crate::invocation::Invocation;
use crate::report::Report;
use client::Client;
pub(crate) use client::ServerOptions;

/// Runs a command on the service that the options name.
///
/// # Errors
/// The errors of the service, with the kinds that the command has on its host; `InvalidInput` for a command that has
/// to run there.
pub(crate) fn run(
    invocation: &Invocation,
    command: &Command,
    matches: &ArgMatches,
) -> Result<Report> {
    let client = Client::new(invocation.server_options())?;
    match command {
        Command::List(arguments) => {
            let machine = arguments.machine()?;
            let mut listing: Listing = client.get("points")?;
            let mut incoming: Vec<IncomingDetails> = client.get("coming")?;
            if let Some(machine) = machine {
                listing.machines.retain(|listed| listed.machine == machine.as_str());
                incoming.retain(|one| one.machine == machine.as_str());
                if listing.machines.is_empty() && incoming.is_empty() {
                    let text = format!("there is no machine {machine}");
                    return Err(Error::new(ErrorKind::NotFound, text));
                }
            }
            Ok(list::report(&listing, incoming))
        }
        Command::Show(arguments) => match arguments.address()? {
            Address::Point { machine, selector, disk: None } => {
                show_point(&client, machine, selector)
            }
            Address::Live { session, disk: None } => {
                let found: SessionDetails = client.get(&format!("sessions/{session}"))?;
                Ok(show::session_report(&found))
            }
            _ => Err(refuse("show of a single disk")),
        },
        Command::Sessions => {
            let listing: SessionListing = client.get("sessions")?;
            Ok(sessions::report(&listing))
        }
        Command::Stats(arguments) if arguments.is_of_all() => {
            let stats: Stats = client.get("repository/space")?;
            Ok(stats::report(&stats))
        }
        Command::Stats(_) => Err(refuse("stats of a machine")),
        Command::Runs(arguments) => runs::run(&client, arguments),
        _ => {
            let request = starts::request(matches)?;
            client.run(invocation, &request)
        }
    }
}

/// Shows a point. If there is none, the point on its way that the address means.
fn show_point(client: &Client, machine: &MachineName, selector: &PointSelector) -> Result<Report> {
    match client.get::<PointDetails>(&format!("machines/{machine}/points/{selector}")) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let all: Vec<IncomingDetails> = client.get("coming")?;
            IncomingDetails::find(&all, machine, selector).map(incoming::report).ok_or(error)
        }
        point => Ok(show::point_report(&point?)),
    }
}
