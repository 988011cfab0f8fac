//! Conditions that an administrator should know of, and how bad they are.

use serde::{Deserialize, Serialize};

/// What a condition or message is about.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, utoipa::ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Topic {
    /// A run failed: one of a job, or one that was asked for over the API.
    RunFailed,
    /// A run ended without a result: it was killed, or the host went down.
    RunLost,
    /// A run succeeded. Only targets that name this topic get it.
    RunSucceeded,
    /// The last good point of a machine is older than its limit.
    Age,
    /// A restore point does not boot, or reaches an earlier stage than usual.
    Boot,
    /// Restore points or sessions are lost or damaged.
    Damage,
    /// The file system of the repository fills up.
    Space,
    /// The repository cannot be read.
    Repository,
    /// A machine is in no job.
    Uncovered,
    /// Copies of a machine in another repository are further behind than their limit.
    Copies,
    /// A machine that a job follows while it runs elsewhere is behind its limit, or no process follows it.
    Lag,
    /// The host of a recovered machine cannot be reached.
    Host,
    /// A test of a target.
    Test,
}

/// How bad it is.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, utoipa::ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    /// Good to know.
    Info,
    /// Needs attention in the next days.
    Warn,
    /// Protection is lost or about to be.
    Fail,
}

impl Severity {
    /// The word for people, and the stored one.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Severity::Info => "info",
            Severity::Warn => "warn",
            Severity::Fail => "fail",
        }
    }
}

/// A condition. It is raised as an alarm while it holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub(crate) struct Condition {
    /// Its name, such as `age:web01`. Two conditions with one key are the same.
    pub(crate) key: String,
    pub(crate) topic: Topic,
    pub(crate) severity: Severity,
    /// The machine; absent if it is about none, several or all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) machine: Option<String>,
    /// The machines that damage affects.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) affects: Vec<String>,
    /// The run, if it is about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) run: Option<String>,
    /// What happened, in one line.
    pub(crate) summary: String,
    /// More about it, in lines.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) details: String,
    /// What to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) advice: Option<String>,
    /// A command line that does it or shows more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) command: Option<String>,
}

impl Condition {
    /// A condition about no machine, without details.
    pub(crate) fn new(
        key: impl Into<String>,
        topic: Topic,
        severity: Severity,
        summary: impl Into<String>,
    ) -> Condition {
        Condition {
            key: key.into(),
            topic,
            severity,
            machine: None,
            affects: Vec::new(),
            run: None,
            summary: summary.into(),
            details: String::new(),
            advice: None,
            command: None,
        }
    }

    /// The same about a machine.
    pub(crate) fn of_machine(mut self, machine: &str) -> Condition {
        self.machine = Some(machine.to_owned());
        self
    }

    /// The same with advice and a command line.
    pub(crate) fn advise(mut self, advice: &str, command: Option<String>) -> Condition {
        self.advice = Some(advice.to_owned());
        self.command = command;
        self
    }

    /// Whether it is about this machine, among others.
    pub(crate) fn is_about(&self, machine: &str) -> bool {
        self.machine.as_deref() == Some(machine) || self.affects.iter().any(|one| one == machine)
    }

    /// The address of its page, behind the service's own.
    pub(crate) fn page(&self) -> String {
        match (&self.run, &self.machine) {
            (Some(run), _) => format!("#/runs/{run}"),
            (None, _) if self.topic == Topic::Copies => "#/copies".to_owned(),
            (None, Some(machine)) => format!("#/machines/{machine}"),
            (None, None) if self.topic == Topic::Damage || self.topic == Topic::Space => {
                "#/repository".to_owned()
            }
            _ => "#/".to_owned(),
        }
    }
}
