//! The meaning of a failed attempt: its kind, its message with advice, and whether the same
//! call may succeed later.

use coldrise_block::{Error, ErrorKind};

use crate::address::Address;
use crate::exchange::{Success, Trouble};
use crate::refusal::{Cause, Refusal};

/// The operation of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Put,
    Get,
    List,
    Delete,
}

/// One call, for messages.
pub(crate) struct Call<'a> {
    pub(crate) action: Action,
    /// The name of the object, or a list's prefix.
    pub(crate) name: &'a str,
    pub(crate) address: &'a Address,
    /// The store: a URL, or Amazon S3.
    pub(crate) endpoint: &'a str,
}

/// Why an attempt failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) error: Error,
    /// The same call may succeed later.
    pub(crate) is_transient: bool,
}

impl Call<'_> {
    /// The operation, its object and its place.
    pub(crate) fn context(&self) -> String {
        let (name, place) = (self.name, &self.address.text);
        match self.action {
            Action::Put => format!("storing the object {name} in {place}"),
            Action::Get => format!("reading the object {name} in {place}"),
            Action::List => format!("listing the objects {name}* in {place}"),
            Action::Delete => format!("deleting the object {name} in {place}"),
        }
    }

    /// The meaning of an attempt's failure. `trouble` is what the wire saw, `error` what
    /// object_store says.
    pub(crate) fn failure(&self, trouble: Option<Trouble>, error: object_store::Error) -> Failure {
        let later = |text: String, advice: String| Failure {
            error: self.error(ErrorKind::Io, text).advise(advice),
            is_transient: true,
        };
        match trouble {
            Some(Trouble::Refused(refusal)) => self.refused(&refusal),
            Some(Trouble::NotReached(text)) => {
                let text = format!("{} cannot be reached: {text}", self.endpoint);
                let advice = "check the network, the name of the host and the port \
                              (AWS_ENDPOINT_URL, AWS_REGION)";
                later(text, advice.to_owned())
            }
            Some(Trouble::Cut(text)) => {
                later(format!("the connection broke off: {text}"), self.check_network())
            }
            Some(Trouble::StoodStill(time)) => {
                let text = format!("no byte moved for {:.1} s", time.as_secs_f64());
                later(text, self.check_network())
            }
            Some(Trouble::NotTrusted(text)) => {
                let advice = "if the server's certificate has an authority of your own, name its \
                              PEM file in AWS_CA_BUNDLE; if it does not speak TLS, write http:// \
                              in AWS_ENDPOINT_URL";
                let text = format!("{} is not trusted: {text}", self.endpoint);
                lasting(self.error(ErrorKind::Io, text).advise(advice))
            }
            Some(Trouble::TooLong(bytes)) => {
                let text = format!("the server's answer is longer than {bytes} bytes");
                lasting(self.error(ErrorKind::Corrupt, text))
            }
            Some(Trouble::NotUnderstood(success)) => {
                let why = self.misunderstanding(success, &error);
                let text = format!("{} cannot be used, because {why}", self.endpoint);
                let advice = "check AWS_ENDPOINT_URL; use another store, or reach this one \
                              without a proxy that changes its answers";
                lasting(self.error(ErrorKind::Unsupported, text).advise(advice))
            }
            // Credentials that cannot be read.
            None => lasting(self.error(ErrorKind::Io, own_words(&error))),
        }
    }

    fn misunderstanding(&self, success: Success, error: &object_store::Error) -> String {
        let lack = match self.action {
            Action::Put if !success.has_tag => "its answers to PUT have no ETag",
            Action::Get if !success.has_length => "its answers to GET have no Content-Length",
            Action::Get if success.is_whole => "it sends whole objects where a range is asked for",
            _ => return format!("its answer is not understood: {}", own_words(error)),
        };
        lack.to_owned()
    }

    fn refused(&self, refusal: &Refusal) -> Failure {
        let meaning = refusal.meaning();
        let error = match meaning.kind {
            ErrorKind::NotFound => self.error(meaning.kind, "there is no such object".to_owned()),
            kind => self.error(kind, refusal.text()),
        };
        let error = match self.advice(meaning.cause, refusal) {
            Some(advice) => error.advise(advice),
            None => error,
        };
        Failure { error, is_transient: meaning.is_transient }
    }

    fn advice(&self, cause: Cause, refusal: &Refusal) -> Option<String> {
        let bucket = &self.address.bucket;
        let text = match cause {
            Cause::Key => "check AWS_ACCESS_KEY_ID".to_owned(),
            Cause::Secret => {
                "AWS_SECRET_ACCESS_KEY does not belong to AWS_ACCESS_KEY_ID: check both".to_owned()
            }
            Cause::Token => {
                "the credentials are no longer valid: get new ones, and set AWS_SESSION_TOKEN, too"
                    .to_owned()
            }
            Cause::Clock => "this machine's clock and the server's differ: correct the wrong one \
                             (timedatectl)"
                .to_owned(),
            Cause::Region => match &refusal.region {
                Some(region) => format!("the bucket is elsewhere: set AWS_REGION={region}"),
                None => "the bucket is elsewhere: set AWS_REGION or AWS_ENDPOINT_URL".to_owned(),
            },
            Cause::Permission => format!("allow these credentials {}", self.permission()),
            Cause::Bucket => format!("create the bucket {bucket}, or correct its name"),
            Cause::Endpoint => format!(
                "{} does not answer as an S3 server does: check AWS_ENDPOINT_URL",
                self.endpoint
            ),
            Cause::Archived => "the object is in an archive class: restore it there first, and \
                                keep objects of a repository out of such classes"
                .to_owned(),
            Cause::Dialect if self.action == Action::Delete => {
                "use a store that supports this request, or do without bucket prune and bucket \
                 forget"
                    .to_owned()
            }
            Cause::Dialect => format!(
                "{} cannot be used, because it does not support this request: use another store",
                self.endpoint
            ),
            Cause::Space => format!("free space there, or raise the quota of the bucket {bucket}"),
            Cause::Other => return None,
        };
        Some(text)
    }

    fn permission(&self) -> String {
        let bucket = &self.address.bucket;
        match self.action {
            Action::Put => format!("s3:PutObject in the bucket {bucket}"),
            Action::Get => format!("s3:GetObject and s3:ListBucket in the bucket {bucket}"),
            Action::List => format!("s3:ListBucket in the bucket {bucket}"),
            Action::Delete => format!(
                "s3:DeleteObject in the bucket {bucket}; an object under a retention lock cannot \
                 be deleted before its end"
            ),
        }
    }

    fn check_network(&self) -> String {
        format!("check the network, and whether {} works", self.endpoint)
    }

    pub(crate) fn error(&self, kind: ErrorKind, text: String) -> Error {
        Error::new(kind, format!("{}: {text}", self.context()))
    }
}

