//! TLS 1.3 between two sides that pin each other's key. Nothing else is trusted: there are no
//! names, no authorities, no expiry, no resumption.

use std::fmt;
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::{aws_lc_rs, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, ServerConfig,
    SignatureScheme,
};

use crate::identity::{Identity, PeerKey};

/// Decides about the key of a peer during the handshake.
type Accepts = dyn Fn(&PeerKey) -> bool + Send + Sync;

struct PinnedKeys(Box<Accepts>);

impl fmt::Debug for PinnedKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PinnedKeys")
    }
}

type TlsResult<T> = std::result::Result<T, rustls::Error>;

impl PinnedKeys {
    fn check(&self, key: &CertificateDer<'_>, more: &[CertificateDer<'_>]) -> TlsResult<()> {
        if more.is_empty() && (self.0)(&PeerKey::of(key)) {
            return Ok(());
        }
        Err(CertificateError::ApplicationVerificationFailure.into())
    }
}

/// The signature proves that the peer has the private key.
fn check_signature(
    message: &[u8],
    key: &CertificateDer<'_>,
    signature: &DigitallySignedStruct,
) -> TlsResult<HandshakeSignatureValid> {
    let key = SubjectPublicKeyInfoDer::from(key.as_ref());
    let algorithms = aws_lc_rs::default_provider().signature_verification_algorithms;
    verify_tls13_signature_with_raw_key(message, &key, signature, &algorithms)
}

fn refuse_old<T>() -> TlsResult<T> {
    Err(rustls::Error::General("TLS 1.2 is not spoken here".to_owned()))
}

impl ServerCertVerifier for PinnedKeys {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> TlsResult<ServerCertVerified> {
        self.check(end_entity, intermediates).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> TlsResult<HandshakeSignatureValid> {
        refuse_old()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> TlsResult<HandshakeSignatureValid> {
        check_signature(message, key, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for PinnedKeys {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> TlsResult<ClientCertVerified> {
        self.check(end_entity, intermediates).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> TlsResult<HandshakeSignatureValid> {
        refuse_old()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> TlsResult<HandshakeSignatureValid> {
        check_signature(message, key, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

fn failed(error: impl fmt::Display) -> Error {
    Error::new(ErrorKind::Internal, format!("preparing TLS failed: {error}"))
}

/// For the side that dials.
pub(crate) fn client(
    identity: &Identity,
    accepts: impl Fn(&PeerKey) -> bool + Send + Sync + 'static,
) -> Result<Arc<ClientConfig>> {
    let keys = AlwaysResolvesClientRawPublicKeys::new(identity.certified());
    let mut config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_protocol_versions(&[&TLS13])
        .map_err(failed)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(PinnedKeys(Box::new(accepts))))
        .with_client_cert_resolver(Arc::new(keys));
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    Ok(Arc::new(config))
}

/// For the side that listens.
pub(crate) fn server(
    identity: &Identity,
    accepts: impl Fn(&PeerKey) -> bool + Send + Sync + 'static,
) -> Result<Arc<ServerConfig>> {
    let keys = AlwaysResolvesServerRawPublicKeys::new(identity.certified());
    let mut config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_protocol_versions(&[&TLS13])
        .map_err(failed)?
        .with_client_cert_verifier(Arc::new(PinnedKeys(Box::new(accepts))))
        .with_cert_resolver(Arc::new(keys));
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}
