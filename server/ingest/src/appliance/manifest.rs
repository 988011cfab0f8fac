//! Manifests: digests of the files of an appliance.

use aws_lc_rs::digest::{Algorithm, Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256, SHA384, SHA512};
use coldrise_block::{Error, ErrorKind, Result};

/// Algorithms and their words. SHA-1 finds transmission errors, too; it is what older programs write.
const ALGORITHMS: [(&str, &Algorithm); 4] = [
    ("SHA1", &SHA1_FOR_LEGACY_USE_ONLY),
    ("SHA256", &SHA256),
    ("SHA384", &SHA384),
    ("SHA512", &SHA512),
];

/// The stated digest of a file.
pub(super) struct StatedDigest {
    pub(super) file: String,
    pub(super) algorithm: &'static Algorithm,
    hexadecimal: String,
}

impl StatedDigest {
    pub(super) fn is_of(&self, content: Context) -> bool {
        coldrise_block::hex::encode(content.finish().as_ref())
            .eq_ignore_ascii_case(&self.hexadecimal)
    }
}

/// Parses lines `SHA256(NAME)= DIGEST`.
///
/// # Errors
/// `InvalidInput` for another line.
pub(super) fn parse(text: &str) -> Result<Vec<StatedDigest>> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.map(|line| stated(line).ok_or_else(|| unknown(line))).collect()
}

fn unknown(line: &str) -> Error {
    let shown: String = line.escape_debug().take(100).collect();
    let text =
        format!("the line '{shown}' is not SHA1, SHA256, SHA384 or SHA512, (NAME)= and a digest");
    Error::new(ErrorKind::InvalidInput, text)
}

fn stated(line: &str) -> Option<StatedDigest> {
    let (word, rest) = line.split_once('(')?;
    let (file, digest) = rest.rsplit_once(')')?;
    let digest = digest.trim_start().strip_prefix('=')?.trim();
    let word = word.trim().replace('-', "");
    let (_, algorithm) = ALGORITHMS.iter().find(|(name, _)| word.eq_ignore_ascii_case(name))?;
    let is_whole = digest.len() == 2 * algorithm.output_len();
    (is_whole && digest.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| StatedDigest {
        file: file.strip_prefix("./").unwrap_or(file).to_owned(),
        algorithm,
        hexadecimal: digest.to_owned(),
    })
}

/// A line of a manifest, for a file with that SHA-256. Its length depends on the name only.
pub(crate) fn line(name: &str, sha256: &[u8]) -> String {
    format!("SHA256({name})= {}\n", coldrise_block::hex::encode(sha256))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifest_lines_of_several_programs_are_parsed() {
        let digest = "Da39a3ee5e6b4b0d3255bfef95601890afd80709";
        let lines = format!("SHA1(a (1).ovf)= {digest}\r\n\nSHA1 (b.vmdk) = {digest}\n");
        let stated = parse(&lines).unwrap();
        let files: Vec<_> = stated.iter().map(|digest| digest.file.as_str()).collect();
        assert_eq!(files, ["a (1).ovf", "b.vmdk"]);
        assert!(stated[0].is_of(Context::new(stated[0].algorithm)));
        for wrong in ["MD5(a)= 00", "SHA1(a)= 00", "SHA256(a) 00", "a"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(line("a", &[0xab; 32]).len(), line("a", &[0; 32]).len());
    }
}
