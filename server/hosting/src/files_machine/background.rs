//! The process in the background that keeps a machine.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_files::FilesAddress;
use rustix::process::{Signal, getpid, kill_process, setsid};

use super::machine::FilesMachine;
use super::place::Place;
use super::reading::Reading;
use crate::caller::Caller;
use crate::signals::ChildSignals;

const INTERVAL: Duration = Duration::from_millis(100);
const LOOK_PATIENCE: Duration = Duration::from_secs(2);
/// The command that started this process writes it when the machine may stay.
pub(super) const MAY_STAY: u8 = b's';

/// Keeps the machine of a point: until it was idle for this long, a command asks for its end, or the
/// command that started this process ends without giving leave to stay.
///
/// # Errors
/// Those of the machine's start, for the command that waits. `Busy` if another background process lives.
pub fn keep(caller: &Caller, address: &FilesAddress, idle: Duration) -> Result<()> {
    // The terminal's signals are for the command.
    let _ = setsid();
    let mut signals = ChildSignals::catch()?;
    let may_stay = watch_command()?;
    let repository = &caller.open()?;
    let point = Reading::point(caller, repository, address)?;
    let disks = &address.disks;
    let place = Place::new(caller, &point, disks)?;
    let until = Instant::now() + LOOK_PATIENCE;
    let _lock = loop {
        // A command that looks for machines holds the lock for a moment.
        match place.try_keep()? {
            Some(lock) => break lock,
            None if Instant::now() < until => std::thread::sleep(INTERVAL),
            None => {
                let text = "another command has started this machine just now";
                return Err(Error::new(ErrorKind::Busy, text));
            }
        }
    };
    let mut kept = FilesMachine::start(caller, repository, &[&point], disks, None, &mut signals)?;
    let disks = kept
        .disks
        .first()
        .ok_or_else(|| Error::new(ErrorKind::Internal, "a machine without a point"))?;
    place.describe(&kept.port, &disks.names, disks.bytes)?;
    let mut stdout = std::io::stdout().lock();
    let written = stdout.write_all(b"ready\n").and_then(|()| stdout.flush());
    let mut last_use = Instant::now();
    while written.is_ok() {
        if let Err(error) = kept.look_after(caller, &mut signals) {
            place.tell_reason(&error);
            break;
        }
        std::thread::sleep(INTERVAL);
        if !may_stay.load(Ordering::SeqCst) {
            last_use = Instant::now();
            continue;
        }
        match place.try_use()? {
            None => last_use = Instant::now(),
            // While the lock is held here, no command takes the machine for a living one.
            Some(_use) if last_use.elapsed() > idle || place.is_asked_to_end() => {
                place.clear();
                break;
            }
            Some(_) => {}
        }
    }
    place.clear();
    kept.end()
}

/// Whether the command has said that the machine may stay. If it ends without that, this process gets
/// a signal.
fn watch_command() -> Result<Arc<AtomicBool>> {
    let may_stay = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&may_stay);
    let watch = move || {
        let mut word = [0];
        match std::io::stdin().read(&mut word) {
            Ok(1) if word == [MAY_STAY] => flag.store(true, Ordering::SeqCst),
            _ => {
                let _ = kill_process(getpid(), Signal::TERM);
            }
        }
    };
    std::thread::Builder::new()
        .name("command".to_owned())
        .spawn(watch)
        .context(|| "starting a thread that watches the command")?;
    Ok(may_stay)
}
