//! Commands of libvirt's program `virsh`.
//!
//! A call has a time limit and reads a bounded answer, because libvirtd may hang and passes on texts of hostile
//! guests. A killed virsh leaves no trace: libvirtd ends or finishes its request by itself. So callers ask
//! for the state after an error, and never conclude it from the error.

use std::hash::{BuildHasher, RandomState};
use std::io::{Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};

/// Maximum length of an answer, in bytes. A longer one is an error.
const MAX_ANSWER_BYTES: u64 = 4 << 20;
/// Maximum length of an error text, in characters.
const MAX_SHOWN_CHARS: usize = 600;
/// Interval of looking whether virsh has ended.
const INTERVAL: Duration = Duration::from_millis(5);
/// After this time the user gets a message about what the command waits for.
const SILENCE: Duration = Duration::from_secs(4);

/// Runs one command, which reads `input` from the file `/dev/stdin`, within `patience`.
pub(crate) fn run(
    uri: &str,
    words: &[String],
    input: Option<&str>,
    patience: Duration,
) -> Result<String> {
    let Output { status, answer, messages } = call(uri, words, input, patience)?;
    let name = words.first().map_or("", String::as_str);
    if !status.success() {
        let text = format!("virsh {name} failed: {}", shown(&messages));
        return Err(Error::new(ErrorKind::ToolFailed, text));
    }
    if answer.len() as u64 > MAX_ANSWER_BYTES {
        let text = format!("virsh {name} answers more than {MAX_ANSWER_BYTES} bytes");
        return Err(Error::new(ErrorKind::ToolFailed, text));
    }
    Ok(answer)
}

/// Runs commands that change nothing, each within `patience`. The results are in the order of the commands.
///
/// One virsh runs them all: most of the time of a short command is virsh's start. If that one reports any error, each command
/// runs by itself, so that each has its own result.
pub(crate) fn ask(uri: &str, commands: &[Vec<String>], patience: Duration) -> Vec<Result<String>> {
    let started = Instant::now();
    let (is_late, why) = match ask_together(uri, commands, patience) {
        Ok(Some(answers)) => return answers.into_iter().map(Ok).collect(),
        Ok(None) => (false, String::new()),
        Err(error) => (started.elapsed() >= patience, error.full_message()),
    };
    let result = |words: &Vec<String>| match is_late {
        // A libvirtd that hangs is not asked again.
        true => Err(Error::new(ErrorKind::ToolFailed, why.clone())),
        false => run(uri, words, None, patience),
    };
    commands.iter().map(result).collect()
}

/// The answers of all commands, if none of them wrote a message.
fn ask_together(
    uri: &str,
    commands: &[Vec<String>],
    patience: Duration,
) -> Result<Option<Vec<String>>> {
    if commands.len() < 2 {
        return Ok(None);
    }
    // A guest cannot have it in its texts: it does not know it.
    let mark = format!("coldrise-{:016x}", RandomState::new().hash_one(uri));
    let quoted: Vec<String> = commands.iter().map(|words| quoted(words)).collect();
    let script = quoted.join(&format!("; echo {mark}; "));
    let output = call(uri, &[script], None, patience)?;
    let is_whole = output.answer.len() as u64 <= MAX_ANSWER_BYTES;
    if !output.status.success() || !is_whole || !output.messages.trim().is_empty() {
        return Ok(None);
    }
    let answers = split(&output.answer, &mark);
    Ok((answers.len() == commands.len()).then_some(answers))
}

/// A command for virsh's own parser, which knows the quotes of a shell.
fn quoted(words: &[String]) -> String {
    let quoted = words.iter().map(|word| format!("'{}'", word.replace('\'', "'\\''")));
    quoted.collect::<Vec<_>>().join(" ")
}

/// The texts between the marks. virsh may end the line behind a mark or not.
fn split(text: &str, mark: &str) -> Vec<String> {
    let answers = text.split(mark);
    answers.map(|answer| answer.strip_prefix('\n').unwrap_or(answer).to_owned()).collect()
}

