//! Handles Ctrl-C and the other signals that end the program.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use coldrise_block::{Context, ErrorKind, Result};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// The signals that ask the program to end.
const ENDINGS: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// Whether this program handles them.
static ARE_CAUGHT: AtomicBool = AtomicBool::new(false);

/// Whether a signal asks the command to end. Before, it ends the process.
pub(crate) fn are_caught() -> bool {
    ARE_CAUGHT.load(Ordering::SeqCst)
}

/// A flag that long work checks. The first Ctrl-C, SIGTERM or SIGHUP sets it. The
/// second ends the program at once; committed data is not lost.
///
/// # Errors
/// `Io` if a handler cannot be installed.
pub(crate) fn cancel_flag() -> Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let code = i32::from(ErrorKind::Interrupted.exit_code());
    for signal in ENDINGS {
        // The order matters: the conditional shutdown checks the flag before it is
        // set again.
        signal_hook::flag::register_conditional_shutdown(signal, code, Arc::clone(&flag))
            .context(|| "catching signals")?;
        signal_hook::flag::register(signal, Arc::clone(&flag)).context(|| "catching signals")?;
    }
    ARE_CAUGHT.store(true, Ordering::SeqCst);
    Ok(flag)
}

/// Signals for a program that waits for its children.
pub(crate) struct ChildSignals(Signals);

impl ChildSignals {
    /// Catches them from now on. Call this before the first child starts.
    ///
    /// # Errors
    /// `Io` if a handler cannot be installed.
    pub(crate) fn catch() -> Result<ChildSignals> {
        let [int, term, hup] = ENDINGS;
        let caught = Signals::new([int, term, hup, SIGCHLD]).context(|| "catching signals")?;
        ARE_CAUGHT.store(true, Ordering::SeqCst);
        Ok(ChildSignals(caught))
    }

    /// Whether the program was asked to end since the last call.
    pub(crate) fn was_asked_to_end(&mut self) -> bool {
        self.0.pending().any(|signal| signal != SIGCHLD)
    }

    /// Waits for a signal. Returns true if the program is asked to end, false if a
    /// child may have ended.
    pub(crate) fn wait(&mut self) -> bool {
        self.0.wait().any(|signal| signal != SIGCHLD)
    }
}
