//! HTTP over TLS for object_store.
//!
//! Its own client ends a request after a fixed time, and a pack of 64 MiB takes minutes on a slow
//! line. This one ends a request whose bytes stand still, bounds what it reads of an answer, and
//! leaves in the [`Exchange`] what went wrong.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use async_trait::async_trait;
use hyper::StatusCode;
use hyper::body::{Body, Bytes, Frame, SizeHint};
use hyper::header::{CONTENT_LENGTH, ETAG, RANGE};
use object_store::ClientOptions;
use object_store::client::{
    ClientConfigKey, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest,
    HttpRequestBody, HttpResponse, HttpResponseBody, HttpService,
};
use rustls::ClientConfig;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::exchange::{Exchange, Success, Trouble, current};
use crate::refusal::Refusal;

/// Most time to wait for a connection.
const MOST_CONNECT: Duration = Duration::from_secs(10);
/// Servers close connections that are idle for longer.
const IDLE: Duration = Duration::from_secs(15);
/// The end of a body lies in the socket's buffers, of at most this size, and leaves them at such
/// a rate or faster. A dead peer is noticed there by the kernel's time limit for unacknowledged bytes.
const MOST_BUFFER_BYTES: usize = 4 << 20;
const LEAST_BYTES_PER_S: usize = 64 << 10;
/// Most bytes of a refusal that are read.
const MOST_REFUSAL_BYTES: usize = 64 << 10;

/// Makes the HTTP clients of a store.
#[derive(Debug)]
pub(crate) struct Transport {
    pub(crate) tls: ClientConfig,
    /// How long bytes of a request may stand still.
    pub(crate) stall: Duration,
    /// How much longer the end of a body may take.
    pub(crate) most_rest: Duration,
}

impl HttpConnector for Transport {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let allows_plain = options.get_config_value(&ClientConfigKey::AllowHttp);
        let client = reqwest::Client::builder()
            .tls_backend_preconfigured(self.tls.clone())
            .https_only(allows_plain.as_deref() != Some("true"))
            .http1_only()
            .redirect(reqwest::redirect::Policy::none())
            .referer(false)
            .retry(reqwest::retry::never())
            .connect_timeout(self.stall.min(MOST_CONNECT))
            .pool_idle_timeout(IDLE)
            .tcp_user_timeout(self.stall)
            .user_agent(concat!("coldrise/", env!("CARGO_PKG_VERSION")))
            .build();
        let client = client.map_err(|error| object_store::Error::Generic {
            store: "HTTP",
            source: Box::new(error),
        })?;
        Ok(HttpClient::new(Wire { client, stall: self.stall, most_rest: self.most_rest }))
    }
}

#[derive(Debug)]
struct Wire {
    client: reqwest::Client,
    stall: Duration,
    most_rest: Duration,
}

#[async_trait]
impl HttpService for Wire {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let exchange = current().ok_or_else(|| failed("no exchange"))?;
        let (parts, body) = request.into_parts();
        let url = parts.uri.to_string().parse().map_err(|_| failed("no URL"))?;
        let mut request = reqwest::Request::new(parts.method, url);
        let asks_range = parts.headers.contains_key(RANGE);
        *request.headers_mut() = parts.headers;
        *request.body_mut() = Some(match body.content_length() {
            0 => reqwest::Body::from(Vec::new()),
            length => {
                let seconds = length.min(MOST_BUFFER_BYTES) / LEAST_BYTES_PER_S;
                let rest = self.most_rest.min(Duration::from_secs(seconds as u64));
                reqwest::Body::wrap(Sent { body, rest, exchange: exchange.clone() })
            }
        });
        exchange.progress();
        let answer = moving(self.stall, &exchange, self.client.execute(request)).await?;
        let answer = answer.map_err(|error| record(&exchange, trouble(error)))?;
        exchange.progress();
        let (parts, body) = hyper::http::Response::<reqwest::Body>::from(answer).into_parts();
        let mut body = Received {
            body,
            left_bytes: exchange.most_bytes,
            stall: self.stall,
            timer: Box::pin(sleep_until(Instant::now() + self.stall)),
            exchange: exchange.clone(),
        };
        if parts.status.is_success() {
            exchange.record(Trouble::NotUnderstood(Success {
                has_tag: parts.headers.contains_key(ETAG),
                has_length: parts.headers.contains_key(CONTENT_LENGTH),
                is_whole: asks_range && parts.status != StatusCode::PARTIAL_CONTENT,
            }));
            return Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(body)));
        }
        body.left_bytes = u64::MAX;
        let text = begin_of(&mut body).await;
        let refusal = Refusal::of(parts.status.as_u16(), &parts.headers, &text);
        exchange.record(Trouble::Refused(refusal));
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::from(text)))
    }
}

