//! Addresses of stores, and the full names of objects there.

use coldrise_block::{Error, ErrorKind, Result};
use object_store::path::Path;

/// S3's limit of a full name, with the prefix.
const MOST_NAME_BYTES: usize = 1024;

const FORM: &str = "write s3://BUCKET or s3://BUCKET/PREFIX";

/// A bucket, and a prefix of all names in it.
#[derive(Debug)]
pub(crate) struct Address {
    pub(crate) bucket: String,
    /// Empty, or ends with a slash.
    prefix: String,
    /// For messages.
    pub(crate) text: String,
}

impl Address {
    /// Errors: `InvalidInput`.
    pub(crate) fn parse(url: &str) -> Result<Self> {
        let refused = |why: &str| {
            Err(Error::new(ErrorKind::InvalidInput, format!("{url}: {why}")).advise(FORM))
        };
        let Some(rest) = url.strip_prefix("s3://") else {
            return refused("not an address of an S3 store");
        };
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        if bucket.is_empty() || bucket.len() > 255 || !bucket.chars().all(is_allowed) {
            return refused("the name of the bucket is not valid");
        }
        let prefix = prefix.trim_matches('/');
        if prefix.contains(['?', '#']) || exact_path(prefix).is_none() {
            return refused("the prefix is not valid");
        }
        let (text, prefix) = match prefix {
            "" => (format!("s3://{bucket}"), String::new()),
            _ => (format!("s3://{bucket}/{prefix}"), format!("{prefix}/")),
        };
        Ok(Address { bucket: bucket.to_owned(), prefix, text })
    }

    /// The path of an object. Errors: `InvalidInput`, `NameTooLong`.
    pub(crate) fn path_of(&self, name: &str) -> Result<Path> {
        let full = format!("{}{name}", self.prefix);
        if full.len() > MOST_NAME_BYTES {
            let text = format!("the name of the object {name} is too long with its prefix");
            return Err(Error::new(ErrorKind::NameTooLong, text));
        }
        let path = exact_path(&full).filter(|_| !name.is_empty());
        path.ok_or_else(|| {
            Error::new(ErrorKind::InvalidInput, format!("{name:?} is not a name of an object"))
        })
    }

    /// The full prefix of a list.
    pub(crate) fn full_prefix(&self, prefix: &str) -> String {
        format!("{}{prefix}", self.prefix)
    }

    /// The name of an object, from its path.
    pub(crate) fn name_of<'a>(&self, path: &'a Path) -> Option<&'a str> {
        path.as_ref().strip_prefix(self.prefix.as_str()).filter(|name| !name.is_empty())
    }
}

/// The path whose text is exactly this: object_store would change some others.
fn exact_path(text: &str) -> Option<Path> {
    Path::parse(text).ok().filter(|path| path.as_ref() == text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_below_the_prefix() {
        for (url, text, full) in [
            ("s3://vault", "s3://vault", "packs/01"),
            ("s3://vault/", "s3://vault", "packs/01"),
            ("s3://vault/site/a/", "s3://vault/site/a", "site/a/packs/01"),
        ] {
            let address = Address::parse(url).unwrap();
            assert_eq!((address.bucket.as_str(), address.text.as_str()), ("vault", text));
            let path = address.path_of("packs/01").unwrap();
            assert_eq!(path.as_ref(), full);
            assert_eq!(address.name_of(&path), Some("packs/01"));
        }
        let address = Address::parse("s3://vault/site").unwrap();
        assert_eq!(address.name_of(&Path::parse("sitemap").unwrap()), None);
        assert_eq!(address.full_prefix("packs/"), "site/packs/");
    }

    #[test]
    fn invalid_s3_addresses_and_object_names_are_refused() {
        for url in
            ["vault", "s3://", "s3:///a", "https://vault", "s3://key:secret@vault", "s3://v/a//b"]
        {
            let error = Address::parse(url).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{url}");
            assert!(error.full_message().ends_with(FORM), "{error:?}");
        }
        let address = Address::parse("s3://vault/site").unwrap();
        for name in ["", "/a", "a/", "a//b", "../a", "a/./b"] {
            assert_eq!(
                address.path_of(name).unwrap_err().kind(),
                ErrorKind::InvalidInput,
                "{name}"
            );
        }
        let error = address.path_of(&"n".repeat(1020)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NameTooLong);
    }
}
