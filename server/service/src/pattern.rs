//! Lists of patterns of machine names. They decide what a token may see and where messages go.

use coldrise_block::{Error, ErrorKind, Result};
pub(crate) use coldrise_inventory::MachinePattern as Pattern;

/// Maximum number of patterns in a list.
const MAX_PATTERNS: usize = 256;

/// Whether any of the patterns matches.
pub(crate) fn any_matches(patterns: &[Pattern], machine: &str) -> bool {
    patterns.iter().any(|pattern| pattern.matches(machine))
}

/// Checks the length of a list of patterns that a caller gave.
///
/// # Errors
/// `InvalidInput` if it is empty or too long.
pub(crate) fn check_list<T>(patterns: &[T]) -> Result<()> {
    if patterns.is_empty() || patterns.len() > MAX_PATTERNS {
        let text = format!("machines: give 1 to {MAX_PATTERNS} patterns; [\"*\"] is all machines");
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    Ok(())
}
