//! The final output of a command, and the output of errors.

use std::io::ErrorKind::BrokenPipe;
use std::io::Write;

use coldrise_block::{Context, ErrorKind, Result};
use serde::Serialize;
use serde_json::json;
use unicode_width::UnicodeWidthStr;

use crate::invocation::Invocation;
use coldrise_runs::process_run;

/// The result of a command: for people and for programs.
pub(crate) struct Report {
    text: String,
    object: String,
    /// The text answers a query, so `--quiet` does not suppress it.
    is_answer: bool,
    /// 0, unless the answer itself is a bad result.
    pub(crate) exit_code: u8,
}

impl Report {
    /// A report of completed work.
    pub(crate) fn done(object: &impl Serialize, text: impl Into<String>) -> Report {
        // Only maps with non-string keys fail to serialize, and there are none.
        let object = serde_json::to_string(object).unwrap_or_else(|_| "{}".to_owned());
        Report { text: text.into(), object, is_answer: false, exit_code: 0 }
    }

    /// The answer to a query.
    pub(crate) fn answer(object: &impl Serialize, text: impl Into<String>) -> Report {
        Report { is_answer: true, ..Report::done(object, text) }
    }

    /// A report of a command that has written its answer to stdout itself.
    pub(crate) fn silent() -> Report {
        Report { text: String::new(), object: String::new(), is_answer: true, exit_code: 0 }
    }

    /// The object that `--json` prints.
    pub(crate) fn object(&self) -> &str {
        &self.object
    }

    /// The context of an error of printing the report: the command itself is done.
    fn unwritten(&self) -> String {
        let done = match self.text.lines().next() {
            Some(first) if !self.is_answer => format!(" ({first})"),
            _ => String::new(),
        };
        format!("the command is done{done}, but its answer could not be written to stdout")
    }

    /// Prints the report in the invocation's format. A closed pipe is not an error.
    ///
    /// # Errors
    /// The error of writing to stdout.
    pub(crate) fn print(&self, invocation: &Invocation) -> Result<()> {
        let text = if invocation.is_json() {
            &self.object
        } else if self.is_answer || !invocation.is_quiet() {
            self.text.trim_end()
        } else {
            ""
        };
        match write_line(text) {
            Err(error) if error.kind() != BrokenPipe => Err(error).context(|| self.unwritten()),
            _ => Ok(()),
        }
    }
}

/// Prints one line on stdout in addition to the command's answer. Ignores a closed pipe,
/// because there is no reader to inform.
pub(crate) fn print_line(text: &str) {
    let _ = write_line(text);
}

fn write_line(text: &str) -> std::io::Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush())
}

/// Prints one line on stderr, and adds it to the log of the run.
pub(crate) fn print_remark(text: &str) {
    print_on_stderr(text);
    process_run::log("info", text);
}

/// Prints one line on stderr only.
pub(crate) fn print_on_stderr(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "coldrise: {text}");
}

/// Prints an error: on stderr for people, and with `--json` also as the last object on
/// stdout.
pub(crate) fn print_error(is_json: bool, kind: ErrorKind, message: &str) {
    print_on_stderr(message);
    process_run::log("error", message);
    if is_json {
        let error = json!({ "error": { "kind": kind.word(), "message": message } });
        print_line(&error.to_string());
    }
}

/// Columns of text under a heading, each as wide on a terminal as its widest cell. Columns whose
/// heading starts with `>` are aligned to the right.
pub(crate) fn table(headings: &[&str], rows: &[Vec<String>]) -> String {
    let mut lines: Vec<Vec<&str>> = Vec::with_capacity(rows.len() + 1);
    lines.push(headings.iter().map(|heading| heading.trim_start_matches('>')).collect());
    lines.extend(rows.iter().map(|row| row.iter().map(String::as_str).collect()));
    let widths: Vec<usize> = (0..headings.len())
        .map(|i| lines.iter().filter_map(|line| line.get(i)).map(|c| c.width()).max())
        .map(Option::unwrap_or_default)
        .collect();
    let mut text = String::new();
    for line in lines {
        let mut written = String::new();
        for (i, cell) in line.iter().enumerate() {
            let width = widths.get(i).copied().unwrap_or(0);
            let gap = if i == 0 { "" } else { "  " };
            let fill = " ".repeat(width.saturating_sub(cell.width()));
            if headings.get(i).is_some_and(|heading| heading.starts_with('>')) {
                written.push_str(&format!("{gap}{fill}{cell}"));
            } else {
                written.push_str(&format!("{gap}{cell}{fill}"));
            }
        }
        text.push_str(written.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::table;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [vec!["web01".to_owned(), "5".to_owned()], vec!["db".into(), "1234".into()]];
        assert_eq!(table(&["NAME", ">SIZE"], &rows), "NAME   SIZE\nweb01     5\ndb     1234\n");
        // Characters of two cells and of none.
        let rows =
            [vec!["会計サーバ".to_owned(), "5".to_owned()], vec!["e\u{301}".into(), "6".into()]];
        let text = table(&["NAME", ">SIZE"], &rows);
        assert_eq!(
            text,
            format!(
                "NAME{}  SIZE\n会計サーバ     5\ne\u{301}{}     6\n",
                " ".repeat(6),
                " ".repeat(9)
            )
        );
    }
}
