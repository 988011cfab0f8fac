//! Handles Ctrl-C and the other signals that end the program.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

use coldrise_block::{Context, ErrorKind, Result};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// The signals that ask the program to end.
static ENDINGS: LazyLock<Vec<i32>> = LazyLock::new(|| {
    let mut endings = vec![SIGINT, SIGTERM];
    endings.extend((!ignores_hangup()).then_some(SIGHUP));
    endings
});

/// Whether this process was started by `nohup`: then a closed terminal ends nothing.
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & (1 << (SIGHUP - 1)) != 0)
}

/// Whether this program handles them.
static ARE_CAUGHT: AtomicBool = AtomicBool::new(false);

/// Whether a signal asks the command to end. Before, it ends the process.
pub fn are_caught() -> bool {
    ARE_CAUGHT.load(Ordering::SeqCst)
}

/// Set by the first signal; see [`cancel_flag`].
static CANCEL: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Whether the command has begun to print its result, or a signal the answer in its place.
static IS_ANSWERED: AtomicBool = AtomicBool::new(false);

/// Until the command catches signals itself, a signal ends the program at once, after
/// `answer`. To the repository this is a kill, which loses nothing.
///
/// # Errors
/// `Io` if a handler cannot be installed or no thread can be started.
pub fn answer_signals(answer: impl Fn() + Send + 'static) -> Result<()> {
    let mut signals = Signals::new(&*ENDINGS).context(|| "catching signals")?;
    let code = i32::from(coldrise_runs::exit_code(ErrorKind::Interrupted));
    let wait = move || {
        for _ in signals.forever() {
            if are_caught() {
                // It may have come before the command caught signals.
                CANCEL.store(true, Ordering::SeqCst);
            } else if !IS_ANSWERED.swap(true, Ordering::SeqCst) {
                answer();
                signal_hook::low_level::exit(code);
            }
        }
    };
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(wait)
        .map(drop)
        .context(|| "starting a thread for signals")
}

/// Call this before the result is printed: a signal changes nothing any more. Does not
/// return if a signal has just ended the program.
pub fn answer_alone() {
    if IS_ANSWERED.swap(true, Ordering::SeqCst) {
        loop {
            std::thread::park();
        }
    }
}

/// A flag that long work checks. The first Ctrl-C, SIGTERM or SIGHUP sets it. The
/// second ends the program at once; committed data is not lost.
///
/// # Errors
/// `Io` if a handler cannot be installed.
pub fn cancel_flag() -> Result<Arc<AtomicBool>> {
    // Not `CANCEL`: the thread of `answer_signals` sets that at any time.
    let is_second = Arc::new(AtomicBool::new(false));
    let code = i32::from(coldrise_runs::exit_code(ErrorKind::Interrupted));
    for signal in ENDINGS.iter().copied() {
        // The order matters: the conditional shutdown checks the flag before it is
        // set again.
        signal_hook::flag::register_conditional_shutdown(signal, code, Arc::clone(&is_second))
            .context(|| "catching signals")?;
        for flag in [&is_second, &*CANCEL] {
            signal_hook::flag::register(signal, Arc::clone(flag)).context(|| "catching signals")?;
        }
    }
    ARE_CAUGHT.store(true, Ordering::SeqCst);
    Ok(Arc::clone(&CANCEL))
}

/// Signals for a program that waits for its children.
pub struct ChildSignals(Signals);

impl ChildSignals {
    /// Catches them from now on. Call this before the first child starts.
    ///
    /// # Errors
    /// `Io` if a handler cannot be installed.
    pub fn catch() -> Result<ChildSignals> {
        let signals = ENDINGS.iter().copied().chain([SIGCHLD]);
        let caught = Signals::new(signals).context(|| "catching signals")?;
        ARE_CAUGHT.store(true, Ordering::SeqCst);
        Ok(ChildSignals(caught))
    }

    /// Whether the program was asked to end since the last call.
    pub fn was_asked_to_end(&mut self) -> bool {
        self.0.pending().any(|signal| signal != SIGCHLD)
    }

    /// Waits for a signal. Returns true if the program is asked to end, false if a
    /// child may have ended.
    pub fn wait(&mut self) -> bool {
        self.0.wait().any(|signal| signal != SIGCHLD)
    }
}
