//! Progress of long commands: a bar on a terminal, lines elsewhere, objects for programs.

use std::io::Write;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use coldrise_block::{Phase, Progress, ProgressState};
use coldrise_replica::CopyProgress;
use coldrise_session::VerifyPart;
use coldrise_store::VerifyProgress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::invocation::Invocation;
use crate::report::{print_line, print_on_stderr};
use crate::units::{show_duration, show_size};
use coldrise_runs::process_run;

const BAR_INTERVAL: Duration = Duration::from_millis(50);
const LINE_INTERVAL: Duration = Duration::from_secs(5);
const OBJECT_INTERVAL: Duration = Duration::from_millis(250);
const SHORTEST_FOR_A_RATE: Duration = Duration::from_millis(50);

/// How progress is shown.
enum Display {
    Nothing,
    Bar(ProgressBar),
    Lines,
    Objects,
}

/// Shows the progress of one command. Dropping it removes the bar.
pub(crate) struct ProgressView {
    shown: Display,
    started: Instant,
    current: Mutex<Current>,
}

/// The current disk, with its start time and start offset.
#[derive(Default)]
struct Current {
    disk: String,
    phase: Option<Phase>,
    since: Option<Instant>,
    from_bytes: u64,
    /// Time since the start, before which nothing more is shown.
    next: Duration,
}

#[derive(Serialize)]
struct Event<'a> {
    event: &'static str,
    phase: &'static str,
    disk: &'a str,
    done_bytes: u64,
    total_bytes: u64,
    read_bytes: u64,
    stored_bytes: u64,
    bytes_per_second: u64,
    elapsed_ms: u64,
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn word(phase: Phase) -> &'static str {
    match phase {
        Phase::Opening => "opening",
        Phase::Storing => "storing",
        Phase::Restoring => "restoring",
        Phase::Finishing => "finishing",
        Phase::Verifying => "verifying",
        Phase::Reclaiming => "reclaiming",
        Phase::Moving => "moving",
    }
}

impl ProgressView {
    /// A view in the form that the invocation asks for.
    pub(crate) fn new(invocation: &Invocation) -> ProgressView {
        let shown = if invocation.is_json() {
            Display::Objects
        } else if invocation.is_quiet() {
            Display::Nothing
        } else if invocation.is_watched() {
            Display::Bar(new_bar())
        } else {
            Display::Lines
        };
        // A short command needs no line.
        let first = if matches!(shown, Display::Lines) { LINE_INTERVAL } else { Duration::ZERO };
        ProgressView {
            shown,
            started: Instant::now(),
            current: Mutex::new(Current { next: first, ..Current::default() }),
        }
    }

    /// Shows the progress of a verify, with `disk` as the label.
    pub(crate) fn verifying(&self, part: VerifyPart, now: VerifyProgress) {
        self.update(&ProgressState {
            phase: Phase::Verifying,
            disk: match part {
                VerifyPart::Chunks => "chunks",
                VerifyPart::CapturedBlocks => "captured blocks",
            },
            done_bytes: now.done_bytes,
            total_bytes: now.total_bytes,
            read_bytes: now.read_bytes,
            stored_bytes: 0,
        });
    }

    fn interval(&self) -> Duration {
        match self.shown {
            Display::Nothing => Duration::MAX,
            Display::Bar(_) => BAR_INTERVAL,
            Display::Lines => LINE_INTERVAL,
            Display::Objects => OBJECT_INTERVAL,
        }
    }

    fn event<'a>(&self, state: &ProgressState<'a>, rate: u64) -> Event<'a> {
        Event {
            event: "progress",
            phase: word(state.phase),
            disk: state.disk,
            done_bytes: state.done_bytes,
            total_bytes: state.total_bytes,
            read_bytes: state.read_bytes,
            stored_bytes: state.stored_bytes,
            bytes_per_second: rate,
            elapsed_ms: milliseconds(self.started.elapsed()),
        }
    }

    fn show(&self, state: &ProgressState<'_>, rate: u64) {
        match &self.shown {
            Display::Nothing => {}
            Display::Bar(bar) => {
                let what = match state.phase {
                    Phase::Opening => "opening",
                    Phase::Finishing => "finishing",
                    Phase::Storing
                    | Phase::Restoring
                    | Phase::Verifying
                    | Phase::Reclaiming
                    | Phase::Moving => "",
                };
                let rate = show_rate(state, rate);
                let separator = if what.is_empty() || rate.is_empty() { "" } else { " " };
                bar.set_message(format!("{rate}{separator}{what}"));
                bar.set_position(state.done_bytes);
            }
            Display::Lines if state.phase == Phase::Opening => {}
            Display::Lines => print_on_stderr(&line(state, rate)),
            Display::Objects => {
                if let Ok(text) = serde_json::to_string(&self.event(state, rate)) {
                    print_line(&text);
                }
            }
        }
    }
}

