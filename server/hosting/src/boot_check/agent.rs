//! Asks the guest agent of a machine whether it answers, over a virtio port.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::machine::read_available;

/// A question without an answer is asked again after this time.
const ASK_INTERVAL: Duration = Duration::from_secs(3);
/// Longer answers are skipped.
const MAX_ANSWER_BYTES: usize = 4096;

/// The conversation: `guest-sync` with a number that the agent has to repeat, then `guest-ping`.
pub(super) struct Agent {
    stream: UnixStream,
    /// Whether a program in the machine holds the port open.
    is_open: bool,
    /// The number of the last first question.
    number: u64,
    is_synchronized: bool,
    next_question: Instant,
    pending: Vec<u8>,
}

impl Agent {
    /// `stream` does not block.
    pub(super) fn new(stream: UnixStream) -> Agent {
        Agent {
            stream,
            is_open: false,
            number: 0,
            is_synchronized: false,
            next_question: Instant::now(),
            pending: Vec::new(),
        }
    }

    /// A program in the machine has opened or closed the port.
    pub(super) fn set_open(&mut self, is_open: bool) {
        self.is_open = is_open;
        self.is_synchronized = false;
        self.next_question = Instant::now();
    }

    /// Asks, and reads answers. True if the agent has answered both questions.
    pub(super) fn poll(&mut self) -> bool {
        for byte in read_available(&mut self.stream) {
            // An agent can put 0xff before an answer.
            if byte == b'\n' || byte == 0xff {
                let line = std::mem::take(&mut self.pending);
                if self.hear(&line) {
                    return true;
                }
            } else if self.pending.len() < MAX_ANSWER_BYTES {
                self.pending.push(byte);
            }
        }
        if self.is_open && Instant::now() >= self.next_question {
            if !self.is_synchronized {
                self.number += 1;
            }
            self.ask();
        }
        false
    }

    /// Whether this is the answer to the second question.
    fn hear(&mut self, line: &[u8]) -> bool {
        let answer: Value = serde_json::from_slice(line).unwrap_or_default();
        if self.is_synchronized {
            return answer["return"].as_object().is_some_and(serde_json::Map::is_empty);
        }
        // On a slow host the answer to an earlier question may come after the next one.
        if answer["return"].as_u64().is_some_and(|number| (1..=self.number).contains(&number)) {
            self.is_synchronized = true;
            self.ask();
        }
        false
    }

    /// A port that takes nothing is asked again later.
    fn ask(&mut self) {
        let question = match self.is_synchronized {
            true => json!({ "execute": "guest-ping" }),
            false => json!({ "execute": "guest-sync", "arguments": { "id": self.number } }),
        };
        let _ = self.stream.write_all(format!("{question}\n").as_bytes());
        self.next_question = Instant::now() + ASK_INTERVAL;
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};

    use super::*;

    fn agent() -> (Agent, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (Agent::new(ours), theirs)
    }

    #[test]
    fn an_agent_must_answer_sync_and_ping() {
        let (mut agent, mut machine) = agent();
        assert!(!agent.poll());
        agent.set_open(true);
        assert!(!agent.poll());
        let mut questions = BufReader::new(machine.try_clone().unwrap()).lines();
        assert!(questions.next().unwrap().unwrap().contains("guest-sync"));
        // Not the number, no JSON, too long: none is an answer.
        machine.write_all(b"{\"return\":{}}\n{\"return\":7}\nhello\n").unwrap();
        machine.write_all(&[b'x'; 2 * MAX_ANSWER_BYTES]).unwrap();
        assert!(!agent.poll() && agent.pending.len() <= MAX_ANSWER_BYTES);
        machine.write_all(b"\n\xff{\"return\": 1}\n").unwrap();
        assert!(!agent.poll());
        assert!(questions.next().unwrap().unwrap().contains("guest-ping"));
        machine.write_all(b"{\"error\":{}}\n").unwrap();
        assert!(!agent.poll());
        machine.write_all(b"{\"return\": {}}\n").unwrap();
        assert!(agent.poll());
    }

    #[test]
    fn a_closed_port_is_not_asked() {
        let (mut agent, machine) = agent();
        machine.set_nonblocking(true).unwrap();
        agent.set_open(true);
        agent.set_open(false);
        assert!(!agent.poll());
        assert!(BufReader::new(machine).lines().next().unwrap().is_err());
    }
}
