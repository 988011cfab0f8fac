//! Names from a machine, which are any bytes but `/` and NUL.

use std::fmt::Write;

use coldrise_block::units::is_printable;
use coldrise_block::{Error, ErrorKind};

/// A name for people. Non-printable bytes, and backslashes, are written as escapes, so
/// that different names look different.
pub fn shown(name: &[u8]) -> String {
    let mut text = String::with_capacity(name.len());
    for piece in name.utf8_chunks() {
        for c in piece.valid().chars() {
            match c {
                '\\' => text.push_str("\\\\"),
                '\n' => text.push_str("\\n"),
                '\t' => text.push_str("\\t"),
                c if is_printable(c) => text.push(c),
                c => {
                    let mut bytes = [0; 4];
                    escape(c.encode_utf8(&mut bytes).as_bytes(), &mut text);
                }
            }
        }
        escape(piece.invalid(), &mut text);
    }
    text
}

fn escape(bytes: &[u8], text: &mut String) {
    for byte in bytes {
        let _ = write!(text, "\\x{byte:02x}");
    }
}

/// A text of the machine without characters that command a terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if is_printable(c) { c } else { '\u{fffd}' }).collect()
}

/// Whether a name fits a pattern in which `*` stands for any bytes and `?` for one.
pub fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    // Where to continue if the last star has to take one byte more.
    let mut again: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                again = Some((p + 1, n + 1));
                p += 1;
            }
            Some(byte) if *byte == b'?' || name.get(n) == Some(byte) => {
                p += 1;
                n += 1;
            }
            _ => {
                let Some((star, next)) = again else { return false };
                again = Some((star, next + 1));
                (p, n) = (star, next);
            }
        }
    }
    pattern.get(p..).is_none_or(|rest| rest.iter().all(|byte| *byte == b'*'))
}

/// The error for answers that a sound machine never gives.
pub(super) fn nonsense(what: &str) -> Error {
    let text = format!(
        "the machine that reads the file systems answered {what}: nothing of it can be trusted"
    );
    Error::new(ErrorKind::ToolFailed, text).advise(
        "the file system is damaged, or made to attack readers; boot the point in isolation",
    )
}

/// The bytes of a path that needs escapes (see [`shown`]), in hexadecimal digits.
pub fn path_hex(path: &[u8]) -> Option<String> {
    (shown(path).as_bytes() != path).then(|| coldrise_block::hex::encode(path))
}

/// A path below another one.
pub fn join(above: &[u8], path: &[u8]) -> Vec<u8> {
    let mut joined = above.to_vec();
    if !path.is_empty() {
        if joined.last() != Some(&b'/') {
            joined.push(b'/');
        }
        joined.extend_from_slice(path);
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_command_a_terminal() {
        assert_eq!(shown("Übung 1.txt".as_bytes()), "Übung 1.txt");
        assert_eq!(shown(b"a\nb\x1b[2J\\\xff"), "a\\nb\\x1b[2J\\\\\\xff");
        assert_eq!(shown("\u{202e}".as_bytes()), "\\xe2\\x80\\xae");
        assert_eq!(printable("a\x1b[b"), "a\u{fffd}[b");
    }

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name, fits) in [
            ("*.conf", "a.conf", true),
            ("*.conf", "a.conf.old", false),
            ("a?c*", "abc", true),
            ("*a*b*", "xxaxxbxx", true),
            ("*aab", "aaab", true),
            ("", "a", false),
            ("*", "", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), fits, "{pattern} {name}");
        }
        assert!(!matches(&b"*a".repeat(50), &b"b".repeat(5000)));
    }
}
