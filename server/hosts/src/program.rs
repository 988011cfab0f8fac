//! The program that is copied to a host, and the shell's words that start it there.

use std::env::consts::ARCH;
use std::path::PathBuf;

use aws_lc_rs::digest::{SHA256, digest};
use coldrise_block::{Context, Error, ErrorKind, Result, hex};

/// Beside this program, or in the folder of its libraries.
const NAME: &str = "coldrise-host";

/// The program of this server's processor, and its SHA-256.
pub(crate) struct Program {
    pub(crate) content: Vec<u8>,
    hash: String,
}

impl Program {
    pub(crate) fn find() -> Result<Program> {
        let own = std::env::current_exe().context(|| "finding this program")?;
        let folder = own.parent().unwrap_or(&own).to_owned();
        let libraries = folder.join("../lib");
        let places: [PathBuf; 3] = [
            folder.join(NAME),
            libraries.join("coldrise").join(NAME),
            libraries.join(format!("{ARCH}-linux-gnu/coldrise")).join(NAME),
        ];
        let found = places.iter().find(|path| path.is_file()).ok_or_else(|| {
            let text = format!(
                "{NAME}, which is copied to hosts, is neither in {} nor in ../lib",
                folder.display()
            );
            Error::new(ErrorKind::ToolFailed, text)
                .advise("make build, or install the package again")
        })?;
        let content = std::fs::read(found).context(|| format!("reading {}", found.display()))?;
        let hash = hex::encode(digest(&SHA256, &content).as_ref());
        Ok(Program { content, hash })
    }

    /// The words for the login shell there. They look for the program by its hash, ask for it if it is absent, and become it.
    /// Their answers are lines that begin with `coldrise `; see [`Step`].
    pub(crate) fn words(&self) -> String {
        let (hash, size) = (&self.hash, self.content.len());
        // Where a package of the host has it.
        let packaged = format!("/usr/lib/{ARCH}-linux-gnu/coldrise/{NAME}");
        // One line without ' for any shell. The file is complete before it has its name.
        let script = format!(
            "has() {{ [ -f \"$1\" ] && [ \"$(sha256sum < \"$1\" | cut -c 1-64)\" = {hash} ]; }}; \
             d=\"${{XDG_CACHE_HOME:-$HOME/.cache}}/coldrise\"; p=\"$d/{NAME}-{hash:.16}\"; \
             if has {packaged}; then p={packaged}; else \
             umask 077; mkdir -p \"$d\" || {{ echo \"coldrise failed mkdir $d\"; exit 1; }}; \
             [ -O \"$d/.\" ] && [ -z \"$(find \"$d/.\" -prune -perm /022)\" ] || {{ echo \"coldrise failed trust $d\"; exit 1; }}; \
             if ! has \"$p\"; then \
             t=\"$p.$$\"; trap \"rm -f \\\"$t\\\"\" EXIT; echo \"coldrise absent $(uname -m)\"; \
             head -c {size} > \"$t\" && chmod 700 \"$t\" && has \"$t\" && mv -f \"$t\" \"$p\" \
             || {{ echo \"coldrise failed write $d\"; exit 1; }}; fi; fi; \
             \"$p\" --version > /dev/null 2>&1 || {{ echo \"coldrise failed exec $p\"; exit 1; }}; \
             echo \"coldrise ready $p\"; exec \"$p\" serve"
        );
        format!("exec sh -c '{script}'")
    }
}

/// A line of the words.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The program is to be sent; the host has this processor.
    Absent(String),
    /// It runs from this path.
    Ready(String),
    /// It cannot be stored or run.
    Failed(&'static str, String),
}

impl Step {
    /// `None` for a line of the login shell itself.
    pub(crate) fn parse(line: &str) -> Option<Step> {
        let (word, rest) = line.trim_end().strip_prefix("coldrise ")?.split_once(' ')?;
        let rest: String = rest.chars().filter(|c| !c.is_control()).take(300).collect();
        match (word, rest.split_once(' ')) {
            ("absent", _) => Some(Step::Absent(rest)),
            ("ready", _) => Some(Step::Ready(rest)),
            ("failed", Some(("mkdir", path))) => {
                Some(Step::Failed("make the folder", path.to_owned()))
            }
            ("failed", Some(("trust", path))) => Some(Step::Failed("trust", path.to_owned())),
            ("failed", Some(("write", path))) => Some(Step::Failed("write to", path.to_owned())),
            ("failed", Some(("exec", path))) => Some(Step::Failed("run", path.to_owned())),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_login_shell_are_passed_over() {
        assert_eq!(Step::parse("Welcome to hv1\n"), None);
        assert_eq!(Step::parse("coldrise absent aarch64\n"), Some(Step::Absent("aarch64".into())));
        assert_eq!(Step::parse("coldrise ready /a b\n"), Some(Step::Ready("/a b".into())));
        assert_eq!(Step::parse("coldrise failed exec /x"), Some(Step::Failed("run", "/x".into())));
        assert_eq!(Step::parse("coldrise failed"), None);
    }

    #[test]
    fn the_remote_command_is_one_line_with_one_pair_of_quotes() {
        let program = Program { content: vec![0; 7], hash: "ab".repeat(32) };
        assert_eq!(program.words().matches('\'').count(), 2);
        assert!(!program.words().contains('\n'));
    }
}
