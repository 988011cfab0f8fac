//! Removes secrets from text that is stored.

/// Replaces user and password of every URI in `text`: `nbd://user:pw@host` becomes
/// `nbd://***@host`. The query of a URI and file names stay.
pub fn redact(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        clean.push_str(before);
        let word = after.find(|c: char| c.is_whitespace() || c == '"').unwrap_or(after.len());
        let (uri, behind) = after.split_at(word);
        match secret_bytes(uri) {
            0 => clean.push_str(uri),
            length => {
                clean.push_str("***");
                clean.push_str(uri.get(length..).unwrap_or_default());
            }
        }
        rest = behind;
    }
    clean.push_str(rest);
    clean
}

/// Length of the user information of a URI without its scheme, in bytes.
fn secret_bytes(uri: &str) -> usize {
    let authority = uri.split(['/', '?', '#']).next().unwrap_or_default();
    if let Some(end) = authority.rfind('@') {
        return end;
    }
    // A password with an unescaped slash: the text behind the colon is not a port.
    let port = authority.rsplit_once(':').map_or("", |(_, port)| port);
    if port.bytes().all(|byte| byte.is_ascii_digit()) || authority.ends_with(']') {
        return 0;
    }
    uri.rfind('@').unwrap_or(0)
}

/// The arguments of a command without secrets: [`redact`] on each, and the values of options
/// that run a command to get a passphrase, or that are one, are left out.
pub fn redact_arguments(words: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut is_secret = false;
    let mut clean = Vec::new();
    for word in words {
        if std::mem::take(&mut is_secret) {
            clean.push("***".to_owned());
            continue;
        }
        let (name, value) =
            word.split_once('=').map_or((word.as_str(), None), |(n, v)| (n, Some(v)));
        let is_named = name.starts_with("--") && !name.ends_with("-file");
        if is_named && (name.contains("passphrase") || name.contains("password")) {
            is_secret = value.is_none();
            clean.push(if is_secret { name.to_owned() } else { format!("{name}=***") });
        } else {
            clean.push(redact(&word));
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_passwords_of_uris_are_removed() {
        for (text, clean) in [
            ("vda=nbd://user:pw@host:10809/a", "vda=nbd://***@host:10809/a"),
            ("vda=nbds://u:p@ss@host/a b@c", "vda=nbds://***@host/a b@c"),
            ("nbd://u:p/w@host/x failed", "nbd://***@host/x failed"),
            ("nbd://[::1]:10809/pool@snap", "nbd://[::1]:10809/pool@snap"),
            ("nbd://[::1]/pool@snap", "nbd://[::1]/pool@snap"),
            ("nbd+unix:///x?socket=/run/a@b", "nbd+unix:///x?socket=/run/a@b"),
            ("\"nbd://a:b@c\" and nbd://d@e", "\"nbd://***@c\" and nbd://***@e"),
            ("é:// ://", "é:// ://"),
        ] {
            assert_eq!(redact(text), clean, "{text}");
        }
    }

    #[test]
    fn values_of_secret_options_are_removed() {
        let words = [
            "--passphrase-command",
            "echo x",
            "--from-passphrase-command=echo y",
            "--passphrase-file",
            "/etc/p",
            "--passphrase-file=/etc/q",
            "vda=nbd://a:b@c/",
        ];
        assert_eq!(
            redact_arguments(words.map(str::to_owned)),
            [
                "--passphrase-command",
                "***",
                "--from-passphrase-command=***",
                "--passphrase-file",
                "/etc/p",
                "--passphrase-file=/etc/q",
                "vda=nbd://***@c/"
            ]
        );
    }
}
