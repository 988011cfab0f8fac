//! `coldrise show`: shows one restore point or session.

use std::path::PathBuf;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_inventory::{IncomingDetails, PointDetails, SessionDetails};
use coldrise_session::{ActivityDetail, Catalog, IncomingPoint};
use coldrise_store::Address;

use super::list::boot_word;
use super::picture;
use super::sessions::session_text;
use crate::incoming;
use crate::invocation::Invocation;
use crate::report::Report;
use crate::units::{show_count, show_moment, show_size};

/// Show a restore point, one disk of it, or a session, or write the picture of a boot check.
#[derive(Debug, Args)]
pub(crate) struct ShowArguments {
    /// MACHINE/POINT[/DISK] or live/SESSION.
    #[arg(value_name = "ADDRESS")]
    address: Address,

    /// Write the picture of the screen at the end of the point's last boot check to FILE, as PNG; -
    /// is stdout.
    #[arg(long, value_name = "FILE")]
    screenshot: Option<PathBuf>,

    /// Overwrite the file of --screenshot.
    #[arg(long, requires = "screenshot")]
    force: bool,
}

impl ShowArguments {
    /// What to show, for a command without --screenshot.
    ///
    /// # Errors
    /// `InvalidInput` with --screenshot.
    pub(crate) fn address(&self) -> Result<&Address> {
        match &self.screenshot {
            None => Ok(&self.address),
            Some(_) => {
                let text = "--screenshot reads the repository on its own host";
                Err(Error::new(ErrorKind::InvalidInput, text)
                    .advise("over the network: GET /api/v1/machines/M/points/P/screenshot.png"))
            }
        }
    }
}

pub(crate) fn run(invocation: &Invocation, arguments: &ShowArguments) -> Result<Report> {
    let repository = invocation.open()?;
    match &arguments.address {
        Address::Point { machine, selector, disk } => {
            let point = match Catalog::new(&repository).point(machine, selector) {
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    let incoming =
                        IncomingPoint::find(&repository, machine, selector)?.ok_or(error)?;
                    return Ok(incoming::report(&IncomingDetails::new(&repository, &incoming)));
                }
                point => point?,
            };
            if let Some(path) = &arguments.screenshot {
                let check = repository.boot_check(machine, &point.point)?;
                let address = format!("{machine}/{}", point.point);
                return picture::write(path, arguments.force, &address, check);
            }
            let boot = repository.boot_check(machine, &point.point).unwrap_or_else(|error| {
                invocation.remark(&format!("warning: the boot check: {}", error.full_message()));
                None
            });
            let shown = PointDetails::new(&point, disk.as_ref(), boot.map(|(check, _)| check))?;
            Ok(point_report(&shown))
        }
        Address::Marked { session, .. } => {
            let text =
                format!("show describes points and sessions: coldrise marks {session} lists marks");
            Err(Error::new(ErrorKind::InvalidInput, text))
        }
        Address::Live { session, disk } => {
            if arguments.screenshot.is_some() {
                let text = "--screenshot is for points: sessions have no boot check";
                return Err(Error::new(ErrorKind::InvalidInput, text));
            }
            if let Some(disk) = disk {
                coldrise_session::session(&repository, session)?.document.disk(disk)?;
            }
            let detail = ActivityDetail::Totals;
            Ok(session_report(&SessionDetails::read(&repository, session, detail)?))
        }
    }
}

/// A point for people and for programs.
pub(crate) fn point_report(point: &PointDetails) -> Report {
    Report::answer(point, text(point))
}

/// A session for people and for programs.
pub(crate) fn session_report(session: &SessionDetails) -> Report {
    Report::answer(session, session_text(session))
}

fn text(shown: &PointDetails) -> String {
    let mut text = format!(
        "point        {}\nkind         {}\nstored at    {}\n",
        shown.address,
        shown.kind.as_str(),
        show_moment(shown.created_at_ms)
    );
    if let Some(name) = &shown.display_name {
        text.push_str(&format!("name         {name}\n"));
    }
    if let (Some(base), Some(session)) = (&shown.base, &shown.session) {
        let machine = &shown.machine;
        text.push_str(&format!(
            "sealed from  session {session}, published from {machine}/{base}\n"
        ));
    }
    if let Some(marked_at_ms) = shown.marked_at_ms {
        text.push_str(&format!("shows        that session at {}\n", show_moment(marked_at_ms)));
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
    for part in &shown.parts {
        let (size, format) = (show_size(part.size_bytes), &part.format);
        text.push_str(&format!("part         {}  {size}, {format}\n", part.kind));
    }
    if let Some(boot) = &shown.boot {
        let reached = boot.stages.last().map_or("nothing", |reached| reached.stage.as_str());
        let usual = boot.usual_stage.as_ref().filter(|_| boot.is_worse);
        let usual = usual.map(|stage| format!("usual is {stage}"));
        let reasons = [usual.as_ref(), boot.failure.as_ref(), boot.note.as_ref()];
        let failure: String =
            reasons.into_iter().flatten().map(|reason| format!("; {reason}")).collect();
        text.push_str(&format!(
            "boot check   {}: {reached} of {} reached, at {}{failure}\n",
            boot_word(boot.verdict, boot.is_worse),
            boot.until,
            show_moment(boot.checked_at_ms)
        ));
    }
    text
}
