//! Tasks of the server: followed by polling, each with a time limit.

use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};

use super::Steps;
use super::client::Client;
use super::soap::{Answer, Reference, child, child_text, element, objects, shown, task_fault};

/// The first interval of asking; it doubles up to the longest.
const FIRST_INTERVAL: Duration = Duration::from_millis(20);
const LONGEST_INTERVAL: Duration = Duration::from_millis(500);

/// What to do while a task runs.
pub(super) trait Watch {
    /// Called with each progress, in percent.
    ///
    /// # Errors
    /// Ends the waiting, not the task.
    fn look(&mut self, client: &Client<'_>, percent: u64) -> Result<()>;
}

/// Only waits, until the user cancels.
pub(super) struct Patience<'a>(pub(super) &'a Steps<'a>);

impl Watch for Patience<'_> {
    fn look(&mut self, _client: &Client<'_>, _percent: u64) -> Result<()> {
        self.0.check_cancelled()
    }
}

/// Waits for a task. Returns the reference that is its result, if it has one.
///
/// # Errors
/// The task's own, named `what`; `Incomplete` if it does not end in time: it keeps running; those of `watch`.
pub(super) fn await_end(
    client: &Client<'_>,
    task: &Reference,
    what: &str,
    limit: Duration,
    watch: &mut dyn Watch,
) -> Result<Option<Reference>> {
    let (started, mut interval) = (Instant::now(), FIRST_INTERVAL);
    loop {
        let answer = client.properties(std::slice::from_ref(task), &["info"])?;
        let state = state(&answer, what)?;
        match state {
            TaskState::Done(result) => return Ok(result),
            TaskState::Running(percent) => watch.look(client, percent)?,
        }
        if started.elapsed() > limit {
            let text = format!("{what} has not ended after {} s; it continues", limit.as_secs());
            return Err(Error::new(ErrorKind::Incomplete, text)
                .advise("look at the tasks of the machine in the vSphere client"));
        }
        std::thread::sleep(interval);
        interval = (interval * 2).min(LONGEST_INTERVAL);
    }
}

enum TaskState {
    Running(u64),
    Done(Option<Reference>),
}

fn state(answer: &Answer, what: &str) -> Result<TaskState> {
    let document = answer.document()?;
    let info = objects(&document).next().and_then(|found| found.value("info"));
    let missing = || Error::new(ErrorKind::NotFound, format!("the task of {what} is gone"));
    let info = info.ok_or_else(missing)?;
    match child_text(info, "state").unwrap_or_default() {
        "success" => Ok(TaskState::Done(child(info, "result").and_then(Reference::of))),
        "error" => Err(match child(info, "error") {
            Some(error) => task_fault(what, error),
            None => Error::new(ErrorKind::ToolFailed, format!("{what} failed")),
        }),
        _ => {
            let percent = child_text(info, "progress").and_then(|text| text.parse().ok());
            Ok(TaskState::Running(percent.unwrap_or(0).min(100)))
        }
    }
}

/// The running tasks of an object whose kind contains `word`, in lower case; all for an empty word.
///
/// # Errors
/// As [`Client::call`].
pub(super) fn running(
    client: &Client<'_>,
    object: &Reference,
    word: &str,
) -> Result<Vec<Reference>> {
    let answer = client.properties(std::slice::from_ref(object), &["recentTask"])?;
    let document = answer.document()?;
    let tasks = objects(&document).next().map(|found| found.references("recentTask"));
    let mut running = Vec::new();
    for task in tasks.unwrap_or_default() {
        // Old tasks are forgotten.
        let Ok(answer) = client.properties(std::slice::from_ref(&task), &["info"]) else {
            continue;
        };
        let document = answer.document()?;
        let Some(info) = objects(&document).next().and_then(|found| found.value("info")) else {
            continue;
        };
        let kind = child_text(info, "descriptionId").unwrap_or_default().to_ascii_lowercase();
        let is_running = matches!(child_text(info, "state"), Some("running" | "queued"));
        if is_running && kind.contains(word) {
            running.push(task);
        }
    }
    Ok(running)
}

/// The answer to a question that a machine asks before it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Identity {
    /// "I moved it": the machine keeps its UUID and network addresses.
    Kept,
    /// "I copied it": it gets new ones.
    New,
    /// Do not start.
    Cancelled,
}

/// Answers the question whether the machine was moved or copied. Tells of others once.
pub(super) struct Questions<'a> {
    machine: &'a Reference,
    identity: Identity,
    steps: &'a Steps<'a>,
    reported: Option<String>,
}

impl<'a> Questions<'a> {
    pub(super) fn new(
        machine: &'a Reference,
        identity: Identity,
        steps: &'a Steps<'a>,
    ) -> Questions<'a> {
        Questions { machine, identity, steps, reported: None }
    }
}

impl Watch for Questions<'_> {
    fn look(&mut self, client: &Client<'_>, _percent: u64) -> Result<()> {
        self.steps.check_cancelled()?;
        let answer =
            client.properties(std::slice::from_ref(self.machine), &["runtime.question"])?;
        let document = answer.document()?;
        let found = objects(&document).next().and_then(|found| found.value("runtime.question"));
        let Some(question) = found else { return Ok(()) };
        let id = child_text(question, "id").unwrap_or_default();
        let text = child_text(question, "text").unwrap_or_default();
        let words = match self.identity {
            Identity::Kept => "moved",
            Identity::New => "copied",
            Identity::Cancelled => "cancel",
        };
        let choices = child(question, "choice").into_iter().flat_map(|choice| choice.children());
        let choices = choices.filter(|node| node.tag_name().name() == "choiceInfo");
        let has_words = |node: &roxmltree::Node<'_, '_>| {
            ["label", "summary"].iter().any(|name| {
                let text = child_text(*node, name).unwrap_or_default().to_ascii_lowercase();
                // The client underlines a letter: I _moved it.
                text.replace('_', "").contains(words)
            })
        };
        let is_about_identity = question
            .descendants()
            .any(|node| node.text().is_some_and(|text| text.contains("msg.uuid.altered")));
        let key = choices.clone().find(has_words).and_then(|choice| child_text(choice, "key"));
        if let Some(key) = key.filter(|_| is_about_identity || self.identity == Identity::Cancelled)
        {
            let body = format!("{}{}", element("questionId", id), element("answerChoice", key));
            // Someone else may have answered it meanwhile.
            return match client.call("AnswerVM", self.machine, &body) {
                Err(error) if error.kind() != ErrorKind::Io => {
                    tracing::warn!("{}", error.full_message());
                    Ok(())
                }
                answered => answered.map(drop),
            };
        }
        if self.reported.as_deref() != Some(id) {
            self.reported = Some(id.to_owned());
            let text = shown(text);
            (self.steps.tell)(&format!(
                "the machine asks, answer it in the vSphere client: {text}"
            ));
        }
        Ok(())
    }
}
