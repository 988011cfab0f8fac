//! Webhooks: one HTTP POST per message.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use serde_json::json;
use ureq::http::Uri;
use ureq::tls::{Certificate, RootCerts, TlsConfig};

use super::condition::Severity;
use super::host::{check_host, is_loopback};
use super::message::{Message, Occasion};
use super::secret_file::{check_name, secret};
use crate::invalid::invalid;

/// Time limit of a whole request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// This much of an answer is read, in bytes.
const MAX_ANSWER_BYTES: u64 = 300;
/// In place of the secret part of an address.
const HIDDEN: &str = "/***";

/// The form of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Template {
    /// JSON with all fields of the message.
    Generic,
    /// `{"text": …}`, which Slack, Mattermost and Rocket.Chat take. The path of the address is secret.
    Slack,
    /// Text with headers; the address is that of the topic.
    Ntfy,
    /// JSON with title, message and priority; the address ends in `/message`.
    Gotify,
}

/// A webhook.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WebhookTarget {
    /// `https://…`. For Slack the path is returned as `***`; a change with that keeps the stored one.
    #[schema(max_length = 2000)]
    url: String,
    template: Template,
    /// Allow `http://` to other hosts: everyone on the way can read messages and token.
    #[serde(default)]
    allow_http: bool,
    /// A token: `Authorization: Bearer`, for Gotify `X-Gotify-Key`. It is never returned; absent in
    /// a change, the stored one stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    token: Option<String>,
    /// In place of `token`: the name of a file in the folder `secrets` of the service's state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    token_file: Option<String>,
}

/// Scheme, host and port: what an address shows without its path.
fn origin(url: &str) -> Option<String> {
    let uri: Uri = url.parse().ok()?;
    Some(format!("{}://{}", uri.scheme_str()?, uri.authority()?))
}

impl WebhookTarget {
    pub(super) fn check(&self) -> Result<()> {
        let uri = self.url.parse::<Uri>().ok().filter(|_| self.url.len() <= 2000);
        let parts = uri.as_ref().and_then(|uri| Some((uri.scheme_str()?, uri.authority()?)));
        let Some((scheme, authority)) = parts else {
            return Err(invalid("url: give an address such as https://hooks.example/path"));
        };
        if authority.as_str().contains('@') {
            return Err(invalid("url: put user and password into token, not into the address"));
        }
        check_host("url", authority.host())?;
        // Digits only: as a number, a sign would be taken, too.
        let port = authority.as_str().strip_prefix(authority.host()).unwrap_or_default();
        let is_number = |port: &str| port.bytes().all(|digit| digit.is_ascii_digit());
        let is_port =
            |port: &str| is_number(port) && port.parse::<u16>().is_ok_and(|port| port > 0);
        if !port.is_empty() && !port.strip_prefix(':').is_some_and(is_port) {
            return Err(invalid("url: a port is a number from 1 to 65535"));
        }
        match scheme {
            "https" => {}
            "http" if self.allow_http || is_loopback(authority.host()) => {}
            "http" => {
                let text = format!("everyone on the way to {} can read http", authority.host());
                return Err(invalid(text).advise("take https, or set allow_http"));
            }
            _ => return Err(invalid("url: only https and http are known")),
        }
        self.token_file.as_deref().map_or(Ok(()), check_name)
    }

    pub(super) fn redacted(&self) -> WebhookTarget {
        let url = match self.template {
            Template::Slack => format!("{}{HIDDEN}", origin(&self.url).unwrap_or_default()),
            _ => self.url.clone(),
        };
        WebhookTarget { url, token: None, ..self.clone() }
    }

