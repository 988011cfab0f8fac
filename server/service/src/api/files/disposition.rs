//! The names under which browsers store downloads.

/// Maximum length of a name, in characters.
const MAX_NAME_CHARS: usize = 120;

/// A name that a browser can give to a file on any system: no folders, no control characters, nothing that
/// turns the direction of text.
pub(super) fn harmless(name: &[u8]) -> String {
    let text = coldrise_files::printable(&String::from_utf8_lossy(name));
    let is_harmful = |c: char| "\\/:*?\"<>|\u{fffd}".contains(c);
    let text: String = text.chars().map(|c| if is_harmful(c) { '_' } else { c }).collect();
    let text = text.trim().trim_end_matches('.').trim_end();
    let text: String = text.chars().take(MAX_NAME_CHARS).collect();
    if text.is_empty() { "file".to_owned() } else { text }
}

/// The header that makes a browser store the answer under a name (RFC 6266).
pub(super) fn disposition(name: &str) -> String {
    let plain = |c: char| if c.is_ascii() && c != '%' && c != '\'' { c } else { '_' };
    let plain: String = name.chars().map(plain).collect();
    let mut escaped = String::new();
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'-' | b'_' => {
                escaped.push(char::from(byte));
            }
            byte => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    format!("attachment; filename=\"{plain}\"; filename*=UTF-8''{escaped}")
}

#[cfg(test)]
mod tests {
    use super::{disposition, harmless};

    #[test]
    fn names_of_downloads_are_harmless() {
        for (name, expected) in [
            (b"a.txt".as_slice(), "a.txt"),
            (b"a/../b\\c:d\"e\r\nx", "a_.._b_c_d_e__x"),
            (b"\xff\xfe", "__"),
            (b" .. ", "file"),
            ("gnp\u{202e}exe.txt".as_bytes(), "gnp_exe.txt"),
        ] {
            assert_eq!(harmless(name), expected);
        }
        assert_eq!(
            disposition("Übung 1%.txt"),
            "attachment; filename=\"_bung 1_.txt\"; filename*=UTF-8''%C3%9Cbung%201%25.txt"
        );
    }
}
