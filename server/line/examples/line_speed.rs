//! Measures a line:
//!
//!     line_speed listen ADDRESS
//!     line_speed send ADDRESS CODE SECONDS [BULK_CONNECTIONS]
//!
//! The side that listens prints a code, why a line ended early, and then the next code. The other one sends bulk all the time, and fetches a
//! block of 16 KiB every 5 s. Then it prints what arrived, by the time of the side that listens, and the times
//! of the fetches, as JSON; `failed` says why a line ended early. LINE_SILENCE_S is the time after which a silent peer counts as
//! dead, in seconds, if it is not to be the default.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_line::{
    Arrival, CODE_VALID, Class, Frame, Identity, Line, LineOptions, Listener, PairingCode,
    Received, TcpLine, connect, pair_with,
};

const BULK_BYTES: usize = 256 << 10;
const FETCHED_BYTES: usize = 16 << 10;
/// When the first block is fetched, and the time between two: bulk stands still for a series of them.
const FIRST_FETCH: Duration = Duration::from_secs(2);
const FETCH_EVERY: Duration = Duration::from_secs(5);
const LONG: Duration = Duration::from_secs(60);

fn main() -> std::result::Result<(), String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["listen", address] => listen(address),
        ["send", address, code, seconds] => send(address, code, seconds, None),
        ["send", address, code, seconds, connections] => {
            send(address, code, seconds, Some(connections))
        }
        _ => return Err("see the comment at the top of the source".to_owned()),
    };
    done.map_err(|error| error.full_message())
}

fn options() -> Result<LineOptions> {
    let mut options = LineOptions::default();
    if let Ok(seconds) = std::env::var("LINE_SILENCE_S") {
        options.silence = Duration::from_secs(number(&seconds)?);
    }
    Ok(options)
}

/// Answers each fetch with a block, and says at the end how many bytes of bulk came in what time.
fn listen(address: &str) -> Result<()> {
    let listener = Listener::bind(address, &Identity::generate()?, options()?)?;
    invite(&listener)?;
    loop {
        match listener.accept(LONG)? {
            Arrival::Pairing(pairing) => {
                listener.set_peers([pairing.key()]);
                pairing.accept()?;
            }
            Arrival::Line { line, .. } => {
                answer(&line).unwrap_or_else(|error| println!("{}", error.full_message()));
                invite(&listener)?;
            }
            Arrival::CodeSpoiled | Arrival::Nothing => {}
        }
    }
}

fn invite(listener: &Listener) -> Result<()> {
    let code = PairingCode::generate()?;
    println!("{code}");
    // Without a reader no peer can pair.
    let _ = std::io::stdout().flush();
    listener.invite(code, CODE_VALID);
    Ok(())
}

fn answer(line: &TcpLine) -> Result<()> {
    let (mut bytes, mut begin) = (0, None);
    loop {
        match line.receive(&Class::ALL, LONG)? {
            Received::Frame { class: Class::Bulk, frame } => {
                begin.get_or_insert_with(Instant::now);
                bytes += frame.body.len() as u64;
            }
            Received::Frame { class: Class::Fetch, .. } => {
                line.send(Class::Fetch, filled(FETCHED_BYTES))?;
            }
            Received::Frame { class: Class::Control, .. } => {
                let micros = begin.map_or(1, |begin| begin.elapsed().as_micros() as u64);
                let body = [bytes.to_le_bytes(), micros.to_le_bytes()].concat();
                line.send(Class::Control, Frame { stream: 0, kind: 0, body })?;
            }
            Received::Closed => return Ok(()),
            Received::Nothing => {}
        }
    }
}

fn filled(length: usize) -> Frame {
    Frame { stream: 0, kind: 0, body: vec![0xa5; length] }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T> {
    text.parse().map_err(|_| Error::new(ErrorKind::InvalidInput, format!("{text} is not a number")))
}

fn send(address: &str, code: &str, seconds: &str, connections: Option<&str>) -> Result<()> {
    let limit = Duration::from_secs_f64(number(seconds)?);
    let bulk_connections = connections.map(number).transpose()?;
    let options = LineOptions { bulk_connections, ..options()? };
    let identity = Identity::generate()?;
    let far = pair_with(address, &identity, &code.parse()?)?;
    let line = connect(address, &identity, far, &options)?;
    let begin = Instant::now();
    let measured = measure(&line, limit);
    let failed = measured.as_ref().err().map(Error::full_message).unwrap_or_default();
    let mut measured = measured.unwrap_or_default();
    measured.fetches.sort();
    let fetch = |share: usize| {
        let count = measured.fetches.len();
        measured.fetches.get(count * share / 100).map_or(0, Duration::as_millis)
    };
    let statistics = line.statistics();
    println!(
        "{{\"mbit\": {:.2}, \"fetch_ms_p50\": {}, \"fetch_ms_p99\": {}, \"fetches\": {}, \
         \"congestion_control\": {:?}, \"connections\": {}, \"sent_bytes\": {}, \"seconds\": {:.1}, \
         \"failed\": {failed:?}}}",
        measured.bulk_bytes as f64 * 8.0 / measured.micros.max(1) as f64,
        fetch(50),
        fetch(99),
        measured.fetches.len(),
        statistics.congestion_control,
        statistics.connections,
        statistics.sent_bytes,
        begin.elapsed().as_secs_f64(),
    );
    line.close();
    Ok(())
}

#[derive(Default)]
struct Measured {
    bulk_bytes: u64,
    micros: u64,
    fetches: Vec<Duration>,
}

fn measure(line: &TcpLine, limit: Duration) -> Result<Measured> {
    let until = Instant::now() + limit;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let bulk = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                line.send(Class::Bulk, filled(BULK_BYTES))?;
            }
            Ok(())
        });
        let fetched = fetch_until(line, until);
        is_over.store(true, Ordering::Relaxed);
        let fetches = fetched?;
        // Counted while bulk still flows: its rest is not waited for.
        line.send(Class::Control, filled(0))?;
        let Received::Frame { frame, .. } = line.receive(&[Class::Control], LONG)? else {
            return Err(Error::new(ErrorKind::Io, "no answer"));
        };
        bulk.join().map_err(|_| Error::new(ErrorKind::Internal, "the sender failed"))??;
        let word = |at: usize| {
            frame.body[at..at + 8].iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte))
        };
        Ok(Measured { bulk_bytes: word(0), micros: word(8), fetches })
    })
}

fn fetch_until(line: &TcpLine, until: Instant) -> Result<Vec<Duration>> {
    let mut fetches = Vec::new();
    std::thread::sleep(FIRST_FETCH.min(until.saturating_duration_since(Instant::now())));
    while Instant::now() < until {
        let asked = Instant::now();
        line.send(Class::Fetch, filled(32))?;
        if line.receive(&[Class::Fetch], LONG)? == Received::Nothing {
            return Err(Error::new(ErrorKind::Io, "no block came"));
        }
        fetches.push(asked.elapsed());
        let left = until.saturating_duration_since(Instant::now());
        std::thread::sleep(FETCH_EVERY.saturating_sub(asked.elapsed()).min(left));
    }
    Ok(fetches)
}
