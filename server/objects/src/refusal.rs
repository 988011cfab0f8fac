//! A server's refusals: what they say, and what they mean.

use coldrise_block::ErrorKind;
use hyper::HeaderMap;

/// Most characters of a server's own words in a message.
const MOST_WORDS: usize = 300;

/// An answer with a status that is not a success.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: u16,
    /// The word of S3 for the error; empty if the answer is not one of S3.
    pub(crate) code: String,
    /// The server's own words; may be empty.
    pub(crate) message: String,
    /// The region of the bucket, if the server names it.
    pub(crate) region: Option<String>,
}

/// The meaning of a refusal.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Meaning {
    pub(crate) kind: ErrorKind,
    /// The same call may succeed later.
    pub(crate) is_transient: bool,
    pub(crate) cause: Cause,
}

/// The cause; it determines the advice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    Key,
    Secret,
    Token,
    Clock,
    Region,
    Permission,
    Bucket,
    Endpoint,
    Archived,
    Dialect,
    Space,
    Other,
}

impl Refusal {
    /// Reads an answer's status, headers and as much of its body as was read.
    pub(crate) fn of(status: u16, headers: &HeaderMap, body: &[u8]) -> Self {
        let text = std::str::from_utf8(body).unwrap_or_default();
        let document = roxmltree::Document::parse(text).ok();
        let root = document.as_ref().map(|document| document.root_element());
        let root = root.filter(|root| root.tag_name().name().starts_with("Error"));
        let field = |name: &str| {
            let node = root?.descendants().find(|node| node.has_tag_name(name))?;
            Some(printable(node.text()?)).filter(|text| !text.is_empty())
        };
        let named = headers.get("x-amz-bucket-region").and_then(|value| value.to_str().ok());
        Refusal {
            status,
            code: field("Code").unwrap_or_default(),
            message: field("Message").unwrap_or_default(),
            region: named.map(printable).or_else(|| field("Region")),
        }
    }

    /// By the code of S3; by the status if that says nothing.
    pub(crate) fn meaning(&self) -> Meaning {
        use Cause::*;
        let lasting = |kind, cause| Meaning { kind, is_transient: false, cause };
        let transient = Meaning { kind: ErrorKind::Io, is_transient: true, cause: Other };
        match self.code.as_str() {
            "NoSuchKey" => lasting(ErrorKind::NotFound, Other),
            "NoSuchBucket" => lasting(ErrorKind::NoRepository, Bucket),
            "InvalidBucketName" => lasting(ErrorKind::InvalidInput, Bucket),
            // The second one is versitygw's.
            "InvalidAccessKeyId" | "XAdminUserNotFound" => lasting(ErrorKind::Unauthorized, Key),
            "SignatureDoesNotMatch" => lasting(ErrorKind::Unauthorized, Secret),
            "ExpiredToken" | "ExpiredTokenException" | "InvalidToken" | "TokenRefreshRequired" => {
                lasting(ErrorKind::Unauthorized, Token)
            }
            "RequestTimeTooSkewed" | "RequestExpired" => lasting(ErrorKind::Unauthorized, Clock),
            "AuthorizationHeaderMalformed"
            | "PermanentRedirect"
            | "TemporaryRedirect"
            | "IllegalLocationConstraintException" => lasting(ErrorKind::InvalidInput, Region),
            "QuotaExceeded"
            | "InsufficientStorage"
            | "InsufficientCapacity"
            | "StorageFull"
            | "XMinioStorageFull"
            | "XMinioAdminBucketQuotaExceeded" => lasting(ErrorKind::NoSpace, Space),
            "InvalidObjectState" => lasting(ErrorKind::Unsupported, Archived),
            "NotImplemented" | "MethodNotAllowed" => lasting(ErrorKind::Unsupported, Dialect),
            "EntityTooLarge" => lasting(ErrorKind::InvalidInput, Other),
            "KeyTooLongError" => lasting(ErrorKind::NameTooLong, Other),
            // Bytes that were damaged or lost on the way, and servers that are busy.
            "BadDigest"
            | "IncompleteBody"
            | "XAmzContentSHA256Mismatch"
            | "RequestTimeout"
            | "OperationAborted"
            | "ConditionalRequestConflict"
            | "SlowDown"
            | "InternalError"
            | "ServiceUnavailable" => transient,
            code => match self.status {
                301 | 302 | 307 | 308 => lasting(ErrorKind::InvalidInput, Region),
                401 => lasting(ErrorKind::Unauthorized, Key),
                403 => lasting(ErrorKind::Forbidden, Permission),
                404 if code.is_empty() => lasting(ErrorKind::NoRepository, Endpoint),
                405 | 501 | 505 => lasting(ErrorKind::Unsupported, Endpoint),
                416 => lasting(ErrorKind::OutOfRange, Other),
                507 => lasting(ErrorKind::NoSpace, Space),
                408 | 425 | 429 | 500..=599 => transient,
                _ if code.is_empty() => lasting(ErrorKind::Io, Endpoint),
                _ => lasting(ErrorKind::Io, Other),
            },
        }
    }

