"""The API against its own description: generated requests, none of which may be a server error.

A bounded part of what schemathesis can do, the same requests in each run; `make fuzz-api` does more.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from support.cli import ROOT
from support.image import Image
from support.nbdserver import wait_until
from support.service import Coldrised

MIB = 1 << 20
PACKAGES = ROOT / "build" / "schemathesis"
# The stream never ends; targets would send to generated addresses, and hypervisors connect to them.
LEFT_OUT = ["/api/v1/events", "/api/v1/notifications/targets", "/api/v1/notifications/targets/{id}",
            "/api/v1/notifications/targets/{id}/test", "/api/v1/hypervisors/{name}", "/api/v1/hypervisors/{name}/test",
            "/api/v1/kvm-hosts/{name}", "/api/v1/kvm-hosts/{name}/check"]


@pytest.fixture
def service(tmp_path, coldrise):
    image = Image(MIB)
    image.fill(0, MIB // 2, "random")
    disk = image.save(tmp_path / "disk.raw")
    coldrise.backup("web01", vda=disk)
    coldrise.publish("web01/latest", "trial")
    with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file) as service:
        yield service
        # Generated requests start servers and machines, which outlive the service.
        for run in service.get("runs?state=running")["runs"]:
            service.call("POST", f"runs/{run['id']}/cancel", {})
        wait_until(lambda: not service.get("runs?state=running")["runs"], "the runs end")


def test_no_generated_request_is_a_server_error(service, tmp_path, pytestconfig):
    assert PACKAGES.is_dir(), "make test-deps installs schemathesis"
    description = tmp_path / "openapi.json"
    description.write_bytes(service.call("GET", "openapi.json").body)
    config = tmp_path / "config"
    config.mkdir()
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", description,
        "--url", f"https://127.0.0.1:{service.port}",
        "--tls-verify", service.state / "tls" / "cert.pem",
        "--header", f"Authorization: Bearer {service.token('admin')}",
        "--phases", "examples,coverage,fuzzing", "--mode", "all",
        "--checks", "not_a_server_error,content_type_conformance,response_schema_conformance",
        "--max-examples", str(pytestconfig.getoption("--api-examples")),
        "--generation-deterministic",
        "--suppress-health-check", "all", "--warnings", "off", "--no-color",
        "--continue-on-failure", "--request-timeout", "30",
    ]
    for path in LEFT_OUT:
        command += ["--exclude-path", path]
    done = subprocess.run([str(word) for word in command], cwd=config, capture_output=True, text=True, timeout=1500,
                          env={**os.environ, "PYTHONPATH": str(PACKAGES), "HOME": str(config)})
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "not_a_server_error" in done.stdout or "No issues found" in done.stdout, done.stdout
    # It still works, and its database is intact.
    assert service.get("machines")[0]["machine"] == "web01"
    assert pathlib.Path(service.state / "coldrised.db").exists()
