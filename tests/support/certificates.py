"""TLS certificates of a server and its clients."""

import ssl
import subprocess


def make_certificates(folder):
    """Makes a folder with what `--tls-certificates` and libnbd expect."""
    folder.mkdir()
    for name in ("ca", "server", "client"):
        certificate(folder, name)
    return folder


def certificate(folder, name):
    """A key and a certificate of the folder's authority."""
    key, request, signed = (folder / f"{name}-{end}" for end in ("key.pem", "csr", "cert.pem"))
    new = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
           "-keyout", key]
    if name == "ca":
        run(*new, "-x509", "-out", signed, "-subj", "/CN=authority")
    else:
        run(*new, "-out", request, "-subj", "/CN=localhost")
        run("openssl", "x509", "-req", "-in", request, "-out", signed, "-CAcreateserial",
            "-CA", folder / "ca-cert.pem", "-CAkey", folder / "ca-key.pem")  # fmt: skip


def run(*command):
    subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=60)


def client_context(folder):
    """The TLS context of a client with the folder's certificate."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname = False
    tls.load_verify_locations(folder / "ca-cert.pem")
    tls.load_cert_chain(folder / "client-cert.pem", folder / "client-key.pem")
    return tls
