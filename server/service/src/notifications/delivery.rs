//! Sends what is in the outbox.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};
use tokio::sync::{mpsc, oneshot};

use super::condition::{Condition, Severity, Topic};
use super::message::{Message, Occasion};
use super::outbox;
use super::settings;
use super::targets::{TargetResult, TargetSettings, Way};
use crate::clock::now_ms;
use crate::service::{Service, SharedService};

/// Time limit of one attempt. The ways have their own, shorter limits; this one is for servers that
/// drip.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(60);
/// Longest time between two looks at the outbox: the clock can jump.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);
/// More waiting messages than this become one.
const MAX_SINGLE_MESSAGES: usize = 5;

/// Sends until the service stops. At the start everything that waits is due.
pub(crate) async fn deliver(service: SharedService) {
    let mut stop = service.stop.clone();
    let (ended_sender, mut ended) = mpsc::unbounded_channel::<String>();
    // Targets whose thread has not ended.
    let mut busy = HashSet::new();
    let shared = service.clone();
    let _ = work(move || shared.database.hurry_outbox(None)).await;
    loop {
        let now = now_ms();
        let shared = service.clone();
        let found = work(move || shared.database.read(|sql| outbox::due(sql, now))).await;
        let (due, next_ms) = found.unwrap_or_else(|error| {
            tracing::error!("{}", error.full_message());
            (Vec::new(), None)
        });
        for target in due {
            if busy.insert(target.clone()) {
                tokio::spawn(deliver_to(service.clone(), target, ended_sender.clone()));
            }
        }
        let sleep = next_ms.map_or(LONGEST_SLEEP, |next_ms| {
            Duration::from_millis(u64::try_from(next_ms - now).unwrap_or(0))
        });
        tokio::select! {
            () = service.messenger.outbox.notified() => {}
            Some(target) = ended.recv() => { busy.remove(&target); }
            () = tokio::time::sleep(sleep.min(LONGEST_SLEEP)) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
    }
}

async fn work<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        Err(Error::new(ErrorKind::Internal, format!("a defect in coldrised: {error}")))
    })
}

/// One attempt: one message, or one digest of many.
struct Attempt {
    settings: TargetSettings,
    numbers: Vec<i64>,
    message: Message,
}

/// Sends to one target until nothing is due, or an attempt fails.
async fn deliver_to(service: SharedService, target: String, ended: mpsc::UnboundedSender<String>) {
    loop {
        let (shared, id) = (service.clone(), target.clone());
        let next = work(move || next(&shared, &id)).await;
        let attempt = match next {
            Ok(Some(attempt)) => attempt,
            Ok(None) => break,
            Err(error) => {
                tracing::error!("{}", error.full_message());
                tokio::time::sleep(LONGEST_SLEEP).await;
                break;
            }
        };
        let name = attempt.settings.name.clone();
        let numbers = attempt.numbers;
        let (result, thread) =
            send(&service, attempt.settings.way, attempt.message, ATTEMPT_LIMIT).await;
        let is_ok = result.is_ok();
        note(&service, &target, &name, numbers.clone(), result).await;
        // After the limit: the target stays busy until its thread ends.
        if let Some(thread) = thread {
            if let Ok(Ok(())) = thread.await {
                note(&service, &target, &name, numbers, Ok(())).await;
            }
            break;
        }
        if !is_ok {
            break;
        }
    }
    let _ = ended.send(target);
}

fn next(service: &Service, target: &str) -> Result<Option<Attempt>> {
    let now = now_ms();
    service.database.change(|sql| outbox::begin(sql, target))?;
    let (found, waiting) = service
        .database
        .read(|sql| Ok((super::targets::one(sql, target)?, outbox::batch(sql, target, now)?)))?;
    let Some(settings) = found.map(|found| found.settings) else { return Ok(None) };
    let mut waiting = waiting;
    if waiting.len() <= MAX_SINGLE_MESSAGES {
        waiting.truncate(1);
    }
    let numbers: Vec<i64> = waiting.iter().map(|waiting| waiting.number).collect();
    let mut messages: Vec<Message> = waiting.into_iter().map(|waiting| waiting.message).collect();
    let message = match messages.len() {
        0 => return Ok(None),
        1 => messages.remove(0),
        _ => Message::digest(messages, now)?,
    };
    Ok(Some(Attempt { settings, numbers, message }))
}

