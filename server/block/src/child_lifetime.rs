//! Child processes that end together with the thread that starts them.

use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::io::Errno;
use rustix::process::{getpid, getppid, set_parent_process_death_signal, Signal};

/// Makes the kernel send `signal` to the command's process when the thread that starts it ends, and
/// so also when this process is killed. If this process was killed just before, the command is not
/// run.
///
/// The kernel forgets this when the process gives up privileges or runs a set-user-ID program.
#[allow(unsafe_code)]
pub fn end_with_this_thread(command: &mut Command, signal: Signal) {
    let parent = getpid();
    let tie = move || -> std::io::Result<()> {
        set_parent_process_death_signal(Some(signal))?;
        match getppid() {
            Some(now) if now == parent => Ok(()),
            // The parent ended before the kernel knew what to send.
            _ => Err(Errno::SRCH.into()),
        }
    };
    // SAFETY: between fork and exec only async-signal-safe functions may be called. These are two
    // system calls; nothing allocates or locks.
    unsafe { command.pre_exec(tie) };
}
