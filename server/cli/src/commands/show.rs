//! `coldrise show`: shows one restore point or session.

use clap::Args;
use coldrise_block::Result;
use coldrise_inventory::{PointDetails, SessionDetails};
use coldrise_session::Catalog;
use coldrise_store::Address;

use super::list::boot_word;
use super::sessions::session_text;
use crate::invocation::Invocation;
use crate::report::Report;
use crate::units::{show_count, show_moment, show_size};

/// Show a restore point, one disk of it, or a session.
#[derive(Debug, Args)]
pub(crate) struct ShowArguments {
    /// MACHINE/POINT[/DISK] or live/SESSION.
    #[arg(value_name = "ADDRESS")]
    address: Address,
}

pub(crate) fn run(invocation: &Invocation, arguments: &ShowArguments) -> Result<Report> {
    let repository = invocation.open()?;
    match &arguments.address {
        Address::Point { machine, selector, disk } => {
            let point = Catalog::new(&repository).point(machine, selector)?;
            let boot = repository.boot_check(machine, &point.point).unwrap_or_else(|error| {
                invocation.remark(&format!("warning: the boot check: {}", error.full_message()));
                None
            });
            let shown = PointDetails::new(&point, disk.as_ref(), boot.map(|(check, _)| check))?;
            let text = text(&shown);
            Ok(Report::answer(&shown, text))
        }
        Address::Live { session, disk } => {
            let state = coldrise_session::session(&repository, session)?;
            if let Some(disk) = disk {
                state.document.disk(disk)?;
            }
            let shown = SessionDetails::new(&state);
            let text = session_text(&shown);
            Ok(Report::answer(&shown, text))
        }
    }
}

fn text(shown: &PointDetails) -> String {
    let mut text = format!(
        "point        {}\nkind         {}\nstored at    {}\n",
        shown.address,
        shown.kind.as_str(),
        show_moment(shown.created_at_ms)
    );
    if let (Some(base), Some(session)) = (&shown.base, &shown.session) {
        let machine = &shown.machine;
        text.push_str(&format!(
            "sealed from  session {session}, published from {machine}/{base}\n"
        ));
    }
    if shown.is_protected {
        text.push_str("protected    neither forget nor prune removes it\n");
    }
    if let Some(quarantine) = shown.quarantine {
        let why = format!("{quarantine}: not served, and no rule of prune counts it");
        text.push_str(&format!("quarantined  {why}\n"));
    }
    for source in &shown.sources {
        text.push_str(&format!("source       {source}\n"));
    }
    for disk in &shown.disks {
        let layers = match disk.layers {
            0 => String::new(),
            layers => format!(", {} of captured writes", show_count(layers as u64, "layer")),
        };
        let size = show_size(disk.size_bytes);
        text.push_str(&format!("disk         {}  {size}{layers}\n", disk.address));
    }
    match &shown.configuration {
        Some(configuration) => text.push_str(&format!(
            "configured   {}, {} bytes (--json shows it)\n",
            configuration.format,
            configuration.text.len()
        )),
        None => text.push_str("configured   no configuration was stored\n"),
    }
    if let Some(boot) = &shown.boot {
        let reached = boot.rungs.last().map_or("nothing", |reached| reached.rung.as_str());
        let failure = boot.failure.as_ref().map_or_else(String::new, |text| format!("; {text}"));
        text.push_str(&format!(
            "boot check   {}: {reached} of {} reached, at {}{failure}\n",
            boot_word(boot.verdict),
            boot.until,
            show_moment(boot.checked_at_ms)
        ));
    }
    text
}
