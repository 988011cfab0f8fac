//! `coldrise publish`: publishes a restore point as a writable session.

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_requests::Publish;
use coldrise_session::{SessionDocument, check_offered};
use coldrise_store::{Address, SessionName};
use serde::Serialize;

use super::marks::mark_rules;
use super::serve::DEFAULT_ADDRESS;
use crate::hardware::Hardware;
use crate::invocation::Invocation;
use crate::report::Report;
use crate::units::{show_duration, show_size};
use coldrise_hosting::Origin;
use coldrise_hosting::ganesha::PATH as NFS_PATH;

/// Publish a restore point as a writable session.
///
/// Takes the same short time for points of any size. Writes to the session are captured
/// separately; the point never changes. The session survives crashes and restarts, until
/// coldrise unpublish ends it. Front ends serve it: see coldrise serve.
///
/// While it is served, each second with writes is marked, and the session can go back to it: see
/// coldrise marks. live/SESSION@TIME publishes a session as it was at such a time.
///
/// A point that is still being copied from another site can be published, too: missing data is fetched when it is read.
#[derive(Debug, Args)]
pub(crate) struct PublishArguments {
    #[command(flatten)]
    request: Publish,

    /// Publish a quarantined point, too. Its damaged ranges cannot be read.
    #[arg(long)]
    force: bool,
}

#[derive(Serialize)]
struct Published<'a> {
    session: &'a str,
    address: String,
    disks: Vec<PublishedDisk<'a>>,
    elapsed_ms: u64,
}

#[derive(Serialize)]
struct PublishedDisk<'a> {
    disk: &'a str,
    export: String,
    nfs_path: String,
    size_bytes: u64,
}

pub(crate) fn run(invocation: &Invocation, arguments: PublishArguments) -> Result<Report> {
    let address: Address = arguments.request.address.parse()?;
    if address.disk().is_some() || matches!(address, Address::Live { .. }) {
        let text = format!("{address}: whole restore points are published: give MACHINE/POINT");
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    let name = arguments.request.session.as_deref().map(SessionName::parse).transpose()?;
    let rules = mark_rules(arguments.request.marks.as_deref())?;
    let repository = invocation.open()?;
    let point = invocation.point_of_mark(&repository, &address)?;
    let Address::Point { machine, selector, .. } = &point.address else {
        return Err(Error::new(ErrorKind::Internal, "not a restore point"));
    };
    let origin = Origin::find(invocation.caller()?, &repository, machine, selector)?;
    if !arguments.force {
        check_offered(origin.document().clone())?;
    }
    let session = origin.publish(invocation.caller()?, &repository, name, rules)?;
    point.keep();
    let published = Published {
        session: session.name.as_str(),
        address: format!("{}/{}", session.machine, session.point),
        disks: session
            .disks
            .iter()
            .map(|disk| PublishedDisk {
                disk: disk.name.as_str(),
                export: format!("live/{}/{}", session.name, disk.name),
                nfs_path: format!("{NFS_PATH}/live/{}/{}.raw", session.name, disk.name),
                size_bytes: disk.size_bytes,
            })
            .collect(),
        elapsed_ms: invocation.elapsed_ms(),
    };
    let text =
        if invocation.is_json() { String::new() } else { text(invocation, &session, &published) };
    Ok(Report::done(&published, text))
}

fn text(invocation: &Invocation, session: &SessionDocument, published: &Published<'_>) -> String {
    let name = published.session;
    let mut text = format!(
        "published {} as session {name} in {}\n",
        published.address,
        show_duration(invocation.elapsed())
    );
    let uris: Vec<String> = published
        .disks
        .iter()
        .map(|disk| format!("nbd://{DEFAULT_ADDRESS}/{}", disk.export))
        .collect();
    for (disk, uri) in published.disks.iter().zip(&uris) {
        text.push_str(&format!("  {}  {}  {uri}\n", disk.disk, show_size(disk.size_bytes)));
    }
    let first = published.disks.first().map_or("DISK", |disk| disk.disk);
    let hardware = Hardware::of(session.configuration.as_ref()).unwrap_or_default();
    text.push_str(&format!(
        "\nserve it   coldrise serve nbd\nboot it    coldrise boot live/{name}\nwith QEMU  {}\n\
         over NFS   coldrise serve nfs    ({NFS_PATH}/live/{name}/{first}.raw, .vmdk, .vhdx and so on)\n\
         as files   coldrise mount DIR    (DIR/live/{name}/{first}.vhdx, .vmdk, .qcow2 and so on)\n\
         end it     coldrise unpublish {name}\n",
        coldrise_hosting::qemu::plain_command(&hardware, &uris, session.is_incoming())
    ));
    text
}
