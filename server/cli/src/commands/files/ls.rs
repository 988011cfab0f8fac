//! `coldrise files ls` and `coldrise files find`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use coldrise_block::Result;
use coldrise_files::{FileSystem, FilesAddress, Received, join, matches};
use serde::Serialize;

use super::entries::{HEADINGS, ListedEntry};
use super::{ReadingOptions, Unread, about, address, place};
use crate::invocation::Invocation;
use crate::report::{Report, table};
use crate::units::show_size;
use coldrise_hosting::signals::ChildSignals;

/// List a folder, or the file systems of a point.
///
/// Names are printed with escapes for non-printable bytes; --json also has their bytes.
#[derive(Debug, Args)]
pub(crate) struct LsArguments {
    /// MACHINE/POINT[/DISK[,DISK...]]:[FILE-SYSTEM]/PATH, or MACHINE/POINT: for the file systems.
    #[arg(value_name = "ADDRESS", value_parser = OsStringValueParser::new().try_map(address))]
    address: FilesAddress,

    #[command(flatten)]
    options: ReadingOptions,
}

/// Find files by name below a folder.
#[derive(Debug, Args)]
pub(crate) struct FindArguments {
    /// MACHINE/POINT[/DISK[,DISK...]]:[FILE-SYSTEM]/PATH.
    #[arg(value_name = "ADDRESS", value_parser = OsStringValueParser::new().try_map(address))]
    address: FilesAddress,

    /// The name; `*` stands for any characters and `?` for one. With a slash: the path below the folder.
    #[arg(value_name = "PATTERN")]
    pattern: OsString,

    #[command(flatten)]
    options: ReadingOptions,
}

#[derive(Serialize)]
struct Systems {
    point: String,
    file_systems: Vec<FileSystem>,
    elapsed_ms: u64,
}

#[derive(Serialize)]
struct Listed {
    point: String,
    entries: Vec<ListedEntry>,
    /// The number of files and folders that could not be read.
    unread: u64,
    elapsed_ms: u64,
}

pub(super) fn list(invocation: &Invocation, arguments: &LsArguments) -> Result<Report> {
    let mut signals = ChildSignals::catch()?;
    let address = &arguments.address;
    let reading = arguments.options.find(invocation, address, &mut signals)?;
    let point = reading.point.clone();
    if address.system.is_none() && address.path.is_none() {
        let file_systems = reading.talk(&mut signals, None, |_, systems| Ok(systems.0.clone()))?;
        let text = systems_text(&file_systems);
        let elapsed_ms = invocation.elapsed_ms();
        return Ok(Report::answer(&Systems { point, file_systems, elapsed_ms }, text));
    }
    let mut unread = Unread::default();
    let entries = reading.talk(&mut signals, None, |client, systems| {
        let (device, path) = place(client, systems, address)?;
        let mut top = None;
        let mut entries = Vec::new();
        let done = client.list(device, path, |received| {
            match received {
                Received::Entry(entry) if entry.path.is_empty() => {
                    top = Some(ListedEntry::new(entry, path));
                }
                Received::Entry(entry) => {
                    top = None;
                    entries.push(ListedEntry::new(entry, &entry.path));
                }
                Received::Content(_) => {}
                Received::Unread(text) => unread.add(invocation, text),
            }
            Ok(())
        });
        about(address, done)?;
        // A file lists itself, an empty folder lists nothing.
        entries.extend(top.filter(ListedEntry::is_no_folder));
        Ok(entries)
    })?;
    Ok(report(invocation, point, entries, &unread))
}

pub(super) fn find(invocation: &Invocation, arguments: &FindArguments) -> Result<Report> {
    let mut signals = ChildSignals::catch()?;
    let address = &arguments.address;
    let pattern = arguments.pattern.as_bytes();
    let reading = arguments.options.find(invocation, address, &mut signals)?;
    let point = reading.point.clone();
    let mut unread = Unread::default();
    let entries = reading.talk(&mut signals, None, |client, systems| {
        let (device, top) = place(client, systems, address)?;
        let mut found = Vec::new();
        let done = client.walk(device, top, |received| {
            match received {
                Received::Entry(entry) if fits(pattern, &entry.path) => {
                    found.push(ListedEntry::new(entry, &join(top, &entry.path)));
                }
                Received::Entry(_) | Received::Content(_) => {}
                Received::Unread(text) => unread.add(invocation, text),
            }
            Ok(())
        });
        about(address, done)?;
        Ok(found)
    })?;
    Ok(report(invocation, point, entries, &unread))
}

fn fits(pattern: &[u8], path: &[u8]) -> bool {
    let is_path = pattern.contains(&b'/');
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    !path.is_empty() && matches(pattern, if is_path { path } else { name })
}

fn report(
    invocation: &Invocation,
    point: String,
    entries: Vec<ListedEntry>,
    unread: &Unread,
) -> Report {
    let rows: Vec<_> = entries.iter().map(ListedEntry::row).collect();
    let text = if rows.is_empty() { "nothing".to_owned() } else { table(&HEADINGS, &rows) };
    let listed = Listed { point, entries, unread: unread.0, elapsed_ms: invocation.elapsed_ms() };
    let mut report = Report::answer(&listed, text);
    report.exit_code = unread.exit_code();
    report
}

fn systems_text(systems: &[FileSystem]) -> String {
    let row = |system: &FileSystem| {
        let note = system.note.clone().unwrap_or_default();
        let size = show_size(system.size_bytes);
        vec![system.name.clone(), system.format.clone(), size, system.label.clone(), note]
    };
    let rows: Vec<_> = systems.iter().map(row).collect();
    table(&["NAME", "TYPE", ">SIZE", "LABEL", "NOTE"], &rows)
}
