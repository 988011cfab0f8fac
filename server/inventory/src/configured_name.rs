//! The display name of a machine in its configuration.
//!
//! ```text
//!   libvirt      <title>, else <name>
//!   .vmx         displayName, with |XX for bytes of the text encoding that the file names
//!   OVF          <Name> of the machine, else its identifier or id
//!   Coldrise     "display_name"
//! ```

use coldrise_block::{from_windows_1252, is_windows_1252};
use coldrise_store::{COLDRISE_JSON, Configuration, DisplayName, LIBVIRT_XML, OVF, VMX};

use crate::hardware::{ovf, parse_xml};

/// The machine's display name; `None` if the configuration has none, or is broken.
pub fn configured_name(configuration: &Configuration) -> Option<DisplayName> {
    let text = &configuration.text;
    let name = match configuration.format.as_str() {
        LIBVIRT_XML => libvirt_texts(text, &["title", "name"]).into_iter().flatten().next(),
        VMX => vmx_name(text),
        OVF => ovf::name(text),
        COLDRISE_JSON => {
            let described: serde_json::Value = serde_json::from_str(text).ok()?;
            described.get("display_name")?.as_str().map(str::to_owned)
        }
        _ => None,
    };
    DisplayName::clean(&name?)
}

/// The UUID by which libvirt knows the machine of a configuration, in lower case.
pub fn configured_uuid(configuration: &Configuration) -> Option<String> {
    let is_libvirt = configuration.format == LIBVIRT_XML;
    let uuid = is_libvirt.then(|| libvirt_texts(&configuration.text, &["uuid"]))?.pop()??;
    Some(uuid.to_ascii_lowercase())
}

/// The texts of elements of a domain; `None` for an absent or blank one.
fn libvirt_texts(text: &str, names: &[&str]) -> Vec<Option<String>> {
    let Ok(document) = parse_xml(text) else { return Vec::new() };
    let domain = document.root_element();
    let text = |name: &&str| {
        let found = domain.children().find(|node| node.has_tag_name(*name))?;
        found.text().map(str::trim).filter(|text| !text.is_empty()).map(str::to_owned)
    };
    names.iter().map(text).collect()
}

/// The value of displayName. The text itself is UTF-8: a backup converts or refuses others.
fn vmx_name(text: &str) -> Option<String> {
    let field = |wanted: &str| {
        text.lines().filter_map(|line| line.split_once('=')).find_map(|(name, value)| {
            let value = value.trim();
            let value = value.strip_prefix('"').and_then(|v| v.strip_suffix('"')).unwrap_or(value);
            name.trim().eq_ignore_ascii_case(wanted).then_some(value)
        })
    };
    let bytes = unescaped(field("displayName")?);
    Some(match std::str::from_utf8(&bytes) {
        Err(_) if field(".encoding").is_some_and(is_windows_1252) => from_windows_1252(&bytes),
        _ => String::from_utf8_lossy(&bytes).into_owned(),
    })
}

/// Replaces each `|XX` by the byte that it stands for: VMware writes `"`, `|`, control characters and some others so.
fn unescaped(value: &str) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::with_capacity(value.len()), value.as_bytes());
    while let Some((&first, after)) = rest.split_first() {
        let digits = after.get(..2).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit));
        let byte = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = byte.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match byte.filter(|_| first == b'|') {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(format: &str, text: &str) -> Option<String> {
        let configuration = Configuration { format: format.to_owned(), text: text.to_owned() };
        configured_name(&configuration).map(String::from)
    }

    #[test]
    fn a_title_precedes_the_name() {
        let domain =
            |inner: &str| name(LIBVIRT_XML, &format!("<domain type='kvm'>{inner}</domain>"));
        let both = "<name>vm17</name><title>Web Server 01 &amp; &lt;b&gt;</title>";
        assert_eq!(domain(both).unwrap(), "Web Server 01 & <b>");
        assert_eq!(domain("<name>vm17</name><title> </title>").unwrap(), "vm17");
        assert_eq!(domain("<name>a&#x202e;b&#10;c</name>").unwrap(), "ab c");
        assert_eq!(domain("<metadata><title>other</title></metadata>"), None);
        assert_eq!(name(LIBVIRT_XML, "<!DOCTYPE x><domain/>"), None);
        let text = "<domain><uuid>\n AB-1 </uuid></domain>".to_owned();
        let uuid = configured_uuid(&Configuration { format: LIBVIRT_XML.into(), text });
        assert_eq!(uuid.as_deref(), Some("ab-1"));
    }

    #[test]
    fn a_vmx_is_read_in_its_own_encoding() {
        for (text, expected) in [
            (".encoding = \"UTF-8\"\r\ndisplayName = \"Köln 01\"\r\n", "Köln 01"),
            ("DISPLAYNAME = \"K|C3|B6ln |22alt|22 |7C\"", "Köln \"alt\" |"),
            (".encoding = \"windows-1252\"\ndisplayName = \"K|F6ln |80\"", "Köln €"),
            (".encoding = \"windows-1252\"\ndisplayName = \"K|F6ln = x\"", "Köln = x"),
            ("displayName = \"a|zz|4\"", "a|zz|4"),
            ("displayName = \"a|0Ab|1B[0m\"", "a b[0m"),
            ("displayName = unquoted", "unquoted"),
        ] {
            assert_eq!(name(VMX, text).as_deref(), Some(expected), "{text}");
        }
        assert_eq!(name(VMX, "displayName = \"\"\nmemsize = \"1\""), None);
        assert_eq!(name(VMX, "displayName = \"|\""), Some("|".to_owned()));
    }

    #[test]
    fn a_display_name_is_read_from_coldrise_json() {
        assert_eq!(name(COLDRISE_JSON, r#"{"display_name": "Web 1"}"#).as_deref(), Some("Web 1"));
        assert_eq!(name(COLDRISE_JSON, r#"{"display_name": 1}"#), None);
        assert_eq!(name("other", "displayName = \"x\""), None);
    }
}
