//! The stored form of a restore point, and the form before it had a display name.

use super::PointDocument;
use crate::{FIRMWARE_VARIABLES, RAW};

const WITHOUT: &str = r#"{"machine":"vm17","point":"20261120T100000Z","created_at_ms":1795168800000,"origin":{"backup":{"sources":["/srv/a.raw"]}},"disks":[{"name":"vda","size_bytes":4096,"root":{"page":7,"levels":1}}],"configuration":{"format":"vmx","text":"x"}}"#;

fn with(name: &str) -> String {
    WITHOUT.replace(r#""text":"x"}"#, &format!(r#""text":"x"}},"display_name":"{name}""#))
}

/// The document of a text, and its text again.
fn read(text: &str) -> (PointDocument, String) {
    let point: PointDocument = serde_json::from_str(text).unwrap();
    let again = serde_json::to_string(&point).unwrap();
    (point, again)
}

#[test]
fn a_document_without_a_display_name_keeps_its_bytes() {
    let (point, again) = read(WITHOUT);
    assert_eq!(point.display_name, None);
    assert_eq!(again, WITHOUT);
}

#[test]
fn a_document_with_a_display_name_keeps_its_bytes() {
    let text = with("Web Server 01");
    let (point, again) = read(&text);
    assert_eq!(point.display_name.unwrap().as_str(), "Web Server 01");
    assert_eq!(again, text);
}

#[test]
fn a_hostile_display_name_does_not_make_a_point_unreadable() {
    let (point, again) = read(&with("a\\u202eb"));
    assert_eq!(point.display_name.unwrap().as_str(), "ab");
    assert_eq!(again, with("ab"));
    assert_eq!(read(&with("\\u0007")).1, WITHOUT);
}

#[test]
fn a_document_with_parts_keeps_its_bytes() {
    let part = r#","parts":[{"kind":"firmware-variables","format":"raw","size_bytes":4,"content":"KLUv/SAEIQAAYWJjZA=="}]"#;
    let text = WITHOUT.replace(r#""text":"x"}"#, &format!(r#""text":"x"}}{part}"#));
    let (point, again) = read(&text);
    let variables = point.part(FIRMWARE_VARIABLES).unwrap();
    assert_eq!((variables.format.as_str(), variables.content().unwrap()), (RAW, b"abcd".to_vec()));
    assert_eq!(again, text);
    assert!(point.check().is_ok());
}
