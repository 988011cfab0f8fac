//! Mail: through a mail server, or the host's sendmail program.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};
use lettre::message::header::{ContentTransferEncoding, ContentType};
use lettre::message::{Mailbox, SinglePart};
use lettre::transport::smtp::authentication::Credentials;
use lettre::transport::smtp::client::{Tls, TlsParameters};
use lettre::{SmtpTransport, Transport};
use serde::{Deserialize, Serialize};

use super::bounded_relay;
use super::host::{check_host, is_loopback, plain_host};
use super::message::Message;
use super::secret_file::{check_name, secret};
use crate::invalid::invalid;

/// Time limit of each answer of a mail server.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of recipients.
const MAX_RECIPIENTS: usize = 50;

/// The encryption of a connection to a mail server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Encryption {
    /// TLS from the first byte, usually on port 465.
    Tls,
    /// STARTTLS, usually on port 587 or 25. A server without it gets no mail.
    Starttls,
    /// None: on this host only, or with `allow_plain`.
    None,
}

/// Mail through a mail server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SmtpTarget {
    #[schema(max_length = 253)]
    host: String,
    #[serde(deserialize_with = "port")]
    #[schema(minimum = 1, maximum = 65535)]
    port: u16,
    encryption: Encryption,
    /// Allow `none` to other hosts: everyone on the way can read mail and password.
    #[serde(default)]
    allow_plain: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    /// The password. It is never returned; absent in a change, the stored one stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    password: Option<String>,
    /// In place of `password`: the name of a file in the folder `secrets` of the service's state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    password_file: Option<String>,
    /// The sender's address.
    from: String,
    #[schema(min_items = 1, max_items = 50)]
    to: Vec<String>,
}

/// Mail through /usr/sbin/sendmail.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SendmailTarget {
    /// The sender's address.
    from: String,
    #[schema(min_items = 1, max_items = 50)]
    to: Vec<String>,
}

fn port<'de, D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<u16, D::Error> {
    let given = serde_json::Value::deserialize(deserializer)?;
    let port = given.as_u64().and_then(|port| u16::try_from(port).ok()).filter(|port| *port > 0);
    port.ok_or_else(|| serde::de::Error::custom("port: give 1 to 65535, usually 587"))
}

fn mailbox(address: &str) -> Result<Mailbox> {
    let shown: String = address.chars().take(100).collect();
    let is_plain = !address.chars().any(char::is_control);
    let parsed = address.parse::<Mailbox>().ok().filter(|_| is_plain);
    parsed.ok_or_else(|| invalid(format!("{shown:?} is not a mail address")))
}

fn check_addresses(from: &str, to: &[String]) -> Result<()> {
    if to.is_empty() || to.len() > MAX_RECIPIENTS {
        return Err(invalid(format!("to: give 1 to {MAX_RECIPIENTS} addresses")));
    }
    mailbox(from)?;
    to.iter().try_for_each(|address| mailbox(address).map(drop))
}

/// The mail of a message.
fn mail(message: &Message, from: &str, to: &[String]) -> Result<lettre::Message> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let sent = std::time::SystemTime::UNIX_EPOCH
        + Duration::from_millis(u64::try_from(message.at_ms).unwrap_or(0));
    let mut builder = lettre::Message::builder()
        .from(mailbox(from)?)
        .subject(message.subject())
        .date(sent)
        // The same in every repetition: mail programs show it once.
        .message_id(Some(format!("<{}@{}.coldrise>", message.id, host.trim())));
    for address in to {
        builder = builder.to(mailbox(address)?);
    }
    // 7-bit: every server takes it.
    let text = SinglePart::builder()
        .header(ContentType::TEXT_PLAIN)
        .header(ContentTransferEncoding::QuotedPrintable)
        .body(message.text());
    builder
        .singlepart(text)
        .map_err(|error| invalid(format!("the mail cannot be composed: {error}")))
}

