//! Display names of machines: what people call a machine, beside the name that addresses it.
//!
//! A display name comes from a hypervisor, a configuration file or another site. It is text for people and is never part
//! of an address, a path or a command. This file alone decides which characters it may have.

use std::fmt;

use coldrise_block::units::is_printable;
use coldrise_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Deserializer, Serialize};

use crate::MachineName;
use crate::name::MAX_NAME_BYTES;

/// Maximum length of a display name, in characters; at most 4 bytes each.
pub const MAX_DISPLAY_NAME_CHARS: usize = 255;

/// The display name of a machine: 1 to 255 printable characters, at least one of which is visible; no spaces at its ends and
/// none side by side.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct DisplayName(String);

impl DisplayName {
    /// Accepts a name that a person gave. Spaces at the ends are removed, and several in a row become one.
    ///
    /// # Errors
    /// `InvalidInput`, naming the allowed form.
    pub fn parse(text: &str) -> Result<DisplayName> {
        let is_allowed = text.chars().all(is_shown);
        let is_short = text.chars().count() <= MAX_DISPLAY_NAME_CHARS;
        DisplayName::clean(text).filter(|_| is_allowed && is_short).ok_or_else(|| {
            let shown: String = text.chars().take(80).collect();
            let text = match is_short {
                true => format!(
                    "{shown:?} is not a display name: use 1 to {MAX_DISPLAY_NAME_CHARS} printable characters, no \
                     control characters and none that change the direction of text"
                ),
                false => format!(
                    "the display name {shown:?}… is too long: use at most {MAX_DISPLAY_NAME_CHARS} characters"
                ),
            };
            Error::new(ErrorKind::InvalidInput, text)
        })
    }

    /// Makes a name from foreign text: removes what [`DisplayName::parse`] refuses, and cuts off what is too long.
    /// `None` if nothing visible remains.
    pub fn clean(text: &str) -> Option<DisplayName> {
        let spaced: String =
            text.chars().map(|c| if c.is_whitespace() { ' ' } else { c }).collect();
        let shown: String = spaced.chars().filter(|c| is_shown(*c)).collect();
        let mut words = String::with_capacity(shown.len().min(4 * MAX_DISPLAY_NAME_CHARS));
        for word in shown.split_ascii_whitespace() {
            if !words.is_empty() {
                words.push(' ');
            }
            words.push_str(word);
        }
        let cut: String = words.chars().take(MAX_DISPLAY_NAME_CHARS).collect();
        let cut = cut.trim_end();
        cut.chars().any(is_visible).then(|| DisplayName(cut.to_owned()))
    }

    /// The name, unless it is the machine's name itself.
    pub fn beside(self, machine: &MachineName) -> Option<DisplayName> {
        Some(self).filter(|name| name.0 != machine.as_str())
    }

    /// Reads a field of a stored document. The document stays readable with any text: characters that are not allowed are removed.
    ///
    /// # Errors
    /// The error of the format.
    pub fn read_stored<'de, D: Deserializer<'de>>(
        from: D,
    ) -> std::result::Result<Option<DisplayName>, D::Error> {
        Ok(Option::<String>::deserialize(from)?.and_then(|text| DisplayName::clean(&text)))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// A machine name that resembles it, such as `web-server-01` for `Web Server 01`. `None` if it has no letter or digit
    /// of ASCII.
    pub fn to_machine(&self) -> Option<MachineName> {
        let mut name = String::new();
        for c in self.0.chars() {
            let folded = plain_letters(c);
            if folded.is_empty() {
                if !name.is_empty() && !name.ends_with(['-', '.', '_']) {
                    name.push('-');
                }
                continue;
            }
            let is_mark = folded.starts_with(['-', '.', '_']);
            if !(is_mark && (name.is_empty() || name.ends_with(['-', '.', '_']))) {
                name.push_str(&folded);
            }
        }
        name.truncate(MAX_NAME_BYTES);
        MachineName::parse(name.trim_end_matches(['-', '.', '_'])).ok()
    }
}

/// The letters of machine names that stand for a character; empty if there are none.
fn plain_letters(c: char) -> String {
    match c {
        'a'..='z' | '0'..='9' | '.' | '_' | '-' => c.to_string(),
        'A'..='Z' => c.to_ascii_lowercase().to_string(),
        'ä' | 'Ä' | 'æ' | 'Æ' => "ae".to_owned(),
        'ö' | 'Ö' | 'œ' | 'Œ' => "oe".to_owned(),
        'ü' | 'Ü' => "ue".to_owned(),
        'ß' => "ss".to_owned(),
        'à'..='å' | 'À'..='Å' => "a".to_owned(),
        'è'..='ë' | 'È'..='Ë' => "e".to_owned(),
        'ì'..='ï' | 'Ì'..='Ï' => "i".to_owned(),
        'ò'..='õ' | 'ø' | 'Ò'..='Õ' | 'Ø' => "o".to_owned(),
        'ù'..='û' | 'Ù'..='Û' => "u".to_owned(),
        'ç' | 'Ç' => "c".to_owned(),
        'ñ' | 'Ñ' => "n".to_owned(),
        _ => String::new(),
    }
}

/// Whether a character may be in a display name. Those that a reader cannot see, but for the two that join letters, would make
/// two names look the same.
fn is_shown(c: char) -> bool {
    let is_hidden = matches!(
        u32::from(c),
        0xad | 0x34f | 0x61c | 0x115f | 0x1160 | 0x17b4 | 0x17b5 | 0x180b..=0x180f | 0x200b | 0x2060..=0x206f | 0x3164 | 0xfeff
            | 0xffa0 | 0xfff0..=0xffff | 0xe000..=0xf8ff | 0xe_0000..=0x10_ffff
    ) || u32::from(c) & 0xfffe == 0xfffe;
    is_printable(c) && !is_hidden
}

/// Whether a character leaves a trace by itself.
fn is_visible(c: char) -> bool {
    !c.is_whitespace()
        && !matches!(c, '\u{200c}' | '\u{200d}' | '\u{2800}' | '\u{300}'..='\u{36f}' | '\u{fe00}'..='\u{fe0f}')
}

impl std::str::FromStr for DisplayName {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        DisplayName::parse(text)
    }
}

