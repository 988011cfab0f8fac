//! Child processes that end together with the thread that starts them.

use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::io::Errno;
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

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

/// Lets the command's process inherit the three standard streams only. For a process that outlives
/// this one: it would keep a lock or a pipe of the caller open.
#[allow(unsafe_code)]
pub fn inherit_standard_streams_only(command: &mut Command) {
    // Older kernels than 5.11 do not know the call; then the process inherits as usual.
    let mark = || -> std::io::Result<()> {
        let flags = libc::CLOSE_RANGE_CLOEXEC as libc::c_int;
        // SAFETY: marks descriptors, and closes none before the new program begins.
        let _ = unsafe { libc::close_range(3, libc::c_uint::MAX, flags) };
        Ok(())
    };
    // SAFETY: as above: one system call; nothing allocates or locks.
    unsafe { command.pre_exec(mark) };
}