fn lasting(error: Error) -> Failure {
    Failure { error, is_transient: false }
}

/// An error without the name of the library that wraps it. The text repeats its sources.
fn own_words(error: &object_store::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(action: Action, trouble: Trouble) -> Failure {
        let address = Address::parse("s3://vault/site").unwrap();
        let call =
            Call { action, name: "packs/01", address: &address, endpoint: "http://nas:9000" };
        call.failure(Some(trouble), object_store::Error::Generic { store: "", source: "".into() })
    }

    fn refused(action: Action, status: u16, code: &str) -> Failure {
        let code = code.to_owned();
        failure(action, Trouble::Refused(Refusal { status, code, ..Refusal::default() }))
    }

    #[test]
    fn messages_name_the_action_the_object_and_advice() {
        assert_eq!(
            refused(Action::Get, 404, "NoSuchKey").error.full_message(),
            "reading the object packs/01 in s3://vault/site: there is no such object"
        );
        assert_eq!(
            refused(Action::Delete, 403, "AccessDenied").error.full_message(),
            "deleting the object packs/01 in s3://vault/site: the server answered 403: \
             AccessDenied: allow these credentials s3:DeleteObject in the bucket vault; an object \
             under a retention lock cannot be deleted before its end"
        );
        for (status, code, words) in [
            (404, "NoSuchBucket", "create the bucket vault"),
            (403, "InvalidAccessKeyId", "check AWS_ACCESS_KEY_ID"),
            (403, "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY does not belong"),
            (400, "ExpiredToken", "AWS_SESSION_TOKEN"),
            (403, "RequestTimeTooSkewed", "clock"),
            (301, "PermanentRedirect", "AWS_REGION"),
            (404, "", "check AWS_ENDPOINT_URL"),
            (507, "", "free space"),
        ] {
            let failure = refused(Action::Put, status, code);
            let message = failure.error.full_message();
            assert!(message.contains(words), "{message}");
            assert!(!failure.is_transient);
        }
    }

    #[test]
    fn connection_errors_and_slow_down_are_transient() {
        assert!(failure(Action::Put, Trouble::NotReached("refused".into())).is_transient);
        assert!(failure(Action::Put, Trouble::Cut("reset".into())).is_transient);
        assert!(refused(Action::Put, 503, "SlowDown").is_transient);
        assert!(!failure(Action::Get, Trouble::NotTrusted("unknown".into())).is_transient);
        let long = failure(Action::Get, Trouble::TooLong(5));
        assert_eq!((long.error.kind(), long.is_transient), (ErrorKind::Corrupt, false));
    }
}
