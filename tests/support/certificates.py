"""TLS certificates of a server and its clients."""

import ssl
import subprocess


def make_certificates(folder):
    """Makes a folder with what `--tls-certificates` and libnbd expect."""
    folder.mkdir()
    for name in ("ca", "server", "client"):
        certificate(folder, name)
    return folder


def certificate(folder, name, *names):
    """A key and a certificate of the folder's authority. `names`: as in "DNS:localhost"."""
    key, request, signed = (folder / f"{name}-{end}" for end in ("key.pem", "csr", "cert.pem"))
    if name == "ca":
        make_key(key, signed, "authority", "-x509")
    else:
        extension = ["-addext", f"subjectAltName={','.join(names)}"] if names else []
        make_key(key, request, "localhost", *extension)
        run("openssl", "x509", "-req", "-in", request, "-out", signed, "-CAcreateserial", "-copy_extensions", "copy",
            "-CA", folder / "ca-cert.pem", "-CAkey", folder / "ca-key.pem")  # fmt: skip


def self_signed(folder, name):
    """A key and a certificate for 127.0.0.1 that is its own authority: their paths."""
    key, signed = folder / "key.pem", folder / "certificate.pem"
    make_key(key, signed, name, "-x509", "-addext", "basicConstraints=critical,CA:FALSE",
             "-addext", "subjectAltName=IP:127.0.0.1")  # fmt: skip
    return key, signed


def make_key(key, out, name, *options):
    """A new key, and a request or with `-x509` a certificate for it."""
    run("openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", key,
        "-out", out, "-subj", f"/CN={name}", *options)  # fmt: skip


def run(*command):
    subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=60)


def client_context(folder):
    """The TLS context of a client with the folder's certificate."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname = False
    tls.load_verify_locations(folder / "ca-cert.pem")
    tls.load_cert_chain(folder / "client-cert.pem", folder / "client-key.pem")
    return tls
