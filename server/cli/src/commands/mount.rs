//! `coldrise mount`: the repository as folders and files.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use clap::Args;
use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_fuse::{Mount, MountOptions, Unmounted};
use coldrise_store::default_cache_bytes;
use serde_json::json;

use crate::invocation::Invocation;
use crate::report::{Report, print_line};
use crate::units::parse_size;
use coldrise_hosting::signals::ChildSignals;

/// Time for programs to close their files.
const PATIENCE: Duration = Duration::from_secs(5);

/// Mount the repository on a directory, until Ctrl-C or umount.
///
/// Every restore point shows MACHINE/POINT/DISK.raw, .vhd, .vhdx, .vmdk and .qcow2, and the
/// compact .dynamic.vhd, .dynamic.vhdx, .sparse.vmdk and .sparse.qcow2, read-only. Every
/// session shows live/SESSION/DISK.raw and so on, writable; live/SESSION@TIME, which is not listed, is the restore
/// point of a time mark. All files of a disk are views of
/// the same disk: a write to one shows in the others. New points and sessions appear at once. A
/// line that starts with "mounted" says that the directory is ready.
#[derive(Debug, Args)]
pub(crate) struct MountArguments {
    /// An empty directory.
    #[arg(value_name = "DIR")]
    directory: PathBuf,

    /// Let other users read the files, and let root write those of sessions.
    ///
    /// Users other than root need the line user_allow_other in /etc/fuse.conf.
    #[arg(long)]
    allow_other: bool,

    /// Memory for decoded chunks, such as 64M or 2G; 0 disables the cache. Default: one eighth
    /// of the memory. The cache shrinks while little memory is available.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    cache: Option<u64>,

    /// Make sessions read-only, too.
    #[arg(long)]
    read_only: bool,
}

/// Events of a mount.
enum Event {
    /// This program received a signal to end.
    Asked,
    /// It was unmounted, and no process uses it.
    Ended,
}

pub(crate) fn run(invocation: &Invocation, arguments: MountArguments) -> Result<Report> {
    let signals = ChildSignals::catch()?;
    let cache_bytes = arguments.cache.unwrap_or_else(default_cache_bytes);
    let repository = invocation.access()?.open(cache_bytes)?;
    let options = MountOptions {
        folder: arguments.directory,
        is_read_only: arguments.read_only,
        allows_others: arguments.allow_other,
        caches_sessions: false,
        cache_bytes,
    };
    let (tell, events) = channel();
    let asked = tell.clone();
    let mount = Mount::start(&repository, &options, move || {
        // At the program's end the receiver may be gone.
        let _ = tell.send(Event::Ended);
    })?;
    let ended = tell_of_requests_to_end(signals, asked).and_then(|()| {
        announce(invocation, mount.folder(), arguments.read_only);
        await_end(invocation, &mount, &events)
    });
    let folder = mount.folder().to_owned();
    // After every outcome: make all writes durable.
    let finished = mount.finish();
    ended.and(finished)?;
    let object =
        json!({ "directory": folder.to_string_lossy(), "elapsed_ms": invocation.elapsed_ms() });
    Ok(Report::done(&object, format!("unmounted {}", folder.display())))
}

fn announce(invocation: &Invocation, folder: &Path, is_read_only: bool) {
    if invocation.is_json() {
        let object = json!({
            "event": "mounted",
            "directory": folder.to_string_lossy(),
            "read_only": is_read_only,
        });
        print_line(&object.to_string());
        return;
    }
    let repository = invocation.repository_path().unwrap_or(Path::new(""));
    let (repository, folder) = (repository.display(), folder.display());
    let program = if rustix::process::geteuid().is_root() { "umount" } else { "fusermount3 -u" };
    print_line(&format!("mounted {repository} at {folder}; end with Ctrl-C or {program} {folder}"));
}

fn tell_of_requests_to_end(mut signals: ChildSignals, tell: Sender<Event>) -> Result<()> {
    let thread = std::thread::Builder::new().name("signals".to_owned());
    let wait = move || loop {
        if signals.wait() && tell.send(Event::Asked).is_err() {
            return;
        }
    };
    thread.spawn(wait).map(drop).context(|| "starting the thread that waits for signals")
}

/// Waits until the mount has ended, by itself or after a signal.
fn await_end(invocation: &Invocation, mount: &Mount, events: &Receiver<Event>) -> Result<()> {
    match events.recv() {
        Ok(Event::Ended) => return Ok(()),
        Ok(Event::Asked) => {}
        Err(_) => return Err(gone()),
    }
    if mount.unmount()? == Unmounted::Busy {
        let open = mount.open_paths();
        let what = if open.is_empty() {
            "a folder of it is still in use".to_owned()
        } else {
            format!("still open: {}", open.join(", "))
        };
        invocation.remark(&format!(
            "{} is unmounted, but {what}; waiting {} s, or until the next Ctrl-C",
            mount.folder().display(),
            PATIENCE.as_secs()
        ));
    }
    match events.recv_timeout(PATIENCE) {
        Ok(Event::Ended) => Ok(()),
        Ok(Event::Asked) | Err(RecvTimeoutError::Timeout) => {
            invocation.remark(
                "ended anyway: all writes are flushed, and programs that still have a file open get \
                 errors",
            );
            Ok(())
        }
        Err(RecvTimeoutError::Disconnected) => Err(gone()),
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::Internal, "the threads of the mount are gone")
}