/// What virsh has written until its end.
struct Output {
    status: ExitStatus,
    /// One byte longer than allowed, at most.
    answer: String,
    messages: String,
}

fn call(uri: &str, words: &[String], input: Option<&str>, patience: Duration) -> Result<Output> {
    // Of several commands the first.
    let name = words.first().and_then(|word| word.split(';').next()).unwrap_or_default();
    let mut command = Command::new("virsh");
    command.args(["--quiet", "--connect", uri]).args(words);
    // Its messages are compared by people only; numbers and states are parsed.
    command.env("LC_ALL", "C").stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    tracing::debug!(?command, "asking libvirt");
    let mut child = command.spawn().map_err(|error| {
        let text = "starting virsh (Debian: apt install libvirt-clients)";
        Error::with_source(ErrorKind::ToolFailed, text, error)
    })?;
    let writer = child.stdin.take().zip(input).map(|(mut stdin, input)| {
        let input = input.to_owned();
        // If virsh ends without reading it, its error says more.
        std::thread::spawn(move || drop(stdin.write_all(input.as_bytes())))
    });
    let answer = child.stdout.take().map(read_bounded);
    let messages = child.stderr.take().map(read_bounded);
    let status = wait(&mut child, name, patience);
    if let Some(writer) = writer {
        let _ = writer.join();
    }
    let (answer, messages) = (joined(answer), joined(messages));
    Ok(Output { status: status?, answer, messages })
}

fn wait(child: &mut Child, name: &str, patience: Duration) -> Result<ExitStatus> {
    let waiting = || "waiting for virsh";
    let start = Instant::now();
    let mut is_said = false;
    loop {
        if let Some(status) = child.try_wait().context(waiting)? {
            return Ok(status);
        }
        let elapsed = start.elapsed();
        if elapsed >= patience {
            let _ = child.kill();
            child.wait().context(waiting)?;
            let text = format!("virsh {name} did not end within {} s", patience.as_secs());
            return Err(Error::new(ErrorKind::ToolFailed, text)
                .advise("look after libvirtd; it may still do what it was asked (virsh list)"));
        }
        if elapsed >= SILENCE && !is_said {
            is_said = true;
            let s = patience.as_secs();
            tracing::warn!("libvirt is slow: waiting for virsh {name}, for up to {s} s");
        }
        std::thread::sleep(INTERVAL);
    }
}

/// Reads to the end, and keeps one byte more than allowed.
fn read_bounded(mut from: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = (&mut from).take(MAX_ANSWER_BYTES + 1).read_to_end(&mut bytes);
        // The child must not block on a full pipe.
        let _ = std::io::copy(&mut from, &mut std::io::sink());
        bytes
    })
}

fn joined(reader: Option<JoinHandle<Vec<u8>>>) -> String {
    let bytes = reader.and_then(|reader| reader.join().ok()).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The beginning of virsh's messages on one line, without control characters.
fn shown(messages: &str) -> String {
    let lines = messages.lines().map(|line| line.trim_start_matches("error: ").trim());
    let text = lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ");
    text.chars().filter(|c| !c.is_control()).take(MAX_SHOWN_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::{quoted, shown, split};

    #[test]
    fn answers_of_several_commands_are_separated() {
        assert_eq!(split("a\nb\nMMc", "M"), ["a\nb\n", "", "c"]);
        assert_eq!(split("a\nM\nc\nM\n", "M"), ["a\n", "c\n", ""]);
        assert_eq!(split("", "M"), [""]);
        let words = ["dumpxml".to_owned(), "it's; \"x\"".to_owned()];
        assert_eq!(quoted(&words), r#"'dumpxml' 'it'\''s; "x"'"#);
    }

    #[test]
    fn messages_become_one_line() {
        let text = "error: Failed to create domain\nerror: unknown\u{1b}[2J OS type\n\n";
        assert_eq!(shown(text), "Failed to create domain; unknown[2J OS type");
    }
}
