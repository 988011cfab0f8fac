//! HTTPS to the service.

use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_https::Trust;
use coldrise_runs::RunId;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::invocation::Invocation;
use crate::report::Report;
use coldrise_hosting::signals::cancel_flag;

/// Time limit of one request. Statistics of a large repository take long.
const TIMEOUT: Duration = Duration::from_secs(600);
/// Interval of looking at a run.
pub(super) const INTERVAL: Duration = Duration::from_millis(250);
/// How long the service may be away while a run is followed, such as for its restart.
const AWAY: Duration = Duration::from_secs(60);
/// Maximum size of an answer, in bytes: the list of a million points.
const MAX_ANSWER_BYTES: u64 = 1 << 30;
const MAX_TOKEN_BYTES: u64 = 4096;

/// Where the service is, and how to be believed.
pub(crate) struct ServerOptions {
    pub(crate) url: String,
    pub(crate) token_file: Option<PathBuf>,
    pub(crate) certificate: Option<PathBuf>,
}

/// A connection to a service.
pub(super) struct Client {
    agent: ureq::Agent,
    base: String,
    token: String,
}

impl Client {
    /// Reads the token and the certificate.
    ///
    /// # Errors
    /// `InvalidInput` for a URL that is not https, or without a token file; errors of reading the files.
    pub(super) fn new(options: ServerOptions) -> Result<Client> {
        let invalid = |text: String| Error::new(ErrorKind::InvalidInput, text);
        if !options.url.starts_with("https://") {
            return Err(invalid(format!("--server {}: give https://HOST:PORT", options.url)));
        }
        let path = options.token_file.ok_or_else(|| {
            invalid("--server requires --token-file FILE, or COLDRISE_TOKEN_FILE".to_owned())
        })?;
        let mut token = String::new();
        std::fs::File::open(&path)
            .and_then(|file| file.take(MAX_TOKEN_BYTES).read_to_string(&mut token))
            .context(|| format!("reading the token in {}", path.display()))?;
        let trust = options.certificate.map_or(Trust::System, Trust::File);
        let agent = coldrise_https::agent(&trust, "--server-certificate", TIMEOUT)?;
        let base = format!("{}/api/v1/", options.url.trim_end_matches('/'));
        Ok(Client { agent, base, token: token.trim().to_owned() })
    }

