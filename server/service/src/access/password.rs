//! Passwords: argon2id with 19 MiB and two passes, the recommendation of OWASP.

use argon2::Argon2;
use argon2::password_hash::{PasswordHash, PasswordHasher, PasswordVerifier, SaltString};
use coldrise_block::{Error, ErrorKind, Result};
use parking_lot::Mutex;

/// Bounds of a password's length, in bytes.
const MIN_BYTES: usize = 10;
const MAX_BYTES: usize = 1024;

/// One at a time: each takes 19 MiB, and a crowd of logins must not take all memory.
static TURN: Mutex<()> = Mutex::new(());

/// Checks the length of a new password.
///
/// # Errors
/// `InvalidInput` if it is too short or too long.
pub(crate) fn check_password(password: &str) -> Result<()> {
    if password.len() < MIN_BYTES || password.len() > MAX_BYTES {
        let text = format!("a password has {MIN_BYTES} to {MAX_BYTES} bytes");
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    Ok(())
}

/// The hash to store, in PHC format.
///
/// # Errors
/// `InvalidInput` if the password is too short or too long.
pub(super) fn hash(password: &str) -> Result<String> {
    check_password(password)?;
    let mut salt = [0; 16];
    coldrise_store::random(&mut salt)?;
    let hashed = || {
        let salt = SaltString::encode_b64(&salt)?;
        Argon2::default().hash_password(password.as_bytes(), &salt).map(|hash| hash.to_string())
    };
    let _turn = TURN.lock();
    hashed().map_err(|error| Error::new(ErrorKind::Internal, format!("hashing failed: {error}")))
}

/// Whether the password belongs to the hash. Without a hash (an unknown user) it takes as long, and
/// is `false`.
pub(super) fn is_right(password: &str, stored: Option<&str>) -> bool {
    /// Of no password: the same parameters as [`hash`].
    const NOBODY: &str = "$argon2id$v=19$m=19456,t=2,p=1$AAAAAAAAAAAAAAAAAAAAAA\
        $AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
    if password.len() > MAX_BYTES {
        return false;
    }
    let parsed = PasswordHash::new(stored.unwrap_or(NOBODY));
    let _turn = TURN.lock();
    let is_right = parsed
        .is_ok_and(|hash| Argon2::default().verify_password(password.as_bytes(), &hash).is_ok());
    is_right && stored.is_some()
}

#[cfg(test)]
mod tests {
    use super::{hash, is_right};

    #[test]
    fn only_the_right_password_opens() {
        let stored = hash("correct horse").unwrap();
        assert!(stored.starts_with("$argon2id$v=19$m=19456,t=2,p=1$"), "{stored}");
        assert!(is_right("correct horse", Some(&stored)));
        assert!(!is_right("correct horsf", Some(&stored)));
        assert!(!is_right("correct horse", Some("damaged")));
        assert!(hash("short").is_err());
        assert_ne!(stored, hash("correct horse").unwrap(), "the salt is random");
    }

    #[test]
    fn an_unknown_user_takes_as_long() {
        assert!(!is_right("anything at all", None));
        // It computes a hash: parsing the constant succeeds.
        let nobody = argon2::password_hash::PasswordHash::new(
            "$argon2id$v=19$m=19456,t=2,p=1$AAAAAAAAAAAAAAAAAAAAAA$AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
        );
        assert!(nobody.is_ok_and(|hash| hash.hash.is_some()));
    }
}
