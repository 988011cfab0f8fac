//! Decides whether a server's certificate is believed. A refusal names the thumbprint, so that people can compare it.

use std::fmt;
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, OtherError, RootCertStore, SignatureScheme};

use super::Thumbprint;

#[derive(Debug)]
enum Rule {
    Roots(Arc<WebPkiServerVerifier>),
    Thumbprint(Thumbprint),
}

/// Verifies one connection after the other by the same rule.
#[derive(Debug)]
pub(super) struct Verifier {
    rule: Rule,
    algorithms: WebPkiSupportedAlgorithms,
}

/// Why a certificate is not believed, in words for people.
#[derive(Debug)]
pub(super) struct Refusal(String);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

impl Verifier {
    /// Believes what these authorities have signed, for the server's name and the present time.
    ///
    /// # Errors
    /// `InvalidInput` if none of them can be used.
    pub(super) fn of_roots(
        roots: RootCertStore,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Verifier> {
        let built =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider));
        let roots = built.build().map_err(|error| {
            Error::with_source(ErrorKind::InvalidInput, "the trusted certificates", error)
        })?;
        let algorithms = provider.signature_verification_algorithms;
        Ok(Verifier { rule: Rule::Roots(roots), algorithms })
    }

    /// Trusts one certificate. Only the holder of its key can use it: the handshake's signature is checked as always.
    pub(super) fn of_thumbprint(
        thumbprint: Thumbprint,
        provider: &Arc<CryptoProvider>,
    ) -> Verifier {
        let algorithms = provider.signature_verification_algorithms;
        Verifier { rule: Rule::Thumbprint(thumbprint), algorithms }
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        let presented = Thumbprint::of(end_entity);
        let why = match &self.rule {
            Rule::Roots(roots) => {
                let verified = roots.verify_server_cert(
                    end_entity,
                    intermediates,
                    server_name,
                    ocsp_response,
                    now,
                );
                match verified {
                    Ok(verified) => return Ok(verified),
                    Err(error) => error.to_string(),
                }
            }
            Rule::Thumbprint(wanted) if *wanted == presented => {
                return Ok(ServerCertVerified::assertion());
            }
            Rule::Thumbprint(_) => "its certificate has another thumbprint".to_owned(),
        };
        let text =
            format!("{why}; it presented the certificate with the SHA-256 thumbprint {presented}");
        let refusal = OtherError(Arc::new(Refusal(text)));
        Err(rustls::Error::InvalidCertificate(CertificateError::Other(refusal)))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
