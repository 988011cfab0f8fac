//! How much a copy may send at which time: `mon-fri 08:00-18:00=5M`, `sat,sun=off`.
//!
//! Nothing is planned ahead: the clock is asked every second. So a clock that jumps, or that goes from one time
//! zone's rule to another, is followed at once. Times are local times.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_ingest::{Flow, Rate};
use coldrise_schedule::Window;
use jiff::ToSpan;
use jiff::civil::DateTime;

/// Interval of asking the clock.
const INTERVAL: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 1000 });
/// Interval of looking whether the copy has ended.
const PAUSE: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 50 });
/// A week and a day of minutes: in this time each window begins and ends.
const MINUTES: i64 = 8 * 24 * 60;

/// This host's local time.
pub fn local_time() -> DateTime {
    jiff::Zoned::now().datetime()
}

/// The rate within a window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateWindow {
    window: Window,
    flow: Flow,
    text: String,
}

impl FromStr for RateWindow {
    type Err = Error;

    /// `WINDOW=RATE` or `WINDOW=off`. An error names the part that is wrong.
    fn from_str(text: &str) -> Result<RateWindow> {
        let (window, flow) = text.rsplit_once('=').ok_or_else(|| {
            let shown: String = text.chars().take(40).collect();
            let what = format!(
                "{shown:?} has no rate: write for example mon-fri 08:00-18:00=5M, or sat,sun=off"
            );
            Error::new(ErrorKind::InvalidInput, what)
        })?;
        let window = window.parse::<Window>()?;
        let flow = match flow {
            "off" => Flow::Stopped,
            flow => Flow::At(
                flow.parse()
                    .map_err(|error: Error| error.context(format!("after '=' ({flow:?})")))?,
            ),
        };
        Ok(RateWindow { window, flow, text: text.to_owned() })
    }
}

impl fmt::Display for RateWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The windows of a copy, and what flows outside of them.
#[derive(Clone, Debug)]
pub struct RateWindows {
    windows: Vec<RateWindow>,
    otherwise: Flow,
}

impl Default for RateWindows {
    fn default() -> RateWindows {
        RateWindows { windows: Vec::new(), otherwise: Flow::Free }
    }
}

impl RateWindows {
    /// These windows; outside of them `otherwise` holds, and no limit if it is `None`.
    ///
    /// # Errors
    /// `InvalidInput` if nothing would ever flow.
    pub fn new(windows: Vec<RateWindow>, otherwise: Option<Rate>) -> Result<RateWindows> {
        let windows = RateWindows { windows, otherwise: otherwise.into() };
        let any_week = DateTime::constant(2026, 1, 5, 0, 0, 0, 0);
        match windows.opens(any_week) {
            Some(_) => Ok(windows),
            None => {
                let off: Vec<_> = windows.stopping().map(ToString::to_string).collect();
                let text = format!("nothing would ever be sent: {}", off.join(", "));
                Err(Error::new(ErrorKind::InvalidInput, text)
                    .advise("leave a part of the week without off"))
            }
        }
    }

    /// Whether the clock changes nothing.
    pub fn are_constant(&self) -> bool {
        self.windows.is_empty()
    }

    /// The rate at a local time. Where windows overlap, the least holds.
    pub fn flow(&self, local: DateTime) -> Flow {
        let inside = self.windows.iter().filter(|one| one.window.contains(local));
        inside.map(|one| one.flow).min().unwrap_or(self.otherwise)
    }

    /// The first full minute from `local` on in which something may flow.
    pub fn opens(&self, local: DateTime) -> Option<DateTime> {
        if self.flow(local) != Flow::Stopped {
            return Some(local);
        }
        let minute = local.with().second(0).subsec_nanosecond(0).build().ok()?;
        let later = (1..=MINUTES).filter_map(|count| minute.checked_add(count.minutes()).ok());
        later.into_iter().find(|time| self.flow(*time) != Flow::Stopped)
    }

    /// The windows in which nothing flows.
    pub fn stopping(&self) -> impl Iterator<Item = &RateWindow> {
        self.windows.iter().filter(|one| one.flow == Flow::Stopped)
    }

    /// Gives `apply` what holds whenever it changes, from `last` on, until `is_over` returns true.
    pub fn follow(
        &self,
        mut last: Flow,
        clock: &dyn Fn() -> DateTime,
        is_over: &dyn Fn() -> bool,
        mut apply: impl FnMut(Flow),
    ) {
        let mut asked = Instant::now();
        while !self.are_constant() && !is_over() {
            if asked.elapsed() >= INTERVAL {
                asked = Instant::now();
                let flow = self.flow(clock());
                if flow != last {
                    last = flow;
                    apply(flow);
                }
            }
            std::thread::sleep(PAUSE);
        }
    }
}

#[cfg(test)]
#[path = "windows_tests.rs"]
mod tests;
