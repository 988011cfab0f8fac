//! What the failure of an attempt means: its kind, its message with advice, and whether the same
//! call may succeed later.

use coldrise_block::{Error, ErrorKind};

use crate::address::Address;
use crate::exchange::Trouble;
use crate::refusal::{Cause, Refusal};

/// What a call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Put,
    Create,
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
    /// What is asked: a URL, or Amazon S3.
    pub(crate) endpoint: &'a str,
}

/// Why an attempt failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) error: Error,
    /// The same call may succeed later.
    pub(crate) is_transient: bool,
    /// The server may have done what it was asked.
    pub(crate) is_uncertain: bool,
}

impl Call<'_> {
    /// What happened, to what, where.
    pub(crate) fn context(&self) -> String {
        let (name, place) = (self.name, &self.address.text);
        match self.action {
            Action::Put | Action::Create => format!("storing the object {name} in {place}"),
            Action::Get => format!("reading the object {name} in {place}"),
            Action::List => format!("listing the objects {name}* in {place}"),
            Action::Delete => format!("deleting the object {name} in {place}"),
        }
    }

    /// The meaning of an attempt's failure. `trouble` is what the wire saw, `error` what
    /// object_store says.
    pub(crate) fn failure(&self, trouble: Option<Trouble>, error: object_store::Error) -> Failure {
        let later = |text: String, advice: String, is_uncertain| Failure {
            error: self.error(ErrorKind::Io, text).advise(advice),
            is_transient: true,
            is_uncertain,
        };
        match trouble {
            Some(Trouble::Refused(refusal)) => self.refused(&refusal),
            Some(Trouble::NotReached(text)) => {
                let text = format!("{} cannot be reached: {text}", self.endpoint);
                let advice = "check the network, the name of the host and the port \
                              (AWS_ENDPOINT_URL, AWS_REGION)";
                later(text, advice.to_owned(), false)
            }
            Some(Trouble::Cut(text)) => {
                later(format!("the connection broke off: {text}"), self.check_network(), true)
            }
            Some(Trouble::StoodStill(time)) => {
                let text = format!("no byte moved for {:.1} s", time.as_secs_f64());
                later(text, self.check_network(), true)
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
            // Credentials that cannot be read, or an answer that cannot be understood.
            // Its text repeats its sources.
            None => lasting(self.error(ErrorKind::Io, error.to_string())),
        }
    }

    fn refused(&self, refusal: &Refusal) -> Failure {
        let meaning = refusal.meaning();
        let error = match meaning.kind {
            ErrorKind::NotFound => self.error(meaning.kind, "there is no such object".to_owned()),
            ErrorKind::AlreadyExists => self.error(meaning.kind, "it is there already".to_owned()),
            kind => self.error(kind, refusal.text()),
        };
        let error = match self.advice(meaning.cause, refusal) {
            Some(advice) => error.advise(advice),
            None => error,
        };
        let is_transient = meaning.is_transient;
        Failure { error, is_transient, is_uncertain: is_transient }
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
            Cause::Clock => "this machine's clock and the server's differ: set the wrong one \
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
            Cause::Space => format!("free space there, or raise the quota of the bucket {bucket}"),
            Cause::Other => return None,
        };
        Some(text)
    }

    fn permission(&self) -> String {
        let bucket = &self.address.bucket;
        match self.action {
            Action::Put | Action::Create => format!("s3:PutObject in the bucket {bucket}"),
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
    Failure { error, is_transient: false, is_uncertain: false }
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
    fn messages_say_what_happened_where_and_what_to_do() {
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
            assert!(!failure.is_transient && !failure.is_uncertain);
        }
    }

    #[test]
    fn only_a_request_that_went_out_is_uncertain() {
        let unreached = failure(Action::Create, Trouble::NotReached("refused".into()));
        assert!(unreached.is_transient && !unreached.is_uncertain);
        let cut = failure(Action::Create, Trouble::Cut("reset".into()));
        assert!(cut.is_transient && cut.is_uncertain);
        assert!(refused(Action::Create, 503, "SlowDown").is_uncertain);
        assert!(!failure(Action::Get, Trouble::NotTrusted("unknown".into())).is_transient);
        let long = failure(Action::Get, Trouble::TooLong(5));
        assert_eq!((long.error.kind(), long.is_transient), (ErrorKind::Corrupt, false));
    }
}
