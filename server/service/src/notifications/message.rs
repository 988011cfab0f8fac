//! Messages: what a target gets, as text and as JSON.

use coldrise_block::Result;
use serde::{Deserialize, Serialize};

use super::condition::{Condition, Severity, Topic};
use crate::access::random_id;

/// Maximum length of a subject, in characters.
const MAX_SUBJECT_CHARS: usize = 200;
/// Maximum length of a text, in characters.
const MAX_TEXT_CHARS: usize = 16_000;

/// Why a message is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Occasion {
    /// An alarm was raised, or became worse.
    Raised,
    /// An alarm still holds, and is not acknowledged.
    Reminder,
    /// An alarm was cleared.
    Cleared,
    /// Something happened, once.
    Event,
}

/// A message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Message {
    /// Equal in every copy of the message: a receiver can tell repetitions.
    pub(crate) id: String,
    pub(crate) at_ms: i64,
    pub(crate) occasion: Occasion,
    #[serde(flatten)]
    pub(crate) condition: Condition,
    /// The page about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) link: Option<String>,
    /// Of a digest: the messages in it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) messages: Vec<Message>,
}

impl Message {
    /// A message about a condition. `base` is the address of the service's page, ending in `/`.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub(crate) fn new(
        condition: &Condition,
        occasion: Occasion,
        at_ms: i64,
        base: &str,
    ) -> Result<Message> {
        Ok(Message {
            id: random_id()?,
            at_ms,
            occasion,
            condition: condition.clone(),
            link: Some(format!("{base}{}", condition.page())),
            messages: Vec::new(),
        })
    }

    /// One message in place of many, which are in it.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub(crate) fn digest(messages: Vec<Message>, at_ms: i64) -> Result<Message> {
        let worst = messages.iter().max_by_key(|message| message.severity());
        let worst = worst.map_or(Severity::Info, Message::severity);
        let topic = messages.first().map_or(Topic::Test, |message| message.condition.topic);
        let summary = format!("{} messages", messages.len());
        let mut condition = Condition::new("digest", topic, worst, summary);
        condition.details =
            messages.iter().map(|message| format!("{}\n", message.subject())).collect();
        let link = messages.first().and_then(|message| message.link.as_deref());
        let link = link.and_then(|link| Some(format!("{}#/", link.split_once("#/")?.0)));
        Ok(Message {
            id: random_id()?,
            at_ms,
            occasion: Occasion::Event,
            condition,
            link,
            messages,
        })
    }

    /// How bad it is. Good news is never bad.
    pub(crate) fn severity(&self) -> Severity {
        match self.occasion {
            Occasion::Cleared => Severity::Info,
            _ => self.condition.severity,
        }
    }

    /// One line.
    pub(crate) fn subject(&self) -> String {
        let word = match self.occasion {
            Occasion::Cleared => "cleared",
            Occasion::Reminder => "still",
            _ => self.condition.severity.word(),
        };
        let line = format!("[Coldrise] {word}: {}", self.condition.summary);
        let line = line.chars().map(|c| if c.is_control() { ' ' } else { c });
        line.take(MAX_SUBJECT_CHARS).collect()
    }

    /// What happened, where, what to do, the command line, the link.
    pub(crate) fn text(&self) -> String {
        let condition = &self.condition;
        let line = |name: &str, value: &Option<String>| {
            value.as_ref().map_or_else(String::new, |value| format!("{name}{value}\n"))
        };
        let place = line("Machine: ", &condition.machine) + &line("Run:     ", &condition.run);
        let remedy = match self.occasion {
            Occasion::Cleared => String::new(),
            _ => line("To do:   ", &condition.advice) + &line("Command: ", &condition.command),
        };
        let link = self.link.clone().unwrap_or_default();
        let blocks = [&condition.summary, &condition.details, &place, &remedy, &link];
        let blocks: Vec<&str> =
            blocks.into_iter().map(|block| block.trim_end()).filter(|b| !b.is_empty()).collect();
        let text = blocks.join("\n\n");
        let kept = text.chars().filter(|c| *c == '\n' || !c.is_control());
        kept.take(MAX_TEXT_CHARS).collect()
    }

    /// All fields, for programs.
    pub(crate) fn json(&self) -> serde_json::Value {
        let mut value = serde_json::to_value(self).unwrap_or_default();
        if let Some(fields) = value.as_object_mut() {
            fields.insert("service".into(), "coldrise".into());
            fields.insert("subject".into(), self.subject().into());
            fields.insert("text".into(), self.text().into());
        }
        value
    }
}

#[cfg(test)]
mod tests {
    use super::{Message, Occasion};
    use crate::notifications::condition::{Condition, Severity, Topic};

    fn message(summary: &str, occasion: Occasion) -> Message {
        let condition = Condition::new("age:web01", Topic::Age, Severity::Fail, summary)
            .of_machine("web01")
            .advise("start a backup", Some("coldrise backup web01".into()));
        Message::new(&condition, occasion, 0, "https://backup.example:8480/").unwrap()
    }

    #[test]
    fn a_subject_is_one_line() {
        let message = message("no backup\r\nBcc: other@example.org", Occasion::Raised);
        assert_eq!(message.subject(), "[Coldrise] fail: no backup  Bcc: other@example.org");
        assert!(message.text().contains("https://backup.example:8480/#/machines/web01"));
        assert!(message.text().contains("Command: coldrise backup web01"));
    }

    #[test]
    fn a_cleared_alarm_is_information_without_a_command() {
        let message = message("no backup for 2 days", Occasion::Cleared);
        assert_eq!(message.subject(), "[Coldrise] cleared: no backup for 2 days");
        assert!(!message.text().contains("Command"));
        assert_eq!(message.severity(), Severity::Info);
    }

    #[test]
    fn a_digest_names_all() {
        let all: Vec<_> = (0..30).map(|n| message(&format!("m{n}"), Occasion::Raised)).collect();
        let digest = Message::digest(all, 0).unwrap();
        assert_eq!(digest.subject(), "[Coldrise] fail: 30 messages");
        assert!(digest.text().contains("fail: m29"));
        assert_eq!(digest.json()["messages"].as_array().unwrap().len(), 30);
    }
}
