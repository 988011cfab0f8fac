//! The patterns by which a job means machines: of their names, or of their display names.
//!
//! What a token or a link allows is a pattern of names alone: a display name is not unique, and its machine's owner
//! chooses it.

use coldrise_block::{Error, Result};
use coldrise_inventory::matches_wildcards;
use coldrise_store::{DisplayName, MachineName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::searched::searched;

/// A pattern of a job: `*` stands for any text, `?` for one character. It matches a machine's name, or its display name in any
/// case.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String, pattern = "^.{1,255}$", example = "web*")]
pub(crate) struct JobPattern(String);

/// The names by which jobs find a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MachineNames {
    /// The name that addresses it.
    pub(crate) machine: String,
    /// Its display name.
    pub(crate) display_name: Option<String>,
    /// libvirt's name for it, where that is another one.
    pub(crate) domain: Option<String>,
    /// Its session; for jobs of kind protect-live.
    pub(crate) session: Option<String>,
}

impl MachineNames {
    /// A machine without further names.
    pub(crate) fn of(machine: &str) -> MachineNames {
        MachineNames { machine: machine.to_owned(), ..MachineNames::default() }
    }
}

impl JobPattern {
    /// The pattern for all machines.
    pub(crate) fn all() -> JobPattern {
        JobPattern("*".to_owned())
    }

    /// The text.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it can match more than one name.
    pub(crate) fn has_wildcards(&self) -> bool {
        self.0.contains(['*', '?'])
    }

    /// The name of the only machine that it can mean, unless it is a display name.
    pub(crate) fn machine(&self) -> Option<MachineName> {
        MachineName::parse(&self.0).ok()
    }

    /// The name under which a backup stores the machine that it names; `None` for a pattern.
    pub(crate) fn stored_as(&self) -> Option<MachineName> {
        let named = Some(&self.0).filter(|_| !self.has_wildcards())?;
        self.machine().or_else(|| DisplayName::parse(named).ok()?.to_machine())
    }

    /// Whether it matches one of a machine's names.
    pub(crate) fn matches(&self, names: &MachineNames) -> bool {
        let pattern = searched(&self.0);
        let mut others = names.display_name.iter().chain(&names.domain);
        matches_wildcards(&self.0, &names.machine)
            || others.any(|other| matches_wildcards(&pattern, &searched(other)))
    }
}

/// Whether any of the patterns matches.
pub(crate) fn any_matches(patterns: &[JobPattern], names: &MachineNames) -> bool {
    patterns.iter().any(|pattern| pattern.matches(names))
}

/// The machines that are named, and are to be backed up though they may be unknown: under which name each is stored, and
/// what it is called.
pub(super) fn named<'a>(
    patterns: &'a [JobPattern],
    known: &'a [MachineNames],
) -> impl Iterator<Item = (String, &'a str)> {
    let is_unknown = |pattern: &&JobPattern| {
        pattern.machine().is_some() || !known.iter().any(|names| pattern.matches(names))
    };
    let named = patterns.iter().filter(is_unknown);
    named.filter_map(|pattern| Some((pattern.stored_as()?.to_string(), pattern.as_str())))
}

impl TryFrom<String> for JobPattern {
    type Error = Error;

    fn try_from(text: String) -> Result<JobPattern> {
        Ok(JobPattern(DisplayName::parse(&text)?.into()))
    }
}

impl From<JobPattern> for String {
    fn from(pattern: JobPattern) -> String {
        pattern.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> JobPattern {
        text.to_owned().try_into().unwrap()
    }

    #[test]
    fn a_pattern_matches_either_name() {
        let names = MachineNames {
            machine: "vm17".to_owned(),
            display_name: Some("Web Server 01 (Köln)".to_owned()),
            domain: Some("WEB 1".to_owned()),
            session: None,
        };
        for text in
            ["vm17", "vm*", "Web*", "web server ?? (KÖLN)", "*köln*", "*ko\u{308}ln*", "*", "web 1"]
        {
            assert!(pattern(text).matches(&names), "{text}");
        }
        for text in ["VM17", "web", "web?", "Web Server 1*", "db*"] {
            assert!(!pattern(text).matches(&names), "{text}");
        }
        assert!(
            !pattern("Web*").matches(&MachineNames::of("web01")),
            "names of machines have a case"
        );
    }

    #[test]
    fn hostile_patterns_are_refused() {
        for text in ["", " ", "a\nb", "a\u{202e}", "\u{1b}[2J", &"x".repeat(256)] {
            assert!(JobPattern::try_from(text.to_owned()).is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_named_machine_that_is_unknown_is_stored_under_a_derived_name() {
        let patterns = [pattern("web01"), pattern("Web Server 01"), pattern("Web*")];
        let found = |known: &[MachineNames]| {
            named(&patterns, known)
                .map(|(machine, text)| format!("{machine}={text}"))
                .collect::<Vec<_>>()
        };
        assert_eq!(found(&[]), ["web01=web01", "web-server-01=Web Server 01"]);
        let known = MachineNames {
            display_name: Some("Web Server 01".to_owned()),
            ..MachineNames::of("vm17")
        };
        assert_eq!(found(&[known]), ["web01=web01"]);
    }
}
