//! The calls against a server that answers by a script.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use coldrise_block::ErrorKind;

use super::Objects;
use crate::Settings;
use crate::s3::S3;

/// What the server does with one request.
enum Reply {
    /// A status, and a body.
    Answer(u16, String),
    /// A part that begins there, of an object with such a mark.
    Part(usize, &'static str, &'static str),
    /// Says that it sends so many bytes more than it sends.
    Short(usize),
    /// Reads all, and closes the connection.
    Cut,
    /// Never answers.
    Silence,
}

use Reply::{Answer, Cut, Part, Short, Silence};

fn refusal(status: u16, code: &str) -> Reply {
    Answer(status, format!("<Error><Code>{code}</Code><Message>m</Message></Error>"))
}

/// The address of a server that answers one request after the other; the lines of the requests.
fn serve(replies: Vec<Reply>) -> (String, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        let mut held = Vec::new();
        for reply in replies {
            let (stream, _) = listener.accept().unwrap();
            let _ = sender.send(read_request(&stream));
            match reply {
                Answer(status, body) => {
                    write_answer(&stream, status, body.len(), &body, "ETag: f\r\n")
                }
                Part(at, mark, body) => {
                    let total = at + body.len();
                    let more = format!(
                        "ETag: {mark}\r\nContent-Range: bytes {at}-{}/{total}\r\n",
                        total - 1
                    );
                    write_answer(&stream, 206, body.len(), body, &more)
                }
                Short(bytes) => write_answer(&stream, 200, 4 + bytes, "four", "ETag: e\r\n"),
                Cut => {}
                Silence => held.push(stream),
            }
        }
    });
    (address, lines)
}

fn read_request(stream: &TcpStream) -> String {
    let mut reader = BufReader::new(stream);
    let (mut first, mut range, mut length) = (String::new(), String::new(), 0);
    reader.read_line(&mut first).unwrap();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if line.trim().is_empty() {
            break;
        }
        let (name, value) = line.split_once(':').unwrap();
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.trim().parse().unwrap(),
            "range" => range = format!(" {}", value.trim()),
            // Not all stores know conditional requests.
            name => assert!(!name.starts_with("if-"), "{line}"),
        }
    }
    reader.take(length).read_to_end(&mut Vec::new()).unwrap();
    first.trim().replace(" HTTP/1.1", &range)
}