    /// Secrets stay with their server only: else a change of the address would send them elsewhere.
    pub(super) fn with_secrets_of(mut self, old: &WebhookTarget) -> WebhookTarget {
        if origin(&self.url) == origin(&old.url) {
            if self.url.ends_with(HIDDEN) {
                self.url.clone_from(&old.url);
            }
            if self.token.is_none() && self.token_file.is_none() {
                self.token.clone_from(&old.token);
            }
        }
        self
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The server's answer, or the reason why it could not be reached. Redirects are errors.
    pub(super) fn send(&self, message: &Message, state: &Path) -> Result<()> {
        let token = secret(state, self.token_file.as_deref(), self.token.as_deref())?;
        let request = agent().post(&self.url);
        let request = match (&token, self.template) {
            (Some(token), Template::Gotify) => request.header("X-Gotify-Key", token),
            (Some(token), _) => request.header("Authorization", format!("Bearer {token}")),
            (None, _) => request,
        };
        let sent = match self.template {
            Template::Generic => request.send_json(message.json()),
            Template::Slack => request.send_json(json!({ "text": slack_text(message) })),
            Template::Gotify => request.send_json(json!({
                "title": message.subject(),
                "message": message.text(),
                "priority": gotify_priority(message),
            })),
            Template::Ntfy => {
                let click = message.link.clone().unwrap_or_default();
                request
                    .header("Title", ascii(&message.subject()))
                    .header("Priority", ntfy_priority(message))
                    .header("Click", ascii(&click))
                    .send(message.text())
            }
        };
        let place = origin(&self.url).unwrap_or_default();
        let mut answer =
            sent.map_err(|error| Error::new(ErrorKind::Io, format!("{place}: {error}")))?;
        let status = answer.status();
        if status.is_success() {
            return Ok(());
        }
        let mut said = Vec::new();
        let _ = answer.body_mut().as_reader().take(MAX_ANSWER_BYTES).read_to_end(&mut said);
        let said: String = String::from_utf8_lossy(&said)
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        let why = if status.is_redirection() { " (redirects are not followed)" } else { "" };
        let text = format!("{place} answered {}{why}: {}", status.as_u16(), said.trim());
        Err(Error::new(ErrorKind::Io, text))
    }
}

/// A client without proxy, redirects and pool, with the system's roots.
fn agent() -> ureq::Agent {
    let found = rustls_native_certs::load_native_certs();
    let roots: Vec<_> =
        found.certs.iter().map(|root| Certificate::from_der(root).to_owned()).collect();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::Specific(Arc::new(roots)))
        .unversioned_rustls_crypto_provider(provider)
        .build();
    ureq::Agent::config_builder()
        .tls_config(tls)
        .proxy(None)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .http_status_as_error(false)
        .timeout_global(Some(TIMEOUT))
        .user_agent(concat!("coldrised/", env!("CARGO_PKG_VERSION")))
        .max_idle_connections(0)
        .build()
        .new_agent()
}

/// Slack takes these three characters as markup.
fn slack_text(message: &Message) -> String {
    let text = format!("*{}*\n{}", message.subject(), message.text());
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Headers are ASCII.
fn ascii(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii() && !c.is_control() { c } else { '?' }).collect()
}

fn ntfy_priority(message: &Message) -> &'static str {
    match (message.occasion, message.severity()) {
        (Occasion::Cleared, _) | (_, Severity::Info) => "default",
        (_, Severity::Warn) => "high",
        (_, Severity::Fail) => "urgent",
    }
}

fn gotify_priority(message: &Message) -> u8 {
    match message.severity() {
        Severity::Info => 2,
        Severity::Warn => 5,
        Severity::Fail => 8,
    }
}

#[cfg(test)]
mod tests {
    use super::{Template, WebhookTarget};

    fn target(url: &str) -> WebhookTarget {
        let template = Template::Slack;
        let (token, token_file) = (Some("secret".into()), None);
        WebhookTarget { url: url.into(), template, allow_http: false, token, token_file }
    }

    #[test]
    fn unsafe_webhook_addresses_are_refused() {
        for url in
            ["https://a.example/x", "http://127.0.0.1:80/", "http://[::1]/", "http://localhost/"]
        {
            target(url).check().unwrap();
        }
        for url in [
            "http://a.example/",
            "https://u:p@a.example/",
            "file:///etc/passwd",
            "/x",
            "",
            "http://127.0.0.1.example/",
            "https://a.example:99999/",
            "https://a.example:0/",
            "https://a.example:/",
            "https://a.example:x/",
            "https://a.example:+443/",
            "https://[::1]:+443/",
            "https://:443/",
            "https:///x",
            "https://a%41.example/",
            "https://1.2.3/",
            "a.example:443",
        ] {
            assert!(target(url).check().is_err(), "{url}");
        }
    }

    #[test]
    fn secrets_are_hidden_and_stay_with_their_server() {
        let stored = target("https://hooks.example/T0/B0/key");
        let shown = stored.redacted();
        assert_eq!((shown.url.as_str(), &shown.token), ("https://hooks.example/***", &None));
        assert_eq!(shown.clone().with_secrets_of(&stored), stored);
        let moved = WebhookTarget { url: "https://evil.example/***".into(), ..shown };
        let moved = moved.with_secrets_of(&stored);
        assert_eq!((moved.url.as_str(), moved.token), ("https://evil.example/***", None));
    }
}