impl From<DisplayName> for String {
    fn from(name: DisplayName) -> String {
        name.0
    }
}

impl fmt::Display for DisplayName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for DisplayName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printable_text_of_any_script_is_a_name() {
        for text in [
            "Web Server 01",
            "Datenbank Köln (neu)",
            "サーバー01",
            "خادم",
            "🖥 build",
            "<b>x</b>",
            "a\"'&",
            "می‌خواهم",
        ] {
            assert_eq!(DisplayName::parse(text).unwrap().as_str(), text);
        }
        assert_eq!(DisplayName::parse("  a \u{a0} b ").unwrap().as_str(), "a b");
        let longest = "🖥".repeat(MAX_DISPLAY_NAME_CHARS);
        assert_eq!(DisplayName::parse(&longest).unwrap().as_str().len(), 1020);
    }

    #[test]
    fn hostile_text_is_refused_from_people_and_stripped_elsewhere() {
        for (text, kept) in [
            ("a\nb", Some("a b")),
            ("a\0b", Some("ab")),
            ("\u{1b}[31mred\u{1b}]0;x\u{7}", Some("[31mred]0;x")),
            ("web\u{202e}10rs", Some("web10rs")),
            ("web\u{2066}\u{2069}\u{200e}\u{61c}", Some("web")),
            ("web\u{200b}01\u{feff}\u{ad}\u{e0041}", Some("web01")),
            ("web\u{2028}01", Some("web 01")),
            ("\u{9b}31m", Some("31m")),
            ("a\u{ffff}\u{e000}\u{1fffe}", Some("a")),
            ("\u{3164}", None),
            ("\u{200d}\u{fe0f}\u{300}", None),
            (" \t ", None),
            ("", None),
        ] {
            assert_eq!(
                DisplayName::clean(text).as_ref().map(DisplayName::as_str),
                kept,
                "{text:?}"
            );
            let refused = DisplayName::parse(text).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::InvalidInput, "{text:?}");
            assert!(refused.message().chars().all(is_printable), "{}", refused.message());
        }
        let long = "é".repeat(MAX_DISPLAY_NAME_CHARS + 1);
        assert!(DisplayName::parse(&long).is_err());
        assert_eq!(DisplayName::clean(&long).unwrap().as_str(), "é".repeat(MAX_DISPLAY_NAME_CHARS));
        // Cut at a space.
        let cut = DisplayName::clean(&format!("{} b", "a".repeat(254))).unwrap();
        assert_eq!(DisplayName::parse(cut.as_str()).unwrap(), cut);
    }

    #[test]
    fn a_machine_name_is_derived() {
        for (text, name) in [
            ("Web Server 01", Some("web-server-01")),
            ("Köln (alt)", Some("koeln-alt")),
            ("__x__", Some("x")),
            ("a / b", Some("a-b")),
            ("DB.example.COM", Some("db.example.com")),
            ("Crème Brûlée", Some("creme-brulee")),
            ("Live", None),
            ("サーバー", None),
        ] {
            let found = DisplayName::parse(text).unwrap().to_machine();
            assert_eq!(found.as_ref().map(MachineName::as_str), name, "{text}");
        }
        let long = DisplayName::parse(&"Long Name ".repeat(20)).unwrap().to_machine().unwrap();
        assert!(long.as_str().len() <= MAX_NAME_BYTES && !long.as_str().ends_with('-'));
    }

    #[test]
    fn a_stored_name_never_makes_a_document_unreadable() {
        #[derive(Deserialize)]
        struct Document {
            #[serde(default, deserialize_with = "DisplayName::read_stored")]
            name: Option<DisplayName>,
        }
        let read = |text: &str| {
            let document: Document = serde_json::from_str(text).unwrap();
            document.name.map(String::from)
        };
        assert_eq!(read("{}"), None);
        assert_eq!(read(r#"{"name": "a\u202eb"}"#), Some("ab".to_owned()));
        assert_eq!(read(r#"{"name": "\u0007"}"#), None);
    }
}