    /// For a message.
    pub(crate) fn text(&self) -> String {
        let words = [self.code.as_str(), self.message.as_str()];
        let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
        match words[..] {
            [] => format!("the server answered {}", self.status),
            _ => format!("the server answered {}: {}", self.status, words.join(", ")),
        }
    }
}

/// One line, and not long.
fn printable(text: &str) -> String {
    let text: String = text.trim().chars().take(MOST_WORDS).collect();
    text.replace(char::is_control, " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(status: u16, body: &str) -> Refusal {
        Refusal::of(status, &HeaderMap::new(), body.as_bytes())
    }

    fn document(code: &str) -> String {
        format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code>\
             <Message>Some\nwords</Message><Region>eu-central-1</Region></Error>"
        )
    }

    #[test]
    fn the_code_comes_before_the_status() {
        for (status, code, kind, is_transient) in [
            (404, "NoSuchKey", ErrorKind::NotFound, false),
            (404, "NoSuchBucket", ErrorKind::NoRepository, false),
            (403, "SignatureDoesNotMatch", ErrorKind::Unauthorized, false),
            (403, "RequestTimeTooSkewed", ErrorKind::Unauthorized, false),
            (403, "AccessDenied", ErrorKind::Forbidden, false),
            (403, "QuotaExceeded", ErrorKind::NoSpace, false),
            (400, "RequestTimeout", ErrorKind::Io, true),
            (400, "XAmzContentSHA256Mismatch", ErrorKind::Io, true),
            (400, "InvalidArgument", ErrorKind::Io, false),
            (409, "ConditionalRequestConflict", ErrorKind::Io, true),
            (416, "InvalidRange", ErrorKind::OutOfRange, false),
            (503, "SlowDown", ErrorKind::Io, true),
            (501, "NotImplemented", ErrorKind::Unsupported, false),
        ] {
            let meaning = of(status, &document(code)).meaning();
            assert_eq!((meaning.kind, meaning.is_transient), (kind, is_transient), "{code}");
        }
    }

    #[test]
    fn a_404_without_an_s3_error_is_not_a_missing_object() {
        for body in ["", "<html><Code>NoSuchKey</Code></html>", "404 page not found", "<Error>"] {
            let refusal = of(404, body);
            assert_eq!((refusal.code.as_str(), refusal.message.as_str()), ("", ""), "{body}");
            assert_eq!(refusal.meaning().cause, Cause::Endpoint, "{body}");
            assert_eq!(refusal.meaning().kind, ErrorKind::NoRepository, "{body}");
        }
        assert!(of(502, "Bad Gateway").meaning().is_transient);
        assert_eq!(of(507, "").meaning().kind, ErrorKind::NoSpace);
        assert_eq!(of(502, "Bad Gateway").text(), "the server answered 502");
    }

    #[test]
    fn the_region_comes_from_the_header_or_the_document() {
        let refusal = of(400, &document("AuthorizationHeaderMalformed"));
        assert_eq!(refusal.region.as_deref(), Some("eu-central-1"));
        assert_eq!(
            refusal.text(),
            "the server answered 400: AuthorizationHeaderMalformed, Some words"
        );
        let headers = HeaderMap::from_iter([(
            hyper::header::HeaderName::from_static("x-amz-bucket-region"),
            hyper::header::HeaderValue::from_static("eu-west-3"),
        )]);
        let refusal = Refusal::of(301, &headers, b"");
        assert_eq!(refusal.region.as_deref(), Some("eu-west-3"));
        assert_eq!(refusal.meaning().cause, Cause::Region);
    }
}