fn write_answer(mut stream: &TcpStream, status: u16, length: usize, body: &str, more: &str) {
    let head = format!(
        "HTTP/1.1 {status} x\r\nConnection: close\r\nContent-Length: {length}\r\n{more}\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
}

fn open(endpoint: &str, patience_ms: u64) -> (S3, Arc<AtomicBool>) {
    let patience = Duration::from_millis(patience_ms);
    let settings = Settings { patience, endpoint: Some(endpoint.to_owned()) };
    let keys = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"];
    let variables = keys.into_iter().map(|name| (name.to_owned(), "x".to_owned()));
    let cancel = Arc::new(AtomicBool::new(false));
    let s3 = S3::open("s3://vault/site", &settings, variables, cancel.clone()).unwrap();
    (s3, cancel)
}

fn against(replies: Vec<Reply>) -> (S3, mpsc::Receiver<String>) {
    let (endpoint, lines) = serve(replies);
    (open(&endpoint, 3000).0, lines)
}

fn page(names: &[&str], next: Option<&str>) -> Reply {
    let object = |name: &&str| {
        format!(
            "<Contents><Key>{name}</Key><LastModified>2026-01-02T03:04:05.678Z</LastModified>\
             <ETag>e</ETag><Size>7</Size></Contents>"
        )
    };
    let objects: String = names.iter().map(object).collect();
    let next = next.map(|next| format!("<NextContinuationToken>{next}</NextContinuationToken>"));
    Answer(
        200,
        format!("<ListBucketResult>{objects}{}</ListBucketResult>", next.unwrap_or_default()),
    )
}

#[test]
fn a_missing_bucket_is_not_a_missing_object() {
    let (s3, _) = against(vec![refusal(404, "NoSuchKey"), refusal(404, "NoSuchBucket")]);
    assert_eq!(s3.get("a", 9).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(s3.get("a", 9).unwrap_err().kind(), ErrorKind::NoRepository);
    let replies =
        vec![refusal(404, "NoSuchKey"), refusal(404, "NoSuchBucket"), refusal(404, "NoSuchBucket")];
    let (s3, _) = against(replies);
    s3.delete("a").unwrap();
    assert_eq!(s3.delete("a").unwrap_err().kind(), ErrorKind::NoRepository);
    assert_eq!(s3.list("packs/").unwrap_err().kind(), ErrorKind::NoRepository);
}

#[test]
fn an_object_that_is_too_long_is_not_read() {
    let (s3, _) = against(vec![Answer(200, "four and more".into()), Answer(200, "four".into())]);
    let error = s3.get("a", 4).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.message().contains("13 bytes"), "{error:?}");
    assert_eq!(s3.get("a", 4).unwrap(), b"four");
}

#[test]
fn interrupted_requests_are_retried() {
    let replies = vec![refusal(503, "SlowDown"), Cut, Answer(200, "four".into())];
    let (s3, lines) = against(replies);
    assert_eq!(s3.get("a", 9).unwrap(), b"four");
    assert_eq!(lines.iter().collect::<Vec<_>>(), ["GET /vault/site/a"; 3]);
    let (s3, lines) = against(vec![Cut, Answer(500, String::new()), Answer(200, String::new())]);
    s3.put("a", vec![7; 200_000]).unwrap();
    assert_eq!(lines.iter().count(), 3);
}

#[test]
fn an_interrupted_download_resumes_at_its_offset() {
    let (s3, lines) = against(vec![Short(3), refusal(503, "SlowDown"), Part(4, "e", "ish")]);
    assert_eq!(s3.get("a", 9).unwrap(), b"fourish");
    let asked = "GET /vault/site/a";
    let rest = "GET /vault/site/a bytes=4-6";
    assert_eq!(lines.iter().collect::<Vec<_>>(), [asked, rest, rest]);
    // Unless it was replaced meanwhile, whether the server looks or not.
    let replaced = || Answer(200, "other".into());
    for reply in [refusal(416, "InvalidRange"), Part(4, "f", "ish")] {
        let (s3, lines) = against(vec![Short(3), reply, replaced()]);
        assert_eq!(s3.get("a", 9).unwrap(), b"other");
        assert_eq!(lines.iter().collect::<Vec<_>>(), [asked, rest, asked]);
    }
}

#[test]
fn a_range_behind_the_end_is_empty() {
    let (s3, _) = against(vec![refusal(416, "InvalidRange")]);
    assert_eq!(s3.get_range("a", 10, 5).unwrap(), b"");
    assert_eq!(s3.get_range("a", 10, 0).unwrap(), b"");
}

#[test]
fn pages_are_put_together() {
    let replies = vec![
        page(&["site/packs/b", "site/packs/a/x"], Some("t1")),
        refusal(503, "SlowDown"),
        page(&["site/packs/c", "site/packs", "elsewhere/d"], None),
    ];
    let (s3, lines) = against(replies);
    let found = s3.list("packs/").unwrap();
    let names: Vec<&str> = found.iter().map(|object| object.name.as_str()).collect();
    assert_eq!(names, ["packs/a/x", "packs/b", "packs/c"]);
    assert_eq!((found[0].size_bytes, found[0].modified_ms), (7, 1_767_323_045_678));
    let lines: Vec<String> = lines.iter().collect();
    assert_eq!(lines[0], "GET /vault?list-type=2&prefix=site%2Fpacks%2F");
    assert_eq!(lines[2], "GET /vault?continuation-token=t1&list-type=2&prefix=site%2Fpacks%2F");
    let (s3, _) = against(vec![page(&["site/packs/b"], Some("t")), page(&[], Some("t"))]);
    assert_eq!(s3.list("packs/").unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn requests_fail_after_the_time_limit() {
    let begun = Instant::now();
    let error = open("http://127.0.0.1:1", 600).0.get("a", 9).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    let message = error.full_message();
    assert!(message.starts_with("gave up after "), "{message}");
    assert!(message.contains("http://127.0.0.1:1 cannot be reached: "), "{message}");
    let (endpoint, _lines) = serve(vec![Silence, Silence, Silence]);
    let error = open(&endpoint, 600).0.put("a", vec![0; 9]).unwrap_err();
    assert!(error.message().contains("no byte moved for 0.3 s"), "{error:?}");
    assert!(begun.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_cancel_ends_a_call_in_its_middle() {
    let (endpoint, lines) = serve(vec![Silence]);
    let (s3, cancel) = open(&endpoint, 60_000);
    std::thread::scope(|scope| {
        let put = scope.spawn(|| s3.put("a", vec![0; 1 << 20]));
        lines.recv().unwrap();
        let begun = Instant::now();
        cancel.store(true, Ordering::Relaxed);
        assert_eq!(put.join().unwrap().unwrap_err().kind(), ErrorKind::Interrupted);
        assert!(begun.elapsed() < Duration::from_secs(20));
    });
    assert_eq!(s3.get("a", 9).unwrap_err().kind(), ErrorKind::Interrupted);
}