    /// Reads a document.
    ///
    /// # Errors
    /// The service's own, with its kind; `Io` if it cannot be reached.
    pub(super) fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let request = self.agent.get(self.url(path)).header("authorization", self.bearer());
        self.read(request.call())
    }

    fn post<T: DeserializeOwned>(&self, path: &str, body: &Value, key: &str) -> Result<T> {
        let request = self.agent.post(self.url(path)).header("authorization", self.bearer());
        self.read(request.header("idempotency-key", key).send_json(body))
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    fn bearer(&self) -> String {
        format!("Bearer {}", self.token)
    }

    fn read<T: DeserializeOwned>(
        &self,
        answer: std::result::Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<T> {
        let away = |error: ureq::Error| {
            let text = format!("the service at {} cannot be reached: {error}", self.base);
            Error::new(ErrorKind::Io, text)
        };
        let mut answer = answer.map_err(away)?;
        let status = answer.status();
        let body = answer.body_mut().with_config().limit(MAX_ANSWER_BYTES).read_to_vec();
        let body = body.map_err(away)?;
        if status.is_success() {
            let body = if body.is_empty() { b"null".to_vec() } else { body };
            return serde_json::from_slice(&body).map_err(|error| {
                let text =
                    format!("{} sent an answer that this version does not expect", self.base);
                Error::with_source(ErrorKind::Unsupported, text, error)
            });
        }
        let problem: Value = serde_json::from_slice(&body).unwrap_or_default();
        let word = |name: &str| problem.get(name).and_then(Value::as_str);
        let kind = word("kind").and_then(ErrorKind::from_word).unwrap_or(ErrorKind::Io);
        let text = word("detail")
            .map_or_else(|| format!("{} answered {status}", self.base), str::to_owned);
        Err(Error::new(kind, text))
    }

    /// Cancels a run.
    ///
    /// # Errors
    /// `NotFound`; those of the service.
    pub(super) fn cancel(&self, id: &RunId) -> Result<()> {
        let path = format!("runs/{id}/cancel");
        self.post::<Value>(&path, &json!({}), &idempotency_key()?).map(|_| ())
    }

    /// Starts a run, follows it, and returns its answer. Ctrl-C cancels the run.
    ///
    /// # Errors
    /// The error of the run, with its kind.
    pub(super) fn run(&self, invocation: &Invocation, request: &Value) -> Result<Report> {
        let cancel = cancel_flag()?;
        let key = idempotency_key()?;
        let started: Value = self.post("runs", request, &key)?;
        let id: RunId = started.get("run").and_then(Value::as_str).unwrap_or_default().parse()?;
        invocation.remark(&format!("run {id}"));
        let (mut is_cancelled, mut away_for) = (false, Duration::ZERO);
        loop {
            if cancel.load(std::sync::atomic::Ordering::Relaxed) && !is_cancelled {
                is_cancelled = true;
                self.cancel(&id)?;
            }
            match self.get::<Value>(&format!("runs/{id}")) {
                Ok(run) if run.get("state").and_then(Value::as_str) != Some("running") => {
                    return ended(&id, &run);
                }
                Ok(run) => match serving(&id, &run).filter(|_| !is_cancelled) {
                    Some(report) => return Ok(report),
                    None => away_for = Duration::ZERO,
                },
                // It waits in the queue.
                Err(error) if error.kind() == ErrorKind::NotFound => away_for = Duration::ZERO,
                Err(error) if away_for > AWAY => {
                    return Err(
                        error.advise(format!("the run continues: coldrise runs show {id} there"))
                    );
                }
                Err(_) => away_for += INTERVAL,
            }
            std::thread::sleep(INTERVAL);
        }
    }
}

fn idempotency_key() -> Result<String> {
    let mut key = [0; 16];
    coldrise_store::random(&mut key)?;
    Ok(coldrise_block::hex::encode(&key))
}

/// The report of a run that serves a machine elsewhere, and needs no follower.
fn serving(id: &RunId, run: &Value) -> Option<Report> {
    let progress = run.get("progress")?;
    let word = |name: &str| progress.get(name).and_then(Value::as_str);
    let what = match word("phase")? {
        "serving" => {
            let (domain, session) = (word("domain")?, word("session")?);
            // Of vCenter and ESXi.
            let target = word("datastore").map_or("FOLDER", |_| "--to DATASTORE");
            format!(
                "{domain} runs there as session {session}\n  keep it     coldrise move live/{session} {target}\n  \
                 undo        coldrise recover live/{session} --undo"
            )
        }
        "attached" => format!("{} is attached as {}", word("address")?, word("name")?),
        _ => return None,
    };
    let mut answer = progress.clone();
    answer.as_object_mut()?.insert("run".to_owned(), json!(id.to_string()));
    Some(Report::answer(
        &answer,
        format!("{what}\nrun {id} serves its disks; to end that: coldrise runs cancel {id}"),
    ))
}

/// The report of a run that has ended.
fn ended(id: &RunId, run: &Value) -> Result<Report> {
    let state = run.get("state").and_then(Value::as_str).unwrap_or("lost");
    let result = run.get("result").filter(|result| !result.is_null());
    if let Some(error) = result.and_then(|result| result.get("error")).filter(|e| !e.is_null()) {
        let word = |name: &str| error.get(name).and_then(Value::as_str).unwrap_or_default();
        let kind = ErrorKind::from_word(word("kind")).unwrap_or(ErrorKind::Io);
        return Err(Error::new(kind, word("message").to_owned()));
    }
    let Some(result) = result else {
        let text = format!("run {id} is lost: it was killed, or its host went down");
        return Err(Error::new(ErrorKind::Io, text));
    };
    let counts = result.get("counts").cloned().unwrap_or_default();
    let mut report = Report::done(&counts, format!("run {id}: {state}\n{}", lines(&counts)));
    let code = result.get("exit_code").and_then(Value::as_u64).unwrap_or(1);
    report.exit_code = u8::try_from(code).unwrap_or(1);
    Ok(report)
}

/// The plain fields of an answer, a line each.
fn lines(counts: &Value) -> String {
    let fields = counts.as_object().into_iter().flatten();
    let plain =
        fields.filter(|(_, value)| !value.is_object() && !value.is_array() && !value.is_null());
    plain
        .map(|(name, value)| {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            format!("  {:<22} {text}\n", name.replace('_', " "))
        })
        .collect()
}
