//! The certificate: `tls/cert.pem` and `tls/key.pem` in the state folder.
//!
//! A self-signed one is made at the first start. An administrator can put another in its place;
//! SIGHUP loads it.

use coldrise_block::hex;
use std::path::PathBuf;
use std::sync::Arc;

use coldrise_block::{Context, Error, ErrorKind, Result, replace_file};
use parking_lot::RwLock;
use rcgen::{CertificateParams, DnType, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

use crate::arguments::Options;

/// Validity of a self-signed certificate, in days.
const LIFETIME_DAYS: i64 = 3650;

/// The certificate in use.
pub(crate) struct Certificate {
    files: Files,
    acceptor: RwLock<TlsAcceptor>,
}

struct Files {
    certificate: PathBuf,
    key: PathBuf,
}

impl Files {
    fn of(options: &Options) -> Files {
        let folder = options.state.join("tls");
        Files { certificate: folder.join("cert.pem"), key: folder.join("key.pem") }
    }
}

impl Certificate {
    /// Loads the certificate; makes one if there is none.
    ///
    /// # Errors
    /// `InvalidInput` if the files are not a certificate and its key.
    pub(crate) fn open(options: &Options) -> Result<Certificate> {
        let files = Files::of(options);
        if !coldrise_block::path_exists(&files.certificate)? {
            make(&files, options)?;
        }
        let acceptor = RwLock::new(load(&files)?);
        Ok(Certificate { files, acceptor })
    }

    /// Loads the files again. On an error the certificate in use stays.
    ///
    /// # Errors
    /// As [`Certificate::open`].
    pub(crate) fn reload(&self) -> Result<()> {
        *self.acceptor.write() = load(&self.files)?;
        Ok(())
    }

    pub(super) fn acceptor(&self) -> TlsAcceptor {
        self.acceptor.read().clone()
    }
}

fn refused(path: &std::path::Path, error: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("{}: {error}", path.display())).advise(
        "put a certificate and its key in PEM format there, or remove both files and restart \
         coldrised: it makes new ones",
    )
}

fn chain(files: &Files) -> Result<Vec<CertificateDer<'static>>> {
    CertificateDer::pem_file_iter(&files.certificate)
        .and_then(Iterator::collect)
        .map_err(|error| refused(&files.certificate, error))
}

fn load(files: &Files) -> Result<TlsAcceptor> {
    let chain = chain(files)?;
    let key =
        PrivateKeyDer::from_pem_file(&files.key).map_err(|error| refused(&files.key, error))?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
        .map_err(|error| refused(&files.certificate, error))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Makes a self-signed certificate. The key comes first: a certificate without a key never
/// stands there after a crash.
fn make(files: &Files, options: &Options) -> Result<()> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = host.trim();
    let mut names = vec!["localhost".to_owned(), "127.0.0.1".to_owned(), "::1".to_owned()];
    if !options.listen.ip().is_unspecified() {
        names.push(options.listen.ip().to_string());
    }
    if !host.is_empty() && host.is_ascii() {
        names.push(host.to_owned());
    }
    names.sort();
    names.dedup();
    let made = || {
        let mut parameters = CertificateParams::new(names)?;
        let name = if host.is_empty() { "coldrised" } else { host };
        parameters.distinguished_name.push(DnType::CommonName, name);
        let day = |days: i64| {
            let at = jiff::Timestamp::now() + jiff::SignedDuration::from_hours(24 * days);
            let date = at.to_zoned(jiff::tz::TimeZone::UTC).date();
            let month = u8::try_from(date.month()).unwrap_or(1);
            rcgen::date_time_ymd(
                i32::from(date.year()),
                month,
                u8::try_from(date.day()).unwrap_or(1),
            )
        };
        // From yesterday on: clocks of clients may be behind.
        (parameters.not_before, parameters.not_after) = (day(-1), day(LIFETIME_DAYS));
        let key = KeyPair::generate()?;
        let certificate = parameters.self_signed(&key)?;
        Ok((key.serialize_pem(), certificate.pem()))
    };
    let (key, certificate) = made().map_err(|error: rcgen::Error| {
        Error::new(ErrorKind::Internal, format!("making a certificate failed: {error}"))
    })?;
    if let Some(folder) = files.key.parent() {
        std::fs::create_dir_all(folder).context(|| format!("creating {}", folder.display()))?;
    }
    replace_file(&files.key, key.as_bytes())?;
    replace_file(&files.certificate, certificate.as_bytes())
}

/// The SHA-256 fingerprint of the first certificate, as browsers show it; `None` if there is none.
pub(crate) fn fingerprint(options: &Options) -> Option<String> {
    let chain = chain(&Files::of(options)).ok()?;
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, chain.first()?);
    let text = hex::encode(digest.as_ref()).to_ascii_uppercase();
    let pairs: Vec<&str> = (0..text.len()).step_by(2).filter_map(|i| text.get(i..i + 2)).collect();
    Some(pairs.join(":"))
}
