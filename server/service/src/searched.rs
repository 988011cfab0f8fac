//! Text as searches and patterns compare it.

use icu_normalizer::ComposingNormalizerBorrowed;

/// The text in lower case, with composed characters (Unicode's form NFC): names from macOS have an accent as a character
/// of its own, and keyboards send it with its letter.
pub(crate) fn searched(text: &str) -> String {
    ComposingNormalizerBorrowed::new_nfc().normalize(&text.to_lowercase()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_and_composition_do_not_matter() {
        assert_eq!(searched("KO\u{308}LN"), "k\u{f6}ln");
        assert_eq!(searched("K\u{d6}ln"), "k\u{f6}ln");
        assert_ne!(searched("Koln"), searched("K\u{f6}ln"));
    }
}