fn line(state: &ProgressState<'_>, rate: u64) -> String {
    let percent = state.done_bytes.saturating_mul(100) / state.total_bytes.max(1);
    let mut text = format!(
        "{}: {} of {} ({percent} %)",
        state.disk,
        show_size(state.done_bytes),
        show_size(state.total_bytes),
    );
    let rate = show_rate(state, rate);
    if !rate.is_empty() {
        text.push_str(&format!(", {rate}"));
    }
    text
}

/// The rate and the remaining time; empty if unknown.
fn show_rate(state: &ProgressState<'_>, rate: u64) -> String {
    let left = state.total_bytes.saturating_sub(state.done_bytes);
    match (rate, left) {
        (0, _) => String::new(),
        (_, 0) => format!("{}/s", show_size(rate)),
        _ => {
            let time = show_duration(Duration::from_secs((left / rate).max(1)));
            format!("{}/s, about {time} left", show_size(rate))
        }
    }
}

/// A bar that stays hidden until its length is known. We compute the rate: the bar's own
/// rate counts work from before it was shown.
fn new_bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
    let template = "{prefix} {wide_bar} {binary_bytes}/{binary_total_bytes} {msg}";
    // The template is fixed; without the style the bar still works.
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}

impl CopyProgress for ProgressView {}

impl Progress for ProgressView {
    fn update(&self, state: &ProgressState<'_>) {
        let is_recorded = process_run::is_progress_due();
        if matches!(self.shown, Display::Nothing) && !is_recorded {
            return;
        }
        // Another thread is updating the display right now.
        let Ok(mut current) = self.current.try_lock() else { return };
        let is_new_disk = current.disk != state.disk
            || (current.phase == Some(Phase::Opening) && state.phase != Phase::Opening);
        if is_new_disk {
            current.disk = state.disk.to_owned();
            current.since = Some(Instant::now());
            current.from_bytes = state.done_bytes;
            if let Display::Bar(bar) = &self.shown {
                // The order matters: each call draws.
                bar.set_length(state.total_bytes);
                bar.reset();
                bar.set_message("");
                bar.set_prefix(state.disk.to_owned());
                bar.set_position(state.done_bytes);
                if bar.is_hidden() {
                    bar.set_draw_target(ProgressDrawTarget::stderr());
                }
            }
        }
        let is_new_phase = current.phase != Some(state.phase);
        current.phase = Some(state.phase);
        let now = self.started.elapsed();
        let is_due = now >= current.next;
        // The start and end of a disk are shown at once, except as lines.
        let is_boundary = is_new_phase
            && matches!(state.phase, Phase::Opening | Phase::Finishing)
            && !matches!(self.shown, Display::Lines);
        if !is_due && !is_boundary && !is_recorded {
            return;
        }
        let running = current.since.map_or(Duration::ZERO, |since| since.elapsed());
        let done = state.done_bytes.saturating_sub(current.from_bytes);
        // The time is too short for a rate.
        let rate = if running < SHORTEST_FOR_A_RATE {
            0
        } else {
            (done as f64 / running.as_secs_f64()) as u64
        };
        if is_recorded {
            process_run::progress(serde_json::json!(self.event(state, rate)));
        }
        if is_due || is_boundary {
            current.next = now.saturating_add(self.interval());
            self.show(state, rate);
        }
    }
}

impl Drop for ProgressView {
    fn drop(&mut self) {
        if let Display::Bar(bar) = &self.shown {
            bar.finish_and_clear();
            let _ = std::io::stderr().flush();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_lines_show_rate_and_time_left() {
        let state = ProgressState {
            phase: Phase::Storing,
            disk: "vda",
            done_bytes: 10 << 30,
            total_bytes: 40 << 30,
            read_bytes: 1 << 30,
            stored_bytes: 0,
        };
        assert_eq!(
            line(&state, 256 << 20),
            "vda: 10.0 GiB of 40.0 GiB (25 %), 256.0 MiB/s, about 2 min 0 s left"
        );
        let empty = ProgressState { done_bytes: 0, total_bytes: 0, ..state };
        assert_eq!(line(&empty, 0), "vda: 0 B of 0 B (0 %)");
    }
}