type Sent = oneshot::Receiver<Result<()>>;

/// Sends on a thread of its own, and waits for at most `limit`. If that is over, also returns what
/// tells the end of the thread.
async fn send(
    service: &Service,
    way: Way,
    message: Message,
    limit: Duration,
) -> (Result<()>, Option<Sent>) {
    let (sender, mut receiver) = oneshot::channel();
    let state = service.options.state.clone();
    let sendmail = sendmail();
    let thread = std::thread::Builder::new().name("message".into()).spawn(move || {
        let sent = match way {
            Way::Smtp(way) => way.send(&message, &state),
            Way::Sendmail(way) => way.send(&message, &sendmail),
            Way::Webhook(way) => way.send(&message, &state),
        };
        let _ = sender.send(sent);
    });
    if let Err(error) = thread {
        return (Err(error).context(|| "starting a thread"), None);
    }
    match tokio::time::timeout(limit, &mut receiver).await {
        Ok(Ok(sent)) => (sent, None),
        Ok(Err(_)) => (Err(Error::new(ErrorKind::Internal, "a defect while sending")), None),
        Err(_) => {
            let text = format!("no complete answer within {} s", limit.as_secs());
            (Err(Error::new(ErrorKind::Io, text)), Some(receiver))
        }
    }
}

/// The sendmail program. The environment of the service can name another one, such as in tests.
fn sendmail() -> PathBuf {
    std::env::var_os("COLDRISE_SENDMAIL").map_or("/usr/sbin/sendmail".into(), PathBuf::from)
}

async fn note(
    service: &SharedService,
    target: &str,
    name: &str,
    numbers: Vec<i64>,
    result: Result<()>,
) {
    if let Err(error) = &result {
        tracing::warn!("message to {name}: {}", error.full_message());
    }
    let (service, target) = (service.clone(), target.to_owned());
    let noted = work(move || {
        let mut random = [0; 4];
        coldrise_store::random(&mut random)?;
        service.database.change(|sql| match &result {
            Ok(()) => outbox::sent(sql, &target, &numbers, now_ms()),
            Err(error) => {
                let (text, random) = (error.full_message(), u32::from_ne_bytes(random));
                outbox::failed(sql, &target, &numbers, &text, now_ms(), random)
            }
        })
    });
    if let Err(error) = noted.await {
        tracing::error!("{}", error.full_message());
    }
}

/// Sends a test at once, past the outbox.
///
/// # Errors
/// `NotFound`; errors of the database. A target that does not take it is a result.
pub(crate) async fn send_test(
    service: &SharedService,
    id: String,
    who: &str,
) -> Result<TargetResult> {
    let mut condition =
        Condition::new("test", Topic::Test, Severity::Info, "this is a test of a message target");
    condition.details = format!("{who} asked for it. If you can read this, the target works.");
    let (shared, wanted) = (service.clone(), id.clone());
    let (target, message) = work(move || {
        let database = &shared.database;
        let target = database.target_with_secrets(&wanted)?;
        let base = database.read(|sql| settings::link_base(sql, &shared.options))?;
        Ok((target, Message::new(&condition, Occasion::Event, now_ms(), &base)?))
    })
    .await?;
    let (sent, _) = send(service, target.settings.way, message, ATTEMPT_LIMIT / 2).await;
    let text = sent.as_ref().map_or_else(Error::full_message, |()| "sent".to_owned());
    let result = TargetResult { at_ms: now_ms(), is_ok: sent.is_ok(), text };
    let (shared, noted) = (service.clone(), result.clone());
    work(move || {
        shared.database.note_target(&id, &noted)?;
        match noted.is_ok {
            true => shared.database.hurry_outbox(Some(&id)),
            false => Ok(()),
        }
    })
    .await?;
    service.messenger.wake();
    Ok(result)
}
