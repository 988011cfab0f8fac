use std::io::{BufRead, BufReader};

use super::*;

const PATIENCE: Duration = Duration::from_secs(10);
const GREETING: &str = r#"{"QMP":{"version":{},"capabilities":[]}}"#;

/// A monitor whose QEMU answers each request with the next of `answers`. `ID` in them is the
/// request's id. Then it waits for the client's end.
fn monitor(answers: Vec<String>) -> Result<Monitor> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::spawn(move || {
        let mut requests = BufReader::new(theirs.try_clone().unwrap()).lines();
        let mut theirs = theirs;
        let _ = writeln!(theirs, "{GREETING}");
        for answer in [r#"{"return":{},"id":ID}"#.to_owned()].iter().chain(&answers) {
            let Some(Ok(request)) = requests.next() else { return };
            let request: Value = serde_json::from_str(&request).unwrap();
            let _ = theirs.write_all(answer.replace("ID", &request["id"].to_string()).as_bytes());
            let _ = theirs.write_all(b"\n");
        }
        requests.for_each(drop);
    });
    Monitor::greet(ours, PATIENCE)
}

fn failure(answer: String) -> String {
    let mut monitor = monitor(vec![answer]).unwrap();
    let error = monitor.execute("query-status", Value::Null, PATIENCE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ToolFailed);
    error.full_message()
}

#[test]
fn commands_are_answered_and_events_kept() {
    let event = r#"{"timestamp":{"seconds":5,"microseconds":7000},"event":"STOP"}"#;
    let answer = format!("{event}\r\n{}\r", r#"{"return":{"status":"running"},"id":ID}"#);
    let mut monitor = monitor(vec![answer, event.to_owned()]).unwrap();
    let status = monitor.execute("query-status", json!({ "a": 1 }), PATIENCE).unwrap();
    assert_eq!(status["status"], "running");
    let stop = Event { name: "STOP".into(), unix_ms: 5007, fields: Value::Null };
    assert_eq!(monitor.take_events(), [stop]);
    monitor.wait(Duration::ZERO).unwrap();
    assert_eq!(monitor.take_events(), []);
}

#[test]
fn a_refusal_names_the_reason_and_the_monitor_can_still_be_used() {
    let refused = r#"{"id":ID,"error":{"class":"GenericError","desc":"no \u001bsuch disk"}}"#;
    let done = r#"{"return":[],"id":ID}"#;
    let mut monitor = monitor(vec![refused.to_owned(), done.to_owned()]).unwrap();
    let error = monitor.execute("eject", Value::Null, PATIENCE).unwrap_err();
    assert!(error.full_message().ends_with("QEMU refuses eject: no such disk"), "{error:?}");
    assert_eq!(monitor.execute("eject", Value::Null, PATIENCE).unwrap(), json!([]));
}

#[test]
fn hostile_answers_are_errors() {
    for (answer, word) in [
        ("no json".to_owned(), "no json"),
        ("[]".to_owned(), "[]"),
        (r#"{"return":{},"id":77}"#.to_owned(), "77"),
        (r#"{"id":ID}"#.to_owned(), "answers query-status"),
        ("[".repeat(100_000), "sent"),
        (" ".repeat(MAX_LINE_BYTES + 2 * 16 * 1024), "in one line"),
    ] {
        let message = failure(answer);
        assert!(message.contains(word) && message.len() < 1000, "{message}");
    }
}

#[test]
fn the_number_of_kept_events_is_bounded() {
    let events = format!("{}\n", r#"{"event":"RTC_CHANGE"}"#).repeat(MAX_EVENTS + 100);
    let mut monitor = monitor(vec![format!("{events}{}", r#"{"return":{},"id":ID}"#)]).unwrap();
    monitor.execute("query-status", Value::Null, PATIENCE).unwrap();
    assert_eq!(monitor.take_events().len(), MAX_EVENTS);
}

#[test]
fn the_size_of_kept_events_is_bounded() {
    let data = "x".repeat(MAX_LINE_BYTES / 2);
    let event = format!(r#"{{"event":"STOP","data":{{"reason":"{data}"}}}}"#);
    let mut monitor = monitor(vec![format!("{event}\n{}", r#"{"return":{},"id":ID}"#)]).unwrap();
    monitor.execute("query-status", Value::Null, PATIENCE).unwrap();
    let events = monitor.take_events();
    assert!(events.len() == 1 && events[0].fields.is_null() && events[0].name != "STOP");
}

#[test]
fn silence_ends_at_the_time_limit() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let error = Monitor::greet(ours, Duration::from_millis(20)).err().unwrap();
    assert!(error.full_message().contains("does not answer"), "{error:?}");
}

#[test]
fn the_end_of_the_connection_is_an_error() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    let error = Monitor::greet(ours, PATIENCE).err().unwrap();
    assert!(error.full_message().contains("closed"), "{error:?}");
}