impl SmtpTarget {
    pub(super) fn check(&self) -> Result<()> {
        check_addresses(&self.from, &self.to)?;
        check_host("host", &self.host)?;
        self.password_file.as_deref().map_or(Ok(()), check_name)?;
        if self.encryption == Encryption::None && !self.allow_plain && !is_loopback(&self.host) {
            let text = format!("without encryption everyone on the way to {} can read", self.host);
            return Err(invalid(text).advise("take starttls or tls, or set allow_plain"));
        }
        if self.user.is_none() && (self.password.is_some() || self.password_file.is_some()) {
            return Err(invalid("a password needs a user"));
        }
        Ok(())
    }

    pub(super) fn redacted(&self) -> SmtpTarget {
        SmtpTarget { password: None, ..self.clone() }
    }

    /// A password stays with its server only: else a change of the host would send it elsewhere.
    pub(super) fn with_secrets_of(self, old: &SmtpTarget) -> SmtpTarget {
        let is_same = (&self.host, self.port, &self.user) == (&old.host, old.port, &old.user);
        let stays = is_same && self.password.is_none() && self.password_file.is_none();
        let password = if stays { old.password.clone() } else { self.password };
        SmtpTarget { password, ..self }
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The server's answer, or the reason why it could not be reached.
    pub(super) fn send(&self, message: &Message, state: &Path) -> Result<()> {
        let mail = mail(message, &self.from, &self.to)?;
        let server = format!("the mail server {}:{}", self.host, self.port);
        let failed = |error: lettre::transport::smtp::Error| {
            Error::with_source(ErrorKind::Io, server.clone(), error)
        };
        let host = plain_host(&self.host);
        let tls = || TlsParameters::new(host.clone()).map_err(failed);
        let tls = match self.encryption {
            Encryption::Tls => Tls::Wrapper(tls()?),
            Encryption::Starttls => Tls::Required(tls()?),
            Encryption::None => Tls::None,
        };
        let password = secret(state, self.password_file.as_deref(), self.password.as_deref())?;
        let relay = bounded_relay::start(&host, self.port, TIMEOUT);
        let relay = relay.map_err(|error| error.context(server.clone()))?;
        let mut builder = SmtpTransport::builder_dangerous("127.0.0.1")
            .port(relay)
            .timeout(Some(TIMEOUT))
            .tls(tls);
        if let Some(user) = &self.user {
            let password = password.unwrap_or_default();
            builder = builder.credentials(Credentials::new(user.clone(), password));
        }
        builder.build().send(&mail).map(drop).map_err(failed)
    }
}

impl SendmailTarget {
    pub(super) fn check(&self) -> Result<()> {
        check_addresses(&self.from, &self.to)
    }

    /// Sends a message with `program`.
    ///
    /// # Errors
    /// `ToolFailed` with its last words.
    pub(super) fn send(&self, message: &Message, program: &Path) -> Result<()> {
        let mail = mail(message, &self.from, &self.to)?;
        let what = || format!("running {}", program.display());
        let mut words = tempfile::tempfile().context(what)?;
        let mut command = Command::new(program);
        command.args(["-i", "-f"]).arg::<&str>(mailbox(&self.from)?.email.as_ref()).arg("--");
        for address in &self.to {
            command.arg::<&str>(mailbox(address)?.email.as_ref());
        }
        command
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::piped())
            .stdout(words.try_clone().context(what)?)
            .stderr(words.try_clone().context(what)?);
        let mut child = command.spawn().context(what)?;
        let written = match child.stdin.take() {
            Some(mut input) => input.write_all(&mail.formatted()),
            None => Ok(()),
        };
        let status = wait(&mut child, TIMEOUT * 3).context(what)?;
        let mut said = String::new();
        std::io::Seek::rewind(&mut words).context(what)?;
        let _ = words.take(500).read_to_string(&mut said);
        match status {
            Some(status) if status.success() => written.context(what),
            Some(status) => {
                let text = format!("{} ended with {status}: {}", program.display(), said.trim());
                Err(Error::new(ErrorKind::ToolFailed, text))
            }
            None => {
                let text = format!("{} did not end in time", program.display());
                Err(Error::new(ErrorKind::ToolFailed, text))
            }
        }
    }
}

/// Waits for a child, and kills it when the time is over.
fn wait(
    child: &mut std::process::Child,
    limit: Duration,
) -> std::io::Result<Option<std::process::ExitStatus>> {
    let deadline = std::time::Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if std::time::Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
