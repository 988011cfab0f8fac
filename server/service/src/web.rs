//! The page: files that the build made, read once at the start, served from memory.
//!
//! Each file has a route of its own, so no request can name another file. `NAME.gz` beside a file is its
//! compressed form, for clients that accept it. Names below `assets/` contain a hash of their content.

use coldrise_block::hex;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use coldrise_block::{Context, Error, ErrorKind, Result};

use crate::access::sha256;

/// Maximum number of files of a page.
const MAX_FILES: usize = 256;
/// Maximum size of all files of a page, in bytes.
const MAX_BYTES: u64 = 16 << 20;
/// Maximum depth of folders.
const MAX_DEPTH: usize = 4;
/// Where the page lies, from the folder of the program: /usr/bin and /usr/share/coldrise/web.
const BESIDE_PROGRAM: &str = "../share/coldrise/web";
/// For files that a browser may keep forever.
const IMMUTABLE: &str = "public, max-age=31536000, immutable";

/// The files of the page, by their path from `/`.
pub(crate) struct Web {
    files: BTreeMap<String, WebFile>,
}

#[derive(Clone)]
struct WebFile {
    content_type: &'static str,
    cache: &'static str,
    etag: HeaderValue,
    plain: Bytes,
    gzip: Option<Bytes>,
}

impl Web {
    /// Reads the page from `directory`; without one, from beside the program. `None` if no page is installed.
    ///
    /// # Errors
    /// `NotFound` if `directory` was given and has no index.html; `InvalidInput` beyond the limits; errors of the
    /// operating system, with the path.
    pub(crate) fn load(directory: Option<&Path>) -> Result<Option<Web>> {
        let found = match directory {
            Some(directory) => directory.to_owned(),
            None => match installed() {
                Some(installed) => installed,
                None => return Ok(None),
            },
        };
        let mut contents = BTreeMap::new();
        let mut left_bytes = MAX_BYTES;
        read_folder(&found, "", MAX_DEPTH, &mut contents, &mut left_bytes)?;
        if !contents.contains_key("index.html") {
            let text = format!("the page in {}: there is no index.html", found.display());
            return Err(Error::new(ErrorKind::NotFound, text).advise("build it: make web"));
        }
        Ok(Some(Web { files: served(contents) }))
    }

    /// A route for each file; `/` is index.html.
    pub(crate) fn router(self) -> Router {
        self.files.into_iter().fold(Router::new(), |router, (path, file)| {
            let path = if path == "index.html" { "/".to_owned() } else { format!("/{path}") };
            router.route(&path, get(move |headers: HeaderMap| async move { file.answer(&headers) }))
        })
    }
}

/// The folder of the installed page, if there is one.
fn installed() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let folder = program.parent()?.join(BESIDE_PROGRAM);
    folder.join("index.html").is_file().then_some(folder)
}

fn read_folder(
    folder: &Path,
    prefix: &str,
    depth: usize,
    contents: &mut BTreeMap<String, Bytes>,
    left_bytes: &mut u64,
) -> Result<()> {
    let what = || format!("reading the page in {}", folder.display());
    let too_large = || {
        let text = format!(
            "the page in {} is not a page: more than {MAX_FILES} files, {MAX_BYTES} bytes or {MAX_DEPTH} folders deep",
            folder.display()
        );
        Err(Error::new(ErrorKind::InvalidInput, text)
            .advise("--web names the folder that `make web` fills"))
    };
    for entry in std::fs::read_dir(folder).context(what)? {
        let entry = entry.context(what)?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let metadata = entry.metadata().context(what)?;
        if metadata.is_dir() {
            if depth == 0 {
                return too_large();
            }
            read_folder(
                &entry.path(),
                &format!("{prefix}{name}/"),
                depth - 1,
                contents,
                left_bytes,
            )?;
        }
        // Routes have words of their own in braces; the build makes no such names.
        if !metadata.is_file() || name.contains(['{', '}']) {
            continue;
        }
        if contents.len() >= MAX_FILES || metadata.len() > *left_bytes {
            return too_large();
        }
        *left_bytes -= metadata.len();
        let content = std::fs::read(entry.path()).context(what)?;
        contents.insert(format!("{prefix}{name}"), content.into());
    }
    Ok(())
}

/// Joins each file with its compressed form.
fn served(mut contents: BTreeMap<String, Bytes>) -> BTreeMap<String, WebFile> {
    let names: Vec<String> = contents.keys().cloned().collect();
    let is_compressed =
        |name: &str| name.strip_suffix(".gz").is_some_and(|of| names.iter().any(|name| name == of));
    let mut files = BTreeMap::new();
    for name in names.iter().filter(|name| !is_compressed(name)) {
        let Some(plain) = contents.remove(name) else { continue };
        let hash = hex::encode(&sha256(&[&plain]));
        let Ok(etag) = HeaderValue::from_str(&format!("\"{}\"", &hash[..32])) else { continue };
        let file = WebFile {
            content_type: content_type(name),
            cache: if name.starts_with("assets/") { IMMUTABLE } else { "no-cache" },
            etag,
            gzip: contents.remove(&format!("{name}.gz")),
            plain,
        };
        files.insert(name.clone(), file);
    }
    files
}

fn content_type(name: &str) -> &'static str {
    match name.rsplit_once('.').map_or("", |(_, extension)| extension) {
        "html" => "text/html; charset=utf-8",
        "js" => "text/javascript; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        "json" | "webmanifest" => "application/json",
        "txt" => "text/plain; charset=utf-8",
        _ => "application/octet-stream",
    }
}

impl WebFile {
    fn answer(&self, request: &HeaderMap) -> Response {
        let has = |name, word: &str| {
            request
                .get_all(name)
                .iter()
                .filter_map(|value| value.to_str().ok())
                .any(|value| value.contains(word))
        };
        let etag = self.etag.to_str().unwrap_or_default();
        let headers = [
            (header::CONTENT_TYPE, HeaderValue::from_static(self.content_type)),
            (header::CACHE_CONTROL, HeaderValue::from_static(self.cache)),
            (header::ETAG, self.etag.clone()),
            (header::VARY, HeaderValue::from_static("accept-encoding")),
        ];
        if has(header::IF_NONE_MATCH, etag) {
            return (StatusCode::NOT_MODIFIED, headers).into_response();
        }
        match &self.gzip {
            Some(gzip) if has(header::ACCEPT_ENCODING, "gzip") => {
                let encoding = [(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"))];
                (headers, encoding, gzip.clone()).into_response()
            }
            _ => (headers, self.plain.clone()).into_response(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Web;

    #[test]
    fn web_folders_without_an_index_or_beyond_the_limits_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Web::load(Some(folder.path())).is_err(), "no index.html");
        std::fs::write(folder.path().join("index.html"), "page").unwrap();
        let file = std::fs::File::create(folder.path().join("large.js")).unwrap();
        file.set_len(super::MAX_BYTES).unwrap();
        assert!(Web::load(Some(folder.path())).is_err(), "too large");
        file.set_len(1).unwrap();
        assert_eq!(Web::load(Some(folder.path())).unwrap().unwrap().files.len(), 2);
        for number in 0..super::MAX_FILES {
            std::fs::write(folder.path().join(number.to_string()), "").unwrap();
        }
        assert!(Web::load(Some(folder.path())).is_err(), "too many");
    }
}
