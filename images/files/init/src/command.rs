//! Programs of the machine.

use std::io::{Error, Result};
use std::process::{Command, Output, Stdio};

/// Runs a program with that input. Its last line is the error's text.
pub(crate) fn run(command: Command, input: &[u8]) -> Result<()> {
    let done = output(command, input)?;
    match done.status.success() {
        true => Ok(()),
        false => Err(last_line(&done)),
    }
}

/// The output of a program.
pub(crate) fn output(mut command: Command, input: &[u8]) -> Result<Output> {
    use std::io::Write;
    command.env_clear().env("PATH", "/bin").env("LC_ALL", "C");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        let _ = stdin.write_all(input);
    }
    child.wait_with_output()
}

/// The last line that a program has said, as an error.
pub(crate) fn last_line(done: &Output) -> Error {
    let said = String::from_utf8_lossy(&done.stderr);
    let last = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it failed");
    Error::other(last.trim().to_owned())
}
