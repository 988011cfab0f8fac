//! `coldrise files get`: copies a file out of a point, or a folder as an archive.

use std::fs::{File, OpenOptions};
use std::io::{IsTerminal, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_files::{
    Archive, ArchiveFormat, Client, Entry, EntryKind, FileSystems, FilesAddress, LeftOut, Received,
    other_archive, shown,
};
use coldrise_ingest::PartFiles;
use serde::Serialize;

use super::{ReadingOptions, Unread, about, address, place};
use crate::invocation::Invocation;
use crate::report::Report;
use crate::units::{parse_size, show_count, show_size};
use coldrise_hosting::signals::ChildSignals;

/// Copy a file out of a restore point, or a folder as a tar or zip file.
///
/// The archive can be extracted without harm: it has no absolute names and no `..`. Devices,
/// links that lead out of the folder, and set-user-ID bits are left out. Extended attributes and ACLs are not kept.
#[derive(Debug, Args)]
pub(crate) struct GetArguments {
    /// MACHINE/POINT[/DISK[,DISK...]]:[FILE-SYSTEM]/PATH.
    #[arg(value_name = "ADDRESS", value_parser = OsStringValueParser::new().try_map(address))]
    address: FilesAddress,

    /// A new file, a folder to put it in, or - for stdout. A name that ends in .tar, .tar.zst or .zip selects an
    /// archive of that format; a folder under any other name becomes a tar file. A single file is put into such an
    /// archive, unless it is one itself. The target appears under its name when it is complete.
    #[arg(value_name = "TARGET")]
    target: PathBuf,

    /// Format of the archive. Default: from the target's name.
    #[arg(long, value_name = "FORMAT", value_enum)]
    format: Option<FormatArgument>,

    /// Overwrite the target.
    #[arg(long)]
    force: bool,

    /// Keep links that lead out of the folder, and set-user-ID bits: for archives that are extracted
    /// inside a machine.
    #[arg(long)]
    exact: bool,

    /// Copy at most this much, such as 2T. Default: the total size of the point's disks.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    max_size: Option<u64>,

    #[command(flatten)]
    options: ReadingOptions,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum FormatArgument {
    Tar,
    #[value(name = "tar.zst")]
    TarZst,
    Zip,
}

impl From<FormatArgument> for ArchiveFormat {
    fn from(format: FormatArgument) -> ArchiveFormat {
        match format {
            FormatArgument::Tar => ArchiveFormat::Tar,
            FormatArgument::TarZst => ArchiveFormat::TarZst,
            FormatArgument::Zip => ArchiveFormat::Zip,
        }
    }
}

impl GetArguments {
    /// The format that is asked for, or that the target's name claims. A copied file may be an archive itself:
    /// `original` is its name.
    fn format(&self, original: Option<&[u8]>) -> Result<Option<ArchiveFormat>> {
        if let Some(format) = self.format {
            return Ok(Some(format.into()));
        }
        if self.target.is_dir() {
            return Ok(None);
        }
        let name = self.target.as_os_str().as_bytes();
        let original = original.unwrap_or_default();
        match other_archive(name) {
            Some(end) if other_archive(original) != Some(end) => {
                let text =
                    format!("{}: archives of type {end} are not supported", self.target.display());
                Err(Error::new(ErrorKind::InvalidInput, text)
                    .advise("name it .tar.zst, .tar or .zip"))
            }
            _ => {
                let format = ArchiveFormat::of_name(name);
                Ok(format.filter(|_| ArchiveFormat::of_name(original) != format))
            }
        }
    }
}

#[derive(Serialize)]
struct Copied {
    point: String,
    target: Option<PathBuf>,
    is_archive: bool,
    /// The archive's format; absent for a file as it is.
    format: Option<&'static str>,
    files: u64,
    size_bytes: u64,
    left_out_links: u64,
    left_out_special: u64,
    unread: u64,
    elapsed_ms: u64,
}

pub(super) fn run(invocation: &Invocation, arguments: &GetArguments) -> Result<Report> {
    let mut signals = ChildSignals::catch()?;
    let is_stdout = arguments.target == Path::new("-");
    if !is_stdout {
        check_free(&arguments.target, arguments.force)?;
    }
    arguments.format(arguments.address.last_name())?;
    let reading = arguments.options.find(invocation, &arguments.address, &mut signals)?;
    let point = reading.point.clone();
    let mut copy = Copy::new(arguments);
    let done = reading.talk(&mut signals, arguments.max_size, |client, systems| {
        copy.run(invocation, client, systems)
    });
    done.map_err(|error| match (error.kind(), &copy.written) {
        (ErrorKind::NoSpace, Some(path)) => error.context(format!("writing {}", path.display())),
        _ => error,
    })?;
    if let Some(part) = copy.part.take() {
        part.publish()?;
    }
    let copied = Copied {
        point,
        is_archive: copy.format.is_some(),
        format: copy.format.map(|format| format.extension().trim_start_matches('.')),
        files: copy.files,
        size_bytes: copy.size_bytes,
        left_out_links: copy.left_out.links,
        left_out_special: copy.left_out.special,
        unread: copy.unread.0,
        elapsed_ms: invocation.elapsed_ms(),
        target: copy.written,
    };
    tell_left_out(invocation, &copied);
    let mut report = match &copied.target {
        None => Report::silent(),
        Some(path) => {
            let files = show_count(copied.files, "file");
            let kind =
                copied.format.map_or(String::new(), |format| format!("a {format} archive, "));
            let text = format!(
                "wrote {}: {kind}{files}, {}",
                shown(path.as_os_str().as_bytes()),
                show_size(copied.size_bytes)
            );
            Report::done(&copied, text)
        }
    };
    report.exit_code = copy.unread.exit_code();
    Ok(report)
}

fn tell_left_out(invocation: &Invocation, copied: &Copied) {
    if copied.left_out_links > 0 {
        let links = show_count(copied.left_out_links, "link");
        let text = format!("left out: {links} that lead out of the folder (--exact keeps them)");
        invocation.remark(&text);
    }
    if copied.left_out_special > 0 {
        let count = copied.left_out_special;
        invocation.remark(&format!("left out: {count} devices, pipes and sockets"));
    }
}

fn check_free(target: &Path, may_overwrite: bool) -> Result<()> {
    if !may_overwrite && !target.is_dir() && target.symlink_metadata().is_ok() {
        let text = format!("{} exists", target.display());
        return Err(Error::new(ErrorKind::AlreadyExists, text).advise("--force overwrites it"));
    }
    Ok(())
}

/// Where the bytes go.
enum Output {
    File(File),
    Stdout,
    /// Characters that command a terminal are replaced.
    Terminal,
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self {
            Output::File(file) => file.write(bytes),
            Output::Stdout => std::io::stdout().write(bytes),
            Output::Terminal => {
                let text = String::from_utf8_lossy(bytes);
                let harmless = |c: char| matches!(c, '\n' | '\t') || crate::units::is_printable(c);
                let text: String =
                    text.chars().map(|c| if harmless(c) { c } else { '\u{fffd}' }).collect();
                std::io::stdout().write_all(text.as_bytes()).map(|()| bytes.len())
            }
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        match self {
            Output::File(file) => file.flush(),
            Output::Stdout | Output::Terminal => std::io::stdout().flush(),
        }
    }
}

/// The form of the copy.
enum Copying {
    Archive(Archive<Output>),
    File(Output, Entry),
}

struct Copy<'a> {
    arguments: &'a GetArguments,
    written: Option<PathBuf>,
    /// Where the bytes are until all are there: half a file looks like a whole one.
    part: Option<PartFiles>,
    format: Option<ArchiveFormat>,
    files: u64,
    size_bytes: u64,
    left_out: LeftOut,
    unread: Unread,
}

impl<'a> Copy<'a> {
    fn new(arguments: &'a GetArguments) -> Copy<'a> {
        Copy {
            arguments,
            written: None,
            part: None,
            format: None,
            files: 0,
            size_bytes: 0,
            left_out: LeftOut::default(),
            unread: Unread::default(),
        }
    }

    fn run(
        &mut self,
        invocation: &Invocation,
        client: &mut Client<'_>,
        systems: &FileSystems,
    ) -> Result<()> {
        let (device, path) = place(client, systems, &self.arguments.address)?;
        let mut copying: Option<Copying> = None;
        let done = client.read(device, path, |received| {
            match (received, &mut copying) {
                (Received::Entry(entry), copying) => {
                    self.files += u64::from(entry.kind == EntryKind::File);
                    match copying {
                        Some(Copying::Archive(archive)) => archive.add(entry)?,
                        _ => *copying = Some(self.begin(entry)?),
                    }
                }
                (Received::Content(bytes), Some(Copying::Archive(archive))) => {
                    self.size_bytes += bytes.len() as u64;
                    archive.write(bytes)?;
                }
                (Received::Content(bytes), Some(Copying::File(output, _))) => {
                    self.size_bytes += bytes.len() as u64;
                    output.write_all(bytes).context(|| "writing the file")?;
                }
                (Received::Content(_), None) => {}
                (Received::Unread(text), Some(Copying::Archive(_))) => {
                    self.unread.add(invocation, text)
                }
                // A single file is useless if it is not whole.
                (Received::Unread(text), _) => {
                    // It names the path below the one that was asked for.
                    let why = text.strip_prefix("/: ").unwrap_or(text);
                    let text = format!("{} was not read: {why}", self.arguments.address);
                    return Err(Error::new(ErrorKind::Io, text));
                }
            }
            Ok(())
        });
        about(&self.arguments.address, done)?;
        match copying {
            Some(Copying::Archive(archive)) => (_, self.left_out) = archive.finish()?,
            Some(Copying::File(output, entry)) => finish_file(output, &entry)?,
            None => {}
        }
        Ok(())
    }

    /// Opens the target for the path that was asked for.
    fn begin(&mut self, top: &Entry) -> Result<Copying> {
        let name = self.arguments.address.last_name();
        match top.kind {
            EntryKind::File => self.format = self.arguments.format(name)?,
            EntryKind::Folder => {
                let format = self.arguments.format(None)?;
                self.format = Some(format.unwrap_or(ArchiveFormat::Tar));
            }
            EntryKind::Link | EntryKind::Special => {
                let text = format!("{} is neither a file nor a folder", self.arguments.address);
                return Err(Error::new(ErrorKind::InvalidInput, text));
            }
        }
        let Some(format) = self.format else {
            return Ok(Copying::File(self.open(name.unwrap_or(b"file"), "")?, top.clone()));
        };
        let output = self.open(name.unwrap_or(b"files"), format.extension())?;
        let name = name.unwrap_or_default();
        let mut archive = Archive::new(output, format, name, self.arguments.exact)?;
        archive.add(top)?;
        Ok(Copying::Archive(archive))
    }

    /// Opens the target; in a folder, a file of that name.
    fn open(&mut self, name: &[u8], suffix: &str) -> Result<Output> {
        let target = &self.arguments.target;
        if target == Path::new("-") {
            return match (std::io::stdout().is_terminal(), self.format.is_some()) {
                (false, _) => Ok(Output::Stdout),
                (true, false) => Ok(Output::Terminal),
                (true, true) => Err(Error::new(
                    ErrorKind::InvalidInput,
                    "an archive cannot be written to a terminal",
                )
                .advise("redirect stdout, or name a file")),
            };
        }
        let path = match target.is_dir() {
            true => {
                let mut file = std::ffi::OsStr::from_bytes(name).to_owned();
                file.push(suffix);
                target.join(file)
            }
            false => target.clone(),
        };
        let there = path.metadata().ok().map(|found| found.file_type());
        if there.is_some_and(|kind| kind.is_fifo()) {
            let text = format!("{} is a pipe, which may have no reader", path.display());
            return Err(Error::new(ErrorKind::InvalidInput, text)
                .advise("give - for the target, and redirect stdout to it"));
        }
        let is_stream = there.is_some_and(|kind| !kind.is_file());
        let what = || format!("making the file {}", path.display());
        let mut options = OpenOptions::new();
        options.write(true).mode(0o600);
        let file = if is_stream && self.arguments.force {
            options.open(&path).context(what)?
        } else {
            let part = PartFiles::create(&path, None, self.arguments.force)?;
            let file = options.create_new(true).open(part.image()).context(what)?;
            self.part = Some(part);
            file
        };
        self.written = Some(path);
        Ok(Output::File(file))
    }
}

/// Completes a file, and gives it the time of its original.
fn finish_file(mut output: Output, entry: &Entry) -> Result<()> {
    output.flush().context(|| "writing the file")?;
    if let (Output::File(file), Ok(seconds)) = (&output, u64::try_from(entry.modified_s)) {
        let modified = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
        // The content counts.
        let _ = modified.map(|modified| file.set_modified(modified));
    }
    Ok(())
}
