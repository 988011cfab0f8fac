//! The user's own check of a booted machine: a command on this host.

use std::io::{ErrorKind as IoErrorKind, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStderr, Command, Stdio};

use coldrise_block::end_with_this_thread;
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::serial_log::SerialLog;

/// Exit codes of a shell that could not run the command.
const NOT_RUN: [i32; 2] = [126, 127];
/// Bytes taken from its messages at once.
const MAX_READ_BYTES: u64 = 64 << 10;

/// The command and its environment.
#[derive(Clone, Debug)]
pub struct OwnCheck {
    /// For `sh -c`.
    pub text: String,
    /// The names and values of its environment.
    pub environment: Vec<(&'static str, String)>,
}

/// The answer of an own check.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Passed,
    /// With its last message.
    Failed(String),
    /// It says nothing about the machine, because it could not run.
    Unknown(String),
}

/// A running command. Dropping it ends it, with all processes of its group.
pub(super) struct RunningCheck {
    child: Child,
    messages: ChildStderr,
    log: SerialLog,
}

impl RunningCheck {
    /// # Errors
    /// The reason why it cannot be started.
    pub(super) fn start(check: &OwnCheck) -> Result<RunningCheck, String> {
        let mut command = Command::new("sh");
        end_with_this_thread(&mut command, Signal::KILL);
        command.arg("-c").arg(&check.text).envs(check.environment.iter().cloned());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn().map_err(|error| error.to_string())?;
        let messages = child.stderr.take().ok_or("it has no messages")?;
        // Its children can hold this open for longer than it lives.
        fcntl_setfl(&messages, OFlags::NONBLOCK).map_err(|error| error.to_string())?;
        Ok(RunningCheck { child, messages, log: SerialLog::default() })
    }

    /// The answer, once it has ended.
    pub(super) fn poll(&mut self) -> Option<Answer> {
        // Asked first: then all its messages are there.
        let ended = self.child.try_wait();
        self.read_messages();
        let status = match ended {
            Ok(None) => return None,
            Ok(Some(status)) => status,
            Err(error) => return Some(Answer::Unknown(error.to_string())),
        };
        let message = self.log.tail(1).pop().unwrap_or_else(|| "no message".to_owned());
        Some(match status.code() {
            Some(0) => Answer::Passed,
            Some(code) if NOT_RUN.contains(&code) => Answer::Unknown(message),
            Some(code) => Answer::Failed(format!("{message} (exit code {code})")),
            None => Answer::Unknown(format!("signal {}", status.signal().unwrap_or(0))),
        })
    }

    fn read_messages(&mut self) {
        let mut bytes = Vec::new();
        match (&mut self.messages).take(MAX_READ_BYTES).read_to_end(&mut bytes) {
            Err(error) if error.kind() != IoErrorKind::WouldBlock => {}
            _ => self.log.feed(&bytes, |_| {}),
        }
    }
}

impl Drop for RunningCheck {
    fn drop(&mut self) {
        let group = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let _ = group.map(|group| kill_process_group(group, Signal::KILL));
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn answer(text: &str) -> Answer {
        let environment = vec![("COLDRISE_PORT", "4711".to_owned())];
        let mut running =
            RunningCheck::start(&OwnCheck { text: text.to_owned(), environment }).unwrap();
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            if let Some(answer) = running.poll() {
                return answer;
            }
            assert!(Instant::now() < until, "{text} does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn the_exit_code_is_the_answer() {
        assert_eq!(answer("exit 0"), Answer::Passed);
        let said =
            answer("echo first >&2; printf 'no \\033[1mdatabase at %s' $COLDRISE_PORT >&2; exit 3");
        assert_eq!(said, Answer::Failed("no database at 4711 (exit code 3)".to_owned()));
        for text in ["/no/such/program", "kill -9 $$"] {
            assert!(matches!(answer(text), Answer::Unknown(_)), "{text}");
        }
        // Messages without end do not hold it up.
        let flood = "head -c 10000000 /dev/zero | tr '\\0' '\\n' >&2; echo last >&2; exit 1";
        assert_eq!(answer(flood), Answer::Failed("last (exit code 1)".to_owned()));
    }

    #[test]
    fn its_group_ends_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pid");
        let text = format!("sleep 1000 & echo $! >{0}.new; mv {0}.new {0}; wait", path.display());
        let running = RunningCheck::start(&OwnCheck { text, environment: Vec::new() }).unwrap();
        let until = Instant::now() + Duration::from_secs(30);
        while !path.exists() {
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(5));
        }
        let sleeper = std::fs::read_to_string(&path).unwrap();
        drop(running);
        let status = format!("/proc/{}/stat", sleeper.trim());
        let lives = || std::fs::read_to_string(&status).is_ok_and(|text| !text.contains(") Z "));
        while lives() {
            assert!(Instant::now() < until, "the child of the command lives");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
