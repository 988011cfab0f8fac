//! The configuration of a machine, stored with its point.

use std::io::Read;
use std::path::Path;

use coldrise_block::{Context, Error, ErrorKind, Result, from_windows_1252, is_windows_1252};
use coldrise_store::{COLDRISE_JSON, Configuration, LIBVIRT_XML, MAX_CONFIGURATION_BYTES, VMX};

use crate::source::open_named;

/// Reads a configuration. The file's extension determines its format: `.xml` is libvirt's,
/// `.vmx` VMware's, `.json` Coldrise's own. The text is stored unchanged; only a .vmx that names Windows-1252 or
/// ISO 8859-1 as its encoding becomes UTF-8, and then names UTF-8.
///
/// Fails with `InvalidInput` for another extension, for more than
/// [`MAX_CONFIGURATION_BYTES`], for text that is not UTF-8, and for JSON other than an
/// object.
pub fn read_configuration(path: &Path) -> Result<Configuration> {
    let refused = |why: &str| {
        let text = format!("the configuration {} {why}", path.display());
        Error::new(ErrorKind::InvalidInput, text)
    };
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let format = match extension.to_ascii_lowercase().as_str() {
        "xml" => LIBVIRT_XML,
        "vmx" => VMX,
        "json" => COLDRISE_JSON,
        _ => return Err(refused("must be a .xml (libvirt), .vmx or .json file")),
    };
    let what = || format!("reading the configuration {}", path.display());
    let file = open_named(path).map_err(|error| error.context("the configuration"))?;
    if !file.metadata().context(what)?.is_file() {
        return Err(refused("is not a file"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_CONFIGURATION_BYTES as u64 + 1).read_to_end(&mut bytes).context(what)?;
    if bytes.len() > MAX_CONFIGURATION_BYTES {
        return Err(refused(&format!("is larger than {MAX_CONFIGURATION_BYTES} bytes")));
    }
    let text = match String::from_utf8(bytes) {
        Err(error) if format == VMX => converted_vmx(error.as_bytes()),
        text => text.ok(),
    };
    let text = text.ok_or_else(|| refused("is not UTF-8 text"))?;
    if text.trim().is_empty() || text.contains('\0') {
        return Err(refused("is empty or contains NUL"));
    }
    if format == COLDRISE_JSON {
        let is_object =
            serde_json::from_str::<serde_json::Value>(&text).is_ok_and(|value| value.is_object());
        if !is_object {
            return Err(refused("is not a JSON object"));
        }
    }
    Ok(Configuration { format: format.to_string(), text })
}

/// A .vmx as UTF-8, which its line `.encoding` then names; `None` if that line names an encoding that is not known here.
fn converted_vmx(bytes: &[u8]) -> Option<String> {
    let text = from_windows_1252(bytes);
    let (mut converted, mut is_known) = (String::with_capacity(text.len()), false);
    for line in text.split_inclusive('\n') {
        let (name, value) = line.split_once('=').unwrap_or((line, ""));
        let value = value.trim();
        if name.trim().eq_ignore_ascii_case(".encoding") && is_windows_1252(value.trim_matches('"'))
        {
            is_known = true;
            converted.push_str(&line.replacen(value, "\"UTF-8\"", 1));
        } else {
            converted.push_str(line);
        }
    }
    is_known.then_some(converted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    fn read(name: &str, content: &[u8]) -> Result<Configuration> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        read_configuration(&path)
    }

    #[test]
    fn the_text_is_kept_with_its_kind() {
        for (name, content, format) in [
            ("web.xml", "<domain type='kvm'>\n</domain>\n", LIBVIRT_XML),
            ("Web.VMX", ".encoding = \"UTF-8\"\r\n", VMX),
            ("web.json", "{\"memory_bytes\": 1}", COLDRISE_JSON),
        ] {
            let configuration = read(name, content.as_bytes()).unwrap();
            assert_eq!(
                (configuration.format.as_str(), configuration.text.as_str()),
                (format, content)
            );
        }
    }

    #[test]
    fn a_vmx_in_an_old_encoding_becomes_utf8() {
        let old = b".encoding = \"windows-1252\"\r\ndisplayName = \"K\xF6ln\"\r\n";
        let text = read("web.vmx", old).unwrap().text;
        assert_eq!(text, ".encoding = \"UTF-8\"\r\ndisplayName = \"Köln\"\r\n");
        let unknown = b".encoding = \"GBK\"\ndisplayName = \"\xC4\xE3\"\n";
        assert_eq!(read("web.vmx", unknown).unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn invalid_configuration_files_are_refused() {
        let long = vec![b'x'; MAX_CONFIGURATION_BYTES + 1];
        for (name, content) in [
            ("web.txt", b"x".as_slice()),
            ("web.vmx", &long),
            ("web.vmx", b"name = \"\xFF\""),
            ("web.xml", b" \n"),
            ("web.json", b"[1]"),
            ("web.json", b"{"),
        ] {
            let error = read(name, content).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{name}");
            assert!(error.to_string().contains(name));
        }
        assert!(read("web.vmx", &long[1..]).is_ok());
        // A pipe is not waited for.
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("web.xml");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert_eq!(read_configuration(&pipe).unwrap_err().kind(), ErrorKind::InvalidInput);
        let missing = read_configuration(Path::new("/none/web.xml")).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
    }
}
