//! Patterns of machine names: `web*`, `db0?`. They decide what a token may see and a job backs up.

use coldrise_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// Maximum length of a pattern, in bytes.
const MAX_BYTES: usize = 128;
/// Maximum number of patterns in a list.
const MAX_PATTERNS: usize = 256;

/// A pattern: `*` stands for any text, `?` for one character.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String, pattern = "^[a-z0-9._*?-]{1,128}$", example = "web*")]
pub(crate) struct Pattern(String);

impl Pattern {
    /// The pattern for all machines.
    pub(crate) fn all() -> Pattern {
        Pattern("*".to_owned())
    }

    /// The text.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it can match more than one name.
    pub(crate) fn has_wildcards(&self) -> bool {
        self.0.contains(['*', '?'])
    }

    /// Whether a machine's name matches.
    pub(crate) fn matches(&self, machine: &str) -> bool {
        let (pattern, name) = (self.0.as_bytes(), machine.as_bytes());
        let (mut p, mut n) = (0, 0);
        // Where to go on after the last star: its place, and the first character that it does not
        // stand for.
        let mut star: Option<(usize, usize)> = None;
        while n < name.len() {
            match pattern.get(p) {
                Some(b'*') => {
                    star = Some((p, n));
                    p += 1;
                }
                Some(c) if *c == b'?' || *c == name[n] => {
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
        pattern[p..].iter().all(|c| *c == b'*')
    }
}

impl TryFrom<String> for Pattern {
    type Error = Error;

    fn try_from(text: String) -> Result<Pattern> {
        let is_allowed =
            |c: u8| matches!(c, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-' | b'*' | b'?');
        if text.is_empty() || text.len() > MAX_BYTES || !text.bytes().all(is_allowed) {
            let shown: String = text.chars().take(64).collect();
            let text = format!("{shown:?} is no pattern of machine names, such as web* or db0?");
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        Ok(Pattern(text))
    }
}

impl From<Pattern> for String {
    fn from(pattern: Pattern) -> String {
        pattern.0
    }
}

/// Whether any of the patterns matches.
pub(crate) fn any_matches(patterns: &[Pattern], machine: &str) -> bool {
    patterns.iter().any(|pattern| pattern.matches(machine))
}

/// Checks the length of a list of patterns that a caller gave.
///
/// # Errors
/// `InvalidInput` if it is empty or too long.
pub(crate) fn check_list(patterns: &[Pattern]) -> Result<()> {
    if patterns.is_empty() || patterns.len() > MAX_PATTERNS {
        let text = format!("machines: give 1 to {MAX_PATTERNS} patterns; [\"*\"] is all machines");
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::Pattern;

    #[test]
    fn stars_and_question_marks() {
        let matches = |pattern: &str, name: &str| {
            Pattern::try_from(pattern.to_owned()).unwrap().matches(name)
        };
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
            assert!(Pattern::try_from(text.to_owned()).is_err(), "{text}");
        }
    }
}
