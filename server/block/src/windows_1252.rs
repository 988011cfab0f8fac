//! Text in Windows-1252, which old configuration files are written in. ISO 8859-1 is read the same, as browsers do.

/// The characters of 0x80 to 0x9F; a byte without one stays a control character.
const HIGH: [char; 32] = [
    '€', '\u{81}', '‚', 'ƒ', '„', '…', '†', '‡', 'ˆ', '‰', 'Š', '‹', 'Œ', '\u{8d}', 'Ž', '\u{8f}',
    '\u{90}', '‘', '’', '“', '”', '•', '–', '—', '˜', '™', 'š', '›', 'œ', '\u{9d}', 'ž', 'Ÿ',
];

/// Decodes it. Every byte is a character.
pub fn from_windows_1252(bytes: &[u8]) -> String {
    let high = |byte: u8| byte.checked_sub(0x80).and_then(|at| HIGH.get(usize::from(at)));
    bytes.iter().map(|byte| high(*byte).copied().unwrap_or(char::from(*byte))).collect()
}

/// Whether a file names this encoding.
pub fn is_windows_1252(encoding: &str) -> bool {
    ["windows-1252", "iso-8859-1"].iter().any(|name| encoding.eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use super::from_windows_1252;

    #[test]
    fn high_bytes_are_characters() {
        assert_eq!(from_windows_1252(b"K\xF6ln \x80 \x9F\xA0\xFF"), "Köln € Ÿ\u{a0}ÿ");
    }
}