fn failed(text: &str) -> HttpError {
    HttpError::new(HttpErrorKind::Unknown, std::io::Error::other(text.to_owned()))
}

fn record(exchange: &Exchange, trouble: Trouble) -> HttpError {
    exchange.record(trouble);
    failed("the exchange broke off")
}

/// The result of `work`, unless bytes stand still for `stall`.
async fn moving<T>(
    stall: Duration,
    exchange: &Exchange,
    work: impl Future<Output = T>,
) -> Result<T, HttpError> {
    let mut work = pin!(work);
    loop {
        let end = Instant::from_std(exchange.deadline(stall));
        tokio::select! {
            biased;
            done = &mut work => return Ok(done),
            () = sleep_until(end) => {}
        }
        if Instant::from_std(exchange.deadline(stall)) <= Instant::now() {
            return Err(record(exchange, Trouble::StoodStill(stall)));
        }
    }
}

/// As much of a refusal as comes and is worth reading.
async fn begin_of(body: &mut Received) -> Vec<u8> {
    let mut text = Vec::new();
    while text.len() < MOST_REFUSAL_BYTES {
        let frame = std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await;
        let Some(Ok(frame)) = frame else { break };
        text.extend_from_slice(&frame.into_data().unwrap_or_default());
    }
    text.truncate(MOST_REFUSAL_BYTES);
    text
}

/// The kind of a client's error.
fn trouble(error: reqwest::Error) -> Trouble {
    let is_connect = error.is_connect();
    let error = error.without_url();
    let mut texts: Vec<String> = Vec::new();
    let mut is_untrusted = false;
    let mut below = std::error::Error::source(&error);
    while let Some(error) = below {
        is_untrusted |= matches!(
            tls_error(error),
            Some(rustls::Error::InvalidCertificate(_) | rustls::Error::InvalidMessage(_))
        );
        let text = error.to_string();
        if texts.last().is_none_or(|last| *last != text) {
            texts.push(text);
        }
        below = error.source();
    }
    let text = match texts.is_empty() {
        true => error.to_string(),
        false => texts.join(": "),
    };
    match (is_untrusted, is_connect) {
        (true, _) => Trouble::NotTrusted(text),
        (false, true) => Trouble::NotReached(text),
        (false, false) => Trouble::Cut(text),
    }
}

/// The TLS error in an error: those of I/O wrap it, and each other, without naming it as their source.
fn tls_error<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a rustls::Error> {
    let inner = error.downcast_ref::<std::io::Error>().and_then(|error| error.get_ref());
    error.downcast_ref().or_else(|| tls_error(inner?))
}

/// The body of a request: says when its parts go.
struct Sent {
    body: HttpRequestBody,
    /// See [`Exchange::handed_over`], after the last part.
    rest: Duration,
    exchange: Arc<Exchange>,
}

impl Body for Sent {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        match self.body.is_end_stream() {
            true => self.exchange.handed_over(self.rest),
            false => self.exchange.progress(),
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of an answer: bounded, and with an end if nothing comes.
struct Received {
    body: reqwest::Body,
    left_bytes: u64,
    stall: Duration,
    timer: Pin<Box<Sleep>>,
    exchange: Arc<Exchange>,
}

impl Body for Received {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let this = &mut *self;
        let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(context) else {
            ready!(this.timer.as_mut().poll(context));
            let trouble = Trouble::StoodStill(this.stall);
            return Poll::Ready(Some(Err(record(&this.exchange, trouble))));
        };
        this.timer.as_mut().reset(Instant::now() + this.stall);
        this.exchange.progress();
        Poll::Ready(frame.map(|frame| {
            let frame = frame.map_err(|error| record(&this.exchange, trouble(error)))?;
            let length = frame.data_ref().map_or(0, |data| data.len() as u64);
            let Some(left) = this.left_bytes.checked_sub(length) else {
                return Err(record(&this.exchange, Trouble::TooLong(this.exchange.most_bytes)));
            };
            this.left_bytes = left;
            Ok(frame)
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
