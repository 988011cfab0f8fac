//! The contents of a run's files. Readers ignore fields that they do not know.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// What a run was asked to do. Contains no secrets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Plan {
    /// The command's words, such as `serve nbd`.
    pub command: String,
    /// The arguments of the process; see [`crate::redact_arguments`].
    pub arguments: Vec<String>,
    /// The repository's absolute path.
    pub repository: Option<String>,
    /// The machine, if the run is about one.
    pub machine: Option<String>,
    /// The restore point, if the run is about one, in the user's words (`latest`).
    pub point: Option<String>,
    /// Who started it.
    pub who: Who,
    /// When, in milliseconds since 1970.
    pub started_at_ms: u64,
    /// The job that wanted it, if the service started it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// The user of the API who asked for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested_by: Option<String>,
    /// Number of this attempt of the job; 0 if no job wanted it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub attempt: u32,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// The process of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Who {
    /// The effective user's id.
    pub uid: u32,
    /// Its name in /etc/passwd.
    pub user: Option<String>,
    /// The process id.
    pub pid: u32,
    /// The host's name.
    pub host: String,
    /// The host's boot id; it changes at each restart.
    pub boot_id: String,
}

impl Who {
    /// This process.
    pub fn this_process() -> Who {
        let line = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let uid = rustix::process::geteuid().as_raw();
        let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        let user = users.lines().find_map(|user| {
            let mut fields = user.split(':');
            let name = fields.next()?;
            (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_owned())
        });
        Who {
            uid,
            user,
            pid: std::process::id(),
            host: line("/proc/sys/kernel/hostname"),
            boot_id: line("/proc/sys/kernel/random/boot_id"),
        }
    }
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Outcome {
    /// The id of the run. After a power cut, the file could hold the bytes of another run's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// The exit code of the process.
    pub exit_code: u8,
    /// The error, if the run failed.
    pub error: Option<Failure>,
    /// The command's answer, as with `--json`.
    #[schema(value_type = Option<Object>)]
    pub counts: Option<Value>,
    /// When, in milliseconds since 1970.
    pub ended_at_ms: u64,
}

/// An error of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Failure {
    /// The word of the error's kind, such as `busy`.
    pub kind: String,
    /// The message for people.
    pub message: String,
}

/// One line of a log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LogLine {
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// `error`, `warn`, `info`, `debug` or `progress`.
    pub level: String,
    /// What happened.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
    /// The state of the work, at level `progress`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub progress: Option<Value>,
}

/// The state of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Its process holds the lock.
    Running,
    /// It ended with exit code 0.
    Ok,
    /// It ended with another exit code.
    Failed,
    /// It ended with the exit code of an interruption.
    Cancelled,
    /// It ended without a result.
    Lost,
}

impl State {
    /// The word for people and programs.
    pub fn word(self) -> &'static str {
        match self {
            State::Running => "running",
            State::Ok => "ok",
            State::Failed => "failed",
            State::Cancelled => "cancelled",
            State::Lost => "lost",
        }
    }
}

/// A run as its folder shows it.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct RunRecord {
    /// Its id, as text.
    pub id: String,
    /// Its state.
    pub state: State,
    /// What it was asked to do, if that is readable.
    pub plan: Option<Plan>,
    /// How it ended, if it did and that is readable.
    pub result: Option<Outcome>,
    /// When it ended, in milliseconds since 1970; absent while it runs. Of a lost run only the service knows when it was found lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at_ms: Option<u64>,
    /// The machine that it has booted, while that is on.
    pub machine: Option<MachineRecord>,
    /// The last progress in its log.
    #[schema(value_type = Option<Object>)]
    pub progress: Option<Value>,
    /// The damage of its files, and why it was lost.
    pub problems: Vec<String>,
}

/// What machine.json contains.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineRecord {
    /// The repository's absolute path.
    pub repository: String,
    /// The session that it runs on.
    pub session: String,
    /// Since when, in milliseconds since 1970.
    pub since_ms: u64,
    /// Its memory, in MiB.
    pub memory_mib: u64,
    /// Its processors.
    pub cpus: u32,
    /// `none`, `isolated` (not connected to any network) or `connected`.
    pub network: String,
    /// Whether it has a screen.
    pub has_screen: bool,
}
