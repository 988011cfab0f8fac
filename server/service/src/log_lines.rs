//! Log lines on stderr. For the journal each has its priority, as `<4>`.

use std::fmt;
use std::os::unix::fs::MetadataExt;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Starts logging.
pub(crate) fn start() {
    tracing_subscriber::fmt()
        .with_max_level(Level::INFO)
        .with_writer(std::io::stderr)
        // It would log its errors to stderr, and a log on a full drive then ends the thread.
        .log_internal_errors(false)
        .with_ansi(false)
        .event_format(LogLine { is_journal: is_journal() })
        .init();
}

/// Whether stderr goes to the journal: systemd names its device and number.
fn is_journal() -> bool {
    let Some(named) = std::env::var_os("JOURNAL_STREAM") else { return false };
    let found = std::fs::metadata("/proc/self/fd/2");
    found.is_ok_and(|found| named.to_str() == Some(&format!("{}:{}", found.dev(), found.ino())))
}

struct LogLine {
    is_journal: bool,
}

impl<S, N> FormatEvent<S, N> for LogLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let level = *event.metadata().level();
        let mut text = String::new();
        context.format_fields(Writer::new(&mut text), event)?;
        // One event is one line, whatever its text came from.
        let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        match self.is_journal {
            true => writeln!(writer, "<{}>{text}", priority(level)),
            false => writeln!(writer, "{level:>5} {text}"),
        }
    }
}

/// The priority of syslog(3).
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}
