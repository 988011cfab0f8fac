//! The lines of a serial port, without control characters, in bounded memory.

use coldrise_block::units::is_printable;

use std::collections::VecDeque;

/// Longer lines are cut into lines of this length, in bytes.
const MAX_LINE_BYTES: usize = 1024;
/// Number of last lines that are kept.
const MAX_LINES: usize = 200;

/// The place inside a terminal's escape sequence.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Escape {
    #[default]
    None,
    /// After ESC.
    Begun,
    /// After `ESC [`: ends with a byte from `@` to `~`.
    Control,
    /// After `ESC ]` and its like: ends with BEL or ESC.
    Text,
}

/// The last lines, and the line that is not ended yet.
#[derive(Default)]
pub(crate) struct SerialLog {
    lines: VecDeque<String>,
    pending: Vec<u8>,
    escape: Escape,
}

impl SerialLog {
    /// Adds bytes, and calls `each` with every line that they end.
    pub(crate) fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(&str)) {
        for byte in bytes {
            if *byte == b'\n' {
                self.escape = Escape::None;
                self.end_line(&mut each);
            } else if self.is_text(*byte) {
                self.pending.push(*byte);
                if self.pending.len() >= MAX_LINE_BYTES {
                    self.end_line(&mut each);
                }
            }
        }
    }

    /// The line that is not ended yet, such as a prompt.
    pub(crate) fn pending(&self) -> String {
        text(&self.pending)
    }

    /// At most `count` last lines.
    pub(crate) fn tail(&self, count: usize) -> Vec<String> {
        let pending = Some(self.pending()).filter(|line| !line.is_empty());
        let mut lines: Vec<String> = self.lines.iter().cloned().chain(pending).collect();
        lines.drain(..lines.len().saturating_sub(count));
        lines
    }

    fn end_line(&mut self, each: &mut impl FnMut(&str)) {
        let line = text(&self.pending);
        self.pending.clear();
        each(&line);
        if self.lines.len() == MAX_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }

    /// Whether the byte is part of a line: neither control nor part of an escape sequence.
    fn is_text(&mut self, byte: u8) -> bool {
        self.escape = match (self.escape, byte) {
            (_, 0x1b) => Escape::Begun,
            (Escape::Begun, b'[') => Escape::Control,
            (Escape::Begun, b']' | b'P' | b'^' | b'_') => Escape::Text,
            // Two of three bytes: `ESC ( B`.
            (Escape::Begun, 0x20..=0x2f) => Escape::Begun,
            (Escape::Control, 0x20..=0x3f) => Escape::Control,
            (Escape::Text, byte) if byte != 0x07 => Escape::Text,
            (Escape::None, byte) => return byte >= b' ' && byte != 0x7f || byte == b'\t',
            (_, _) => Escape::None,
        };
        false
    }
}

/// Control characters can also be two bytes of UTF-8.
fn text(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars()
        .filter(|c| is_printable(*c) || *c == '\t')
        .collect::<String>()
        .trim_end()
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_no_control_characters() {
        let mut log = SerialLog::default();
        let mut lines = Vec::new();
        let sent =
            b"\x1b[2J\x1b[1;31mred\x1b[0m\r\n\x1b]0;title\x07x\x1b(By\xc2\x9b\xff\r\nlogin: ";
        // Escape sequences can be cut anywhere.
        for byte in sent {
            log.feed(&[*byte], |line| lines.push(line.to_owned()));
        }
        assert_eq!(lines, ["red", "xy\u{fffd}"]);
        assert_eq!(log.pending(), "login:");
        assert_eq!(log.tail(2), ["xy\u{fffd}", "login:"]);
    }

    #[test]
    fn the_memory_is_bounded() {
        let mut log = SerialLog::default();
        for _ in 0..1024 {
            log.feed(&[b'A'; 64 << 10], |line| assert_eq!(line.len(), MAX_LINE_BYTES));
        }
        assert_eq!(log.tail(usize::MAX).len(), MAX_LINES);
        // An escape sequence without an end hides the rest of its line only.
        log.feed(b"\x1b]", |_| {});
        log.feed(&[b'A'; 1 << 20], |_| panic!("hidden"));
        log.feed(b"\nhello", |_| {});
        assert_eq!(log.pending(), "hello");
    }
}
