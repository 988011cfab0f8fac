//! Patterns of machine names: `web*`, `db0?`. They decide what a link, a token or a job means.

use std::str::FromStr;

use coldrise_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Maximum length of a pattern, in bytes.
const MAX_BYTES: usize = 128;

/// A pattern: `*` stands for any text, `?` for one character.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(as = Pattern, value_type = String, pattern = "^[a-z0-9._*?-]{1,128}$", example = "web*")]
pub struct MachinePattern(String);

impl MachinePattern {
    /// The pattern for all machines.
    pub fn all() -> MachinePattern {
        MachinePattern("*".to_owned())
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it can match more than one name.
    pub fn has_wildcards(&self) -> bool {
        self.0.contains(['*', '?'])
    }

    /// Whether a machine's name matches.
    pub fn matches(&self, machine: &str) -> bool {
        matches_wildcards(&self.0, machine)
    }
}

/// Whether a text matches a pattern in which `*` stands for any text and `?` for one character.
pub fn matches_wildcards(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), text.chars().collect());
    let (mut p, mut n) = (0, 0);
    // Where to continue after the last star: its place, and the first character that it does not
    // stand for.
    let mut star: Option<(usize, usize)> = None;
    while n < text.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(c) if *c == '?' || *c == text[n] => {
                p += 1;
                n += 1;
            }
            _ => {
                let Some((at, taken)) = star else { return false };
                star = Some((at, taken + 1));
                p = at + 1;
                n = taken + 1;
            }
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

impl TryFrom<String> for MachinePattern {
    type Error = Error;

    fn try_from(text: String) -> Result<MachinePattern> {
        let is_allowed =
            |c: u8| matches!(c, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-' | b'*' | b'?');
        if text.is_empty() || text.len() > MAX_BYTES || !text.bytes().all(is_allowed) {
            let shown: String = text.chars().take(64).collect();
            let text = format!("{shown:?} is not a pattern of machine names, such as web* or db0?");
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        Ok(MachinePattern(text))
    }
}

impl FromStr for MachinePattern {
    type Err = Error;

    fn from_str(text: &str) -> Result<MachinePattern> {
        text.to_owned().try_into()
    }
}

impl From<MachinePattern> for String {
    fn from(pattern: MachinePattern) -> String {
        pattern.0
    }
}

#[cfg(test)]
mod tests {
    use super::MachinePattern;

    #[test]
    fn stars_and_question_marks() {
        let matches =
            |pattern: &str, name: &str| pattern.parse::<MachinePattern>().unwrap().matches(name);
        for (pattern, name) in
            [("*", "web01"), ("web*", "web"), ("w*b*1", "wxbyb01"), ("db0?", "db01"), ("a", "a")]
        {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("web", "web01"), ("?", ""), ("db0?", "db0"), ("*x", "web")] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
        // Linear in practice: no exponential time.
        assert!(!matches("*a*a*a*a*a*a*a*a*a*b", &"a".repeat(63)));
    }

    #[test]
    fn only_characters_of_names() {
        for text in ["", "Web", "a/b", "a b", "é", "[ab]"] {
            assert!(text.parse::<MachinePattern>().is_err(), "{text}");
        }
    }
}
